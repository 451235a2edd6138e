"""``fp8-aot inspect`` shows what a bundle holds, ``fp8-aot verify`` finds whatever is wrong with one."""

from __future__ import annotations

import hashlib
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from building import parts
from conftest import fp8_aot

from fp8_aot.aot.cli import run
from fp8_aot.loader import schema
from fp8_aot.loader.schema import Manifest, Variant

replace = msgspec.structs.replace
TARGETS = ("sm90", "sm100", "gfx942")


@pytest.fixture(scope="module", params=TARGETS)
def whole(request: pytest.FixtureRequest, bundles: Path) -> Path:
    """The bundle of each target."""
    return bundles / f"{request.param}.zip"


def write(path: Path, manifest: Manifest, objects: dict[str, bytes]) -> Path:
    """A bundle all of whose CRCs are right."""
    path.write_bytes(schema.write(schema.encode(manifest), objects))
    return path


@pytest.fixture
def small(whole: Path, tmp_path: Path) -> Path:
    """One kernel and dtype of a bundle, as a bundle of its own."""
    manifest, objects = parts(whole)
    name, dtypes = "gemm_1x128_128x1", {"out": "bf16"}
    variants = tuple(v for v in manifest.variants if (v.kernel, v.dtypes) == (name, dtypes))
    cut = replace(
        manifest,
        kernels=tuple(k for k in manifest.kernels if k.name == name),
        variants=variants,
        dispatch=tuple(d for d in manifest.dispatch if (d.kernel, d.dtypes) == (name, dtypes)),
    )
    used = {v.object for v in variants}
    return write(
        tmp_path / f"{manifest.target.name}.zip",
        cut,
        {n: data for n, data in objects.items() if n.removeprefix("objects/").partition(".")[0] in used},
    )


def found(capsys: pytest.CaptureFixture[str], path: Path) -> list[str]:
    """The problems that ``verify`` finds; its exit status must agree."""
    status = run(["verify", "--json", str(path)])
    (result,) = json.loads(capsys.readouterr().out)
    assert status == (1 if result["problems"] else 0)
    assert result["ok"] == (not result["problems"])
    assert result["bundle"] == str(path)
    problems: list[str] = result["problems"]
    return problems


# --------------------------------------------------------------------------------------------- inspect


