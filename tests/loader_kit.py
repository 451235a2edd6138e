"""What the loader's tests share: stand-in drivers, and bundles read by other means than the loader's."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from fake_driver import FakeCuda, FakeDevice, FakeHip

from fp8_aot.loader import driver
from fp8_aot.loader.schema import Kernel, abi_of, decode, encode, write
from fp8_aot.loader.views import TensorView

BACKENDS = {"sm90": "cuda", "sm100": "cuda", "gfx942": "hip"}
ARCHES = {"sm90": "90", "sm100": "100", "gfx942": "gfx942:sramecc+:xnack-"}
BASE = 0x7F00_0000_0000


def stand_in(target: str, count: int = 1, **options: Any) -> FakeCuda | FakeHip:
    """A stand-in with ``count`` devices of a target, installed as the driver of its backend."""
    arch = ARCHES[target]
    if BACKENDS[target] == "cuda":
        fake: FakeCuda | FakeHip = FakeCuda([FakeDevice(arch)] * count, **options)
    else:
        fake = FakeHip([FakeDevice(arch, shared=65_536, warp_size=64)] * count, **options)
    driver.install(fake.driver())
    return fake


def manifest_of(path: Path) -> dict[str, Any]:
    """A bundle's manifest, read with the standard library alone."""
    with zipfile.ZipFile(path) as archive:
        read: dict[str, Any] = json.loads(archive.read("manifest.json"))
    return read


def objects_of(path: Path) -> dict[str, bytes]:
    """A bundle's objects by entry name, read with the standard library alone."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name != "manifest.json"}


def write_bundle(path: Path, manifest: Mapping[str, Any], objects: Mapping[str, bytes] | None = None) -> Path:
    """A bundle file of a manifest, checked by the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write(encode(decode(json.dumps(manifest).encode(), "test")), objects or {}))
    return path


def with_abi(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel of a manifest that was changed, with the abi that it now has."""
    made = msgspec.convert(kernel, Kernel)
    return {**kernel, "abi": abi_of(made.tensors, made.args, made.dtypes)}


def kernel_of(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A kernel of a manifest."""
    (found,) = (kernel for kernel in manifest["kernels"] if kernel["name"] == name)
    return dict(found)


def extents(tensor: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, int]:
    """The shape of a tensor of a manifest."""
    rows, cols = ((sizes[dim["symbol"]] + dim["group"] - 1) // dim["group"] for dim in tensor["shape"])
    return rows, cols


def dtype_of(manifest: Mapping[str, Any], tensor: Mapping[str, Any], dtypes: Mapping[str, str]) -> str:
    """The dtype of a tensor of a manifest, for a choice of the dtype axes."""
    fp8 = {"fp8": manifest["target"]["fp8"]}
    return str({**fp8, **dtypes}.get(tensor["dtype"], tensor["dtype"]))


def views_of(
    manifest: Mapping[str, Any],
    kernel: str,
    dtypes: Mapping[str, str],
    sizes: Mapping[str, int],
    *,
    pad: Mapping[str, int] | None = None,
    shift: Mapping[str, int] | None = None,
) -> dict[str, TensorView]:
    """Tensors for a launch, at made-up addresses that are multiples of 4096.

    ``pad`` adds elements to a tensor's stride, ``shift`` bytes to its address.
    """
    views = {}
    for number, tensor in enumerate(kernel_of(manifest, kernel)["tensors"]):
        name, shape = tensor["name"], extents(tensor, sizes)
        line = max(shape[tensor["unit_dim"]], 1) + (pad or {}).get(name, 0)
        strides = (line, 1) if tensor["unit_dim"] else (1, line)
        address = BASE + 0x1_0000_0000 * number + (shift or {}).get(name, 0)
        views[name] = TensorView(address, dtype_of(manifest, tensor, dtypes), shape, strides)
    return views


def argument_values(
    manifest: Mapping[str, Any], kernel: str, sizes: Mapping[str, int], views: Mapping[str, TensorView]
) -> dict[str, int]:
    """Values of a kernel's arguments, in order, from the manifest's description."""
    values = {}
    for arg in kernel_of(manifest, kernel)["args"]:
        if arg["role"] == "pointer":
            values[arg["name"]] = views[arg["tensor"]].ptr
        elif arg["role"] == "size":
            values[arg["name"]] = sizes[arg["symbol"]]
        else:
            strides = views[arg["tensor"]].strides
            assert strides is not None
            values[arg["name"]] = strides[arg["dim"]]
    return values


def expected_variant(
    manifest: Mapping[str, Any],
    kernel: str,
    dtypes: Mapping[str, str],
    sizes: Mapping[str, int],
    values: Mapping[str, int],
) -> dict[str, Any]:
    """The variant that the manifest's rules ask for, worked out again."""
    variants = {variant["id"]: variant for variant in manifest["variants"]}
    (entry,) = (d for d in manifest["dispatch"] if d["kernel"] == kernel and d["dtypes"] == dtypes)
    for rule in entry["rules"]:
        low = all(c["least"] is None or c["least"] <= sizes[c["symbol"]] for c in rule["when"])
        high = all(c["most"] is None or sizes[c["symbol"]] <= c["most"] for c in rule["when"])
        for kind in ("aligned", "general") if low and high else ():
            variant = variants.get(rule["variants"].get(kind, ""))
            if variant and not any(values[name] % 16 for name in variant["divisible_by_16"]):
                return dict(variant)
    raise AssertionError("no rule fits")


def packed(manifest: Mapping[str, Any], variant: Mapping[str, Any], values: Mapping[str, int]) -> bytes:
    """The parameters of a launch: int32 sizes, int64 strides, pointers, two scratch pointers that are 0."""
    args = kernel_of(manifest, variant["kernel"])["args"]
    formats = [{"pointer": "<Q", "size": "<i", "stride": "<q"}[arg["role"]] for arg in args]
    raw = bytearray(max(place["offset"] + place["size"] for place in variant["params"]))
    for form, arg, place in zip(formats, args, variant["params"], strict=False):
        assert struct.calcsize(form) == place["size"]
        struct.pack_into(form, raw, place["offset"], values[arg["name"]])
    assert len(variant["params"]) == len(args) + 2
    return bytes(raw)
