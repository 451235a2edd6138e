"""Checking a bundle without a GPU: every byte, every object's target, every parameter list."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fp8_aot.aot.elf import ElfError, ObjectInfo, read_object
from fp8_aot.aot.opened import Opened, open_bundle
from fp8_aot.loader import schema


def verify(path: Path) -> tuple[Opened, list[str]]:
    """A bundle and everything that is wrong with it, in words.

    The checks: the file is canonical and no content has a flipped bit; the manifest is well formed and
    written as the builder writes it; each object is there, none is left over, and each has its digest
    and size; each object's ELF is for the bundle's target; and the kernel that each variant names has
    exactly the parameters that the manifest states, and its registers, spills, static shared memory and threads.

    Raises:
        WorkError, BundleError: the file cannot be read as a bundle at all.
    """
    bundle = open_bundle(path)
    data = bundle.data
    problems = [f"{name}: contents are damaged (CRC)" for name in schema.damaged(data, str(path))]
    entries = schema.read(data, str(path))
    if bytes(entries["manifest.json"]) != schema.encode(bundle.manifest):
        problems.append("manifest.json: not in the form in which the builder writes it")
    extension = "cubin" if bundle.manifest.target.backend == "cuda" else "hsaco"
    problems += [f"{name}: not an object of this target" for name in list(entries)[1:] if not name.endswith(extension)]
    used = {v.object for v in bundle.manifest.variants}
    problems += [f"objects/{sha}: belongs to no variant" for sha in bundle.objects if sha not in used]
    infos: dict[str, ObjectInfo | None] = {}
    for sha, view in bundle.objects.items():
        if hashlib.sha256(view).hexdigest() != sha:
            problems.append(f"objects/{sha}: contents have another sha256")
        infos[sha] = _read(sha, view, problems)
    for variant in bundle.manifest.variants:
        if variant.object not in bundle.objects:
            problems.append(f"{variant.id}: its object {variant.object} is missing")
            continue
        if len(bundle.objects[variant.object]) != variant.object_size:
            problems.append(f"{variant.id}: object of {len(bundle.objects[variant.object])} bytes, "
                            f"the manifest says {variant.object_size}")  # fmt: skip
        info = infos[variant.object]
        if info is not None:
            problems += [f"{variant.id}: {what}" for what in _compare(variant, info, bundle.manifest.target)]
    return bundle, problems


def _read(sha: str, view: memoryview, problems: list[str]) -> ObjectInfo | None:
    try:
        return read_object(bytes(view))
    except ElfError as error:
        problems.append(f"objects/{sha}: {error}")
        return None


def _compare(variant: schema.Variant, info: ObjectInfo, target: schema.Target) -> list[str]:
    wrong = []
    # Triton assembles for the architecture-specific feature set, 90a for 90.
    if info.backend != target.backend or info.arch.rstrip("a") != target.arch.rstrip("a"):
        wrong.append(f"object is for {info.backend} {info.arch}, the bundle for {target.backend} {target.arch}")
    kernel = next((k for k in info.kernels if k.symbol == variant.symbol), None)
    if kernel is None:
        return [*wrong, f"object has no kernel {variant.symbol}"]
    stated = tuple((p.offset, p.size) for p in variant.params)
    if kernel.params != stated:
        wrong.append(f"object takes parameters (offset, size) {kernel.params}, the manifest says {stated}")
    facts = {
        "registers": (kernel.registers, variant.registers),
        "bytes of spills": (kernel.spills, variant.spills),
        "bytes of static shared memory": (kernel.static_shared, variant.static_shared),
    }
    if kernel.max_threads is not None:
        facts["threads"] = (kernel.max_threads, variant.threads)
    for what, (found, said) in facts.items():
        if found != said:
            wrong.append(f"object has {found} {what}, the manifest says {said}")
    return wrong