def test_inspect_json_is_the_manifest(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(whole), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.pop("bundle") == str(whole)
    assert shown.pop("bytes") == whole.stat().st_size
    with zipfile.ZipFile(whole) as archive:
        assert shown == json.loads(archive.read("manifest.json"))


def test_inspect_shows_all_that_is_there(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    manifest, _ = parts(whole)
    assert run(["inspect", str(whole)]) == 0
    text = capsys.readouterr().out
    target, toolchain = manifest.target, manifest.toolchain
    assert f"{whole}: {whole.stat().st_size:,} bytes" in text
    assert f"{target.name}: {target.backend} {target.arch}, {target.fp8}, warps of {target.warp_size}" in text
    assert f"Triton {toolchain.triton}, {toolchain.assembler.name} {toolchain.assembler.version}" in text
    assert str(toolchain.min_driver) in text
    assert str(manifest.provenance.commit or "unknown") in text
    lines = [line.split() for line in text.splitlines()]
    for kernel in manifest.kernels:
        assert f"{kernel.name}: {kernel.promise}" in text
    for v in manifest.variants:
        numbers = [f"{n:,}" for n in (v.registers, v.spills, v.shared + v.static_shared, v.object_size)]
        assert [",".join(v.dtypes.values()), v.tile, v.specialization, *numbers, v.object[:12]] in lines
    rules = sum(len(entry.rules) for entry in manifest.dispatch)
    assert len(re.findall(r"^  [a-z0-9,]+: (?:otherwise|.*<=.*): ", text, re.MULTILINE)) == rules


def test_inspect_some_kernels(bundles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bundles / "sm90.zip"
    assert run(["inspect", str(path), "--json", "--kernel", "*_rhs", "--kernel", "gemm_1x128_128x1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    names = {"act_quant_rhs", "weight_quant_rhs", "weight_quant_transposed_rhs", "gemm_1x128_128x1"}
    for key, field in (("kernels", "name"), ("variants", "kernel"), ("dispatch", "kernel")):
        assert {entry[field] for entry in shown[key]} == names
    manifest, _ = parts(path)
    assert len(shown["variants"]) == sum(v.kernel in names for v in manifest.variants)
    assert run(["inspect", str(path), "--kernel", "gem"]) == 2
    assert "'gem'" in (error := capsys.readouterr().err) or "gem matches no kernel" in error


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("what", ["missing", "empty", "text", "other zip", "cut"])
def test_no_bundle(command: str, what: str, bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.zip"
    if what == "other zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("manifest.json", "{}")
    elif what != "missing":
        data = (bundles / "sm90.zip").read_bytes()
        path.write_bytes({"empty": b"", "text": b"not a bundle\n" * 100, "cut": data[:-1]}[what])
    assert run([command, str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert str(path) in printed.err
    assert ("cannot read" if what == "missing" else "not a whole bundle") in printed.err
    assert printed.err.count(str(path)) == 1


def test_a_newer_schema(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, objects = parts(small)
    write(small, replace(manifest, schema=schema.SCHEMA + 1), objects)
    for command in ("inspect", "verify"):
        assert run([command, str(small)]) == 1
        assert f"manifest schema {schema.SCHEMA + 1}, this fp8-aot reads schema {schema.SCHEMA}" in (
            capsys.readouterr().err
        )


# ---------------------------------------------------------------------------------------------- verify


def test_good_bundles(bundles: Path) -> None:
    paths = sorted(bundles.glob("*.zip"))
    done = fp8_aot("verify", *paths)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for path, line in zip(paths, lines, strict=True):
        manifest, objects = parts(path)
        counts = f"{len(manifest.variants)} variants, {len(objects)} objects, {path.stat().st_size:,} bytes"
        assert line == f"{path}: good: {counts}"


def test_several_bundles_one_of_them_bad(bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.zip"
    bad.write_bytes((bundles / "sm90.zip").read_bytes()[:-5])
    paths = [bundles / "sm90.zip", bad, bundles / "gfx942.zip", tmp_path / "none.zip"]
    assert run(["verify", *map(str, paths)]) == 1
    printed = capsys.readouterr()
    assert [line.split(": ")[0] for line in printed.out.splitlines()] == [str(paths[0]), str(paths[2])]
    assert [line.split(": ")[0] for line in printed.err.splitlines()] == [str(bad), str(paths[3])]
    assert run(["verify", "--json", *map(str, paths)]) == 1
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert printed.err == ""
    assert [(r["bundle"], r["ok"]) for r in results] == [
        (str(path), ok) for path, ok in zip(paths, (True, False, True, False), strict=True)
    ]


def test_any_flipped_bit(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small.read_bytes()
    assert found(capsys, small) == []
    start = int.from_bytes(data[-6:-2], "little")
    manifest_end = 30 + len("manifest.json") + int.from_bytes(data[18:22], "little")
    # All of the first header and of the end record; samples of the manifest, of objects, of the directory.
    places = [*range(43), *range(len(data) - 22, len(data))]
    random.seed(0)
    for low, high, count in ((43, manifest_end, 40), (manifest_end, start, 60), (start, len(data) - 22, 60)):
        places += random.sample(range(low, high), count)
    damaged = tmp_path / "damaged.zip"
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << random.randrange(8)
        damaged.write_bytes(changed)
        assert found(capsys, damaged), f"byte {place} of {len(data)}"


def test_cut_or_longer(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small.read_bytes()
    damaged = tmp_path / "damaged.zip"
    for changed in (data[:-1], data[: len(data) // 2], data[:10], data + b"\0", b"\0" + data):
        damaged.write_bytes(changed)
        assert found(capsys, damaged)


def first(change: Callable[[Variant], Variant]) -> Callable[[Manifest], Manifest]:
    """A change to a manifest that changes its first variant."""
    return lambda m: replace(m, variants=(change(m.variants[0]), *m.variants[1:]))


def shifted(v: Variant) -> Variant:
    last = replace(v.params[-1], offset=v.params[-1].offset + 8)
    return replace(v, params=(*v.params[:-1], last))


def exchanged(v: Variant) -> Variant:
    return replace(v, params=(v.params[1], v.params[0], *v.params[2:]))


WRONG: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "offset": (first(shifted), "takes parameters"),
    "order": (first(exchanged), "overlaps"),
    "registers": (first(lambda v: replace(v, registers=v.registers + 1)), "registers, the manifest says"),
    "spills": (first(lambda v: replace(v, spills=8)), "bytes of spills, the manifest says 8"),
    "static": (first(lambda v: replace(v, static_shared=v.static_shared + 16)), "bytes of static shared memory"),
    "threads": (first(lambda v: replace(v, threads=v.threads * 2)), "threads, the manifest says"),
    "symbol": (first(lambda v: replace(v, symbol="other")), "no kernel other"),
    "size": (first(lambda v: replace(v, object_size=v.object_size - 1)), "the manifest says"),
    "missing": (first(lambda v: replace(v, object="0" * 64)), f"its object {'0' * 64} is missing"),
    "too few": (first(lambda v: replace(v, params=v.params[:-1])), "parameters for"),
    "word": (
        first(lambda v: replace(v, params=(replace(v.params[0], size=4), *v.params[1:]))),
        "has a parameter of 4 bytes",
    ),
    "arch": (
        lambda m: replace(m, target=replace(m.target, arch={"90": "100", "100": "90"}.get(m.target.arch, "gfx950"))),
        "object is for",
    ),
    "family": (
        lambda m: replace(m, target=replace(m.target, arch={"90": "80", "100": "10"}.get(m.target.arch, "gfx90a"))),
        "object is for",
    ),
    "last resort": (
        lambda m: replace(m, dispatch=tuple(replace(d, rules=d.rules[:-1]) for d in m.dispatch)),
        "no last rule that serves any launch",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_that_does_not_say_what_the_objects_do(
    what: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = WRONG[what]
    manifest, objects = parts(small)
    write(small, change(manifest), objects)
    assert any(words in problem for problem in found(capsys, small))


def test_objects_of_two_variants_exchanged(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, objects = parts(whole)
    one, other = (next(v for v in manifest.variants if v.kernel == k) for k in ("act_quant_lhs", "gemm_1x128_128x1"))
    swap = {one.id: other, other.id: one}
    variants = tuple(
        replace(v, object=swap[v.id].object, object_size=swap[v.id].object_size) if v.id in swap else v
        for v in manifest.variants
    )
    path = write(tmp_path / "x.zip", replace(manifest, variants=variants), objects)
    problems = found(capsys, path)
    for variant in (one, other):
        assert f"{variant.id}: object has no kernel {variant.symbol}" in problems


def test_an_object_of_another_target(bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same kernel compiled for another GPU, under a name and a digest that are right."""
    manifest, objects = parts(bundles / "sm90.zip")
    theirs, their_objects = parts(bundles / "sm100.zip")
    v = manifest.variants[0]
    w = next(w for w in theirs.variants if w.id == v.id)
    changed = replace(manifest, variants=(replace(w, object=w.object), *manifest.variants[1:]))
    objects[f"objects/{w.object}.cubin"] = their_objects[f"objects/{w.object}.cubin"]
    if not any(u.object == v.object for u in changed.variants):
        del objects[f"objects/{v.object}.cubin"]
    problems = found(capsys, write(tmp_path / "x.zip", changed, objects))
    assert problems == [f"{v.id}: object is for cuda 100a, the bundle for cuda 90"]


def test_contents_under_a_wrong_name(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, objects = parts(small)
    names = sorted(objects)
    objects[names[0]], objects[names[1]] = objects[names[1]], objects[names[0]]
    problems = found(capsys, write(small, manifest, objects))
    for name in names[:2]:
        digest = name.removeprefix("objects/").partition(".")[0]
        assert f"objects/{digest}: contents have another sha256" in problems


def test_missing_and_left_over_objects(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, objects = parts(small)
    extension = "hsaco" if manifest.target.backend == "hip" else "cubin"
    name, data = next(iter(objects.items()))
    without = {n: d for n, d in objects.items() if n != name}
    problems = found(capsys, write(small, manifest, without))
    digest = name.removeprefix("objects/").partition(".")[0]
    assert [f"{v.id}: its object {digest} is missing" for v in manifest.variants if v.object == digest] == problems

    other = hashlib.sha256(data + b"\0").hexdigest()
    left = {**objects, f"objects/{other}.{extension}": data + b"\0"}
    assert f"objects/{other}: belongs to no variant" in found(capsys, write(small, manifest, left))

    wrong = {**without, name.replace(extension, "cubin" if extension == "hsaco" else "hsaco"): data}
    assert any("not an object of this target" in problem for problem in found(capsys, write(small, manifest, wrong)))


def test_an_object_that_is_none(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, objects = parts(small)
    extension = "hsaco" if manifest.target.backend == "hip" else "cubin"
    junk = b"no object"
    digest = hashlib.sha256(junk).hexdigest()
    v = replace(manifest.variants[0], object=digest, object_size=len(junk))
    changed = replace(manifest, variants=(v, *manifest.variants[1:]))
    problems = found(capsys, write(small, changed, {**objects, f"objects/{digest}.{extension}": junk}))
    assert any(problem.startswith(f"objects/{digest}: not an ELF file") for problem in problems)


def test_a_manifest_in_another_form(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, objects = parts(small)
    small.write_bytes(schema.write(msgspec.json.encode(manifest), objects))
    assert found(capsys, small) == ["manifest.json: not in the form in which the builder writes it"]
