"""Every mistake in a build matrix is one clear error, before anything compiles; what is right expands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pebble
import pytest
from samples import BASE, MISSING, TARGETS, change, copy_matrix, write_kernel, write_matrix

from fp8_aot.aot.cli import run

GEMM = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}
# Where a value is put, the value, the table and key that the error names, and a word of what was expected.
WRONG: list[tuple[str, object, str, str]] = [
    # unknown keys, at each level
    ("shema", 1, "shema", "expected one of exclude, kernel, schema, target, toolchain"),
    ("toolchain.tritn", "3", "toolchain.tritn", "expected one of triton"),
    ("target.sm90.archs", 90, "target.sm90.archs", "unknown key"),
    ("kernel.0.tile", [], "kernel[1].tile", "unknown key"),
    ("kernel.0.out_dtype", ["bf16"], "kernel[1].out_dtype", "expected one of in_dtype"),
    ("kernel.0.tiles.1.BLOCK_M", 32, "kernel[1].tiles[2].BLOCK_M", "unknown key"),
    ("kernel.0.tiles.1.num_warp", 4, "kernel[1].tiles[2].num_warp", "unknown key"),
    ("kernel.0.tiles.1.when", {"N": {"most": 1}}, "kernel[1].tiles[2].when.N", "expected one of M, K"),
    ("kernel.0.tiles.1.when", {"M": {"max": 1}}, "kernel[1].tiles[2].when.M.max", "expected one of least, most"),
    ("exclude.0.tile", 4, "exclude[1].tile", "unknown key"),
    ("exclude.0.when.BLOCK_M", 4, "exclude[1].when.BLOCK_M", "BLOCK_R"),
    # missing keys
    ("schema", MISSING, "schema", "missing, expected 1"),
    ("toolchain", MISSING, "toolchain", "missing"),
    ("toolchain.triton", MISSING, "toolchain.triton", "missing"),
    ("target", MISSING, "target", "missing"),
    ("target.sm90.backend", MISSING, "target.sm90.backend", "cuda"),
    ("target.sm90.arch", MISSING, "target.sm90.arch", "missing"),
    ("target.gfx942.arch", MISSING, "target.gfx942.arch", "gfx942"),
    ("target.sm90.fp8", MISSING, "target.sm90.fp8", "e4m3fn"),
    ("kernel", MISSING, "kernel", "missing"),
    ("kernel.0.source", MISSING, "kernel[1].source", "package.module:spec"),
    ("kernel.0.tiles", MISSING, "kernel[1].tiles", "missing"),
    ("kernel.0.tiles.1.BLOCK_R", MISSING, "kernel[1].tiles[2].BLOCK_R", "power of two from"),
    ("exclude.0.reason", MISSING, "exclude[1].reason", "why"),
    ("exclude.0.kernel", MISSING, "exclude[1].kernel", "missing"),
    # wrong types
    ("schema", "1", "schema", "is '1'"),
    ("schema", True, "schema", "is True"),
    ("toolchain", "3.9.0", "toolchain", "expected a table"),
    ("toolchain.triton", 3.9, "toolchain.triton", "is 3.9"),
    ("target", "sm90", "target", "expected tables"),
    ("target.sm90", 90, "target.sm90", "expected a table"),
    ("target.sm90.arch", "90", "target.sm90.arch", "is '90'"),
    ("target.sm90.arch", True, "target.sm90.arch", "is True"),
    ("target.gfx942.arch", 942, "target.gfx942.arch", "is 942"),
    ("target.gfx942.warp_size", "64", "target.gfx942.warp_size", "32 or 64"),
    ("target.sm90.max_shared", "1", "target.sm90.max_shared", "bytes"),
    ("kernel", {}, "kernel", "a list of tables"),
    ("kernel.0", "gemm", "kernel", "entry 1 is 'gemm'"),
    ("kernel.0.source", 1, "kernel[1].source", "is 1"),
    ("kernel.0.in_dtype", "bf16", "kernel[1].in_dtype", "a list of dtypes"),
    ("kernel.0.tiles", {}, "kernel[1].tiles", "a list of tables"),
    ("kernel.0.tiles.0", 4, "kernel[1].tiles", "entry 1 is 4"),
    ("kernel.0.tiles.1.BLOCK_R", True, "kernel[1].tiles[2].BLOCK_R", "is True"),
    ("kernel.0.tiles.1.BLOCK_R", "32", "kernel[1].tiles[2].BLOCK_R", "is '32'"),
    ("kernel.0.tiles.1.BLOCK_R", 32.0, "kernel[1].tiles[2].BLOCK_R", "is 32.0"),
    ("kernel.0.tiles.1.num_warps", True, "kernel[1].tiles[2].num_warps", "is True"),
    ("kernel.0.tiles.1.targets", "sm90", "kernel[1].tiles[2].targets", "a list of targets"),
    ("kernel.0.tiles.1.when", 512, "kernel[1].tiles[2].when", "expected a table"),
    ("kernel.0.tiles.1.when", {"M": 512}, "kernel[1].tiles[2].when.M", "least = 1, most = 64"),
    ("kernel.0.tiles.1.when", {"M": {"most": True}}, "kernel[1].tiles[2].when.M.most", "is True"),
    ("exclude", {}, "exclude", "a list of tables"),
    ("exclude.0.when.BLOCK_R", True, "exclude[1].when.BLOCK_R", "expected a number"),
    ("exclude.0.when.in_dtype", 1, "exclude[1].when.in_dtype", "expected a string"),
    ("exclude.0.when", 1, "exclude[1].when", "expected a table"),
    # unknown names
    ("schema", 2, "schema", "is 2, this fp8-aot reads 1"),
    ("toolchain.triton", "newest", "toolchain.triton", "version"),
    ("target.sm90.triton", "x", "target.sm90.triton", "version"),
    ("target.sm90.backend", "rocm", "target.sm90.backend", "is 'rocm'"),
    ("target.sm90.fp8", "e5m2", "target.sm90.fp8", "is 'e5m2', expected e4m3fn"),
    ("target.sm90.fp8", "e4m3fnuz", "target.sm90.fp8", "expected e4m3fn"),
    ("target.gfx942.fp8", "fp8", "target.gfx942.fp8", "e4m3fn or e4m3fnuz"),
    ("target.gfx942.arch", "mi300", "target.gfx942.arch", "gfx942"),
    ("target.../up", TARGETS["sm90"], "target.../up", "letters, digits"),
    ("target.", TARGETS["sm90"], "target.", "letters, digits"),
    ("kernel.0.source", "act_quant_lhs", "kernel[1].source", "package.module:spec"),
    ("kernel.0.source", "no_such_package.x:y", "kernel[1].source", "no_such_package"),
    ("kernel.0.source", "fp8_aot.kernels.quantt:act_quant_lhs", "kernel[1].source", "quantt"),
    ("kernel.0.source", "fp8_aot.kernels.quant:act_quant", "kernel[1].source", "no attribute 'act_quant'"),
    ("kernel.0.source", "fp8_aot.kernels.quant:GROUP", "kernel[1].source", "expected a KernelSpec"),
    ("kernel.0.source", ".quant:x", "kernel[1].source", "cannot be imported"),
    ("kernel.0.in_dtype", ["bf16", "fp8"], "kernel[1].in_dtype", "unknown dtype 'fp8', expected one of bf16, fp16"),
    ("kernel.0.tiles.1.targets", ["sm91"], "kernel[1].tiles[2].targets", "unknown target 'sm91'"),
    ("kernel.0.tiles.1.targets", [90], "kernel[1].tiles[2].targets", "unknown target 90"),
    ("kernel.0.tiles.1.specializations", ["fast"], "kernel[1].tiles[2].specializations", "aligned, general"),
    ("exclude.0.kernel", "gemm", "exclude[1].kernel", "unknown kernel 'gemm'"),
    ("exclude.0.target", "sm91", "exclude[1].target", "unknown target 'sm91'"),
    # values out of range
    ("target.sm90.arch", 9, "target.sm90.arch", "is 9"),
    ("target.sm90.arch", 900000, "target.sm90.arch", "is 900000"),
    ("target.sm90.warp_size", 64, "target.sm90.warp_size", "is 64, expected 32"),
    ("target.gfx942.warp_size", 16, "target.gfx942.warp_size", "is 16, expected 32 or 64"),
    ("target.sm90.max_shared", 0, "target.sm90.max_shared", "is 0"),
    ("kernel.0.tiles.1.BLOCK_R", 24, "kernel[1].tiles[2].BLOCK_R", "is 24, expected a power of two"),
    ("kernel.0.tiles.1.BLOCK_R", 0, "kernel[1].tiles[2].BLOCK_R", "is 0"),
    ("kernel.0.tiles.1.BLOCK_R", -32, "kernel[1].tiles[2].BLOCK_R", "is -32"),
    ("kernel.0.tiles.1.BLOCK_R", 2**40, "kernel[1].tiles[2].BLOCK_R", "power of two from"),
    ("kernel.0.tiles.1.num_warps", 3, "kernel[1].tiles[2].num_warps", "power of two from 1 to 32"),
    ("kernel.0.tiles.1.num_warps", 64, "kernel[1].tiles[2].num_warps", "power of two from 1 to 32"),
    ("kernel.0.tiles.1.num_warps", 32, "kernel[1].tiles[2].num_warps", "2,048 threads on gfx942"),
    ("kernel.0.tiles.1.num_stages", 0, "kernel[1].tiles[2].num_stages", "1 to 16"),
    ("kernel.0.tiles.1.num_stages", 17, "kernel[1].tiles[2].num_stages", "1 to 16"),
    ("kernel.0.tiles.1.num_ctas", 0, "kernel[1].tiles[2].num_ctas", "power of two"),
    ("kernel.0.tiles.1.when", {"M": {}}, "kernel[1].tiles[2].when.M", "is empty"),
    ("kernel.0.tiles.1.when", {"M": {"least": -1}}, "kernel[1].tiles[2].when.M.least", "is -1"),
    ("kernel.0.tiles.1.when", {"M": {"most": 2**31}}, "kernel[1].tiles[2].when.M.most", "is 2147483648"),
    ("kernel.0.tiles.1.when", {"M": {"least": 2, "most": 1}}, "kernel[1].tiles[2].when.M", "at least 2 and at most 1"),
    # 4 stages of (64 + 256) rows of 128 bytes, of which AMD keeps one in registers: 122,880 bytes of 65,536
    (
        "kernel.1.tiles.0",
        {"BLOCK_M": 256, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8, "num_stages": 4},
        "kernel[2].tiles[1]",
        "needs at least 122,880 bytes of shared memory (4 stages), gfx942 has 65,536",
    ),
    # 8 stages of (256 + 128) rows of 128 bytes: 393,216 bytes
    (
        "kernel.1.tiles.0",
        {"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP_M": 8, "num_stages": 8, "targets": ["sm90"]},
        "kernel[2].tiles[1]",
        "needs at least 393,216 bytes of shared memory (8 stages), sm90 has 232,448",
    ),
    # empty lists and tables
    ("target", {}, "target", "is empty"),
    ("kernel", [], "kernel", "is empty"),
    ("kernel.0.tiles", [], "kernel[1].tiles", "is empty"),
    ("kernel.0.in_dtype", [], "kernel[1].in_dtype", "is empty"),
    ("kernel.0.tiles.1.targets", [], "kernel[1].tiles[2].targets", "is empty"),
    ("kernel.0.tiles.1.specializations", [], "kernel[1].tiles[2].specializations", "is empty"),
    ("exclude.0.reason", "", "exclude[1].reason", "is empty"),
    ("exclude.0.reason", " \n", "exclude[1].reason", "is empty"),
    # said twice
    ("kernel.0.in_dtype", ["bf16", "bf16"], "kernel[1].in_dtype", "'bf16' is listed twice"),
    ("kernel.0.tiles.1.targets", ["sm90", "sm90"], "kernel[1].tiles[2].targets", "listed twice"),
    ("kernel.2", BASE["kernel"][0], "kernel[3]", "kernel act_quant_lhs has a table already (kernel[1])"),
    ("kernel.0.tiles.2", {"BLOCK_R": 32, "num_warps": 4}, "kernel[1].tiles[3]", "duplicate cell"),
    (
        "kernel.1.tiles.1",
        {**GEMM, "num_stages": 1, "specializations": ["general"], "targets": ["sm100"], "when": {"M": {"most": 9}}},
        "kernel[2].tiles[2]",
        "duplicate cell: the same tile is listed before for sm100",
    ),
    # what only shows when the cells are known
    ("exclude.1", {"kernel": "act_quant_lhs", "when": {"BLOCK_R": 8}, "reason": "r"}, "exclude[2]", "matches no cell"),
    ("exclude.0.when.in_dtype", "bf17", "exclude[1]", "matches no cell of act_quant_lhs"),
    ("kernel.0.tiles.1.when", {"K": {"least": 1}}, "kernel act_quant_lhs (bf16) on sm90", "no tile without `when`"),
    ("kernel.0.tiles.1.specializations", ["aligned"], "kernel act_quant_lhs (bf16) on sm90", "general variant"),
    (
        "exclude.0.when",
        {"BLOCK_R": 32, "in_dtype": "fp16", "specialization": "general"},
        "kernel act_quant_lhs (fp16) on sm90",
        "some shapes would have no binary",
    ),
    ("kernel.0.tiles.1.targets", ["sm90", "sm100"], "kernel act_quant_lhs (bf16) on gfx942", "no binary"),
]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to start a compiling process."""

    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("a compiling process was started")

    monkeypatch.setattr(pebble, "ProcessPool", started)


def put(place: str, value: object) -> dict[str, Any]:
    if place.startswith("target.") and place.split(".")[1] not in TARGETS:
        values = change()
        values["target"] = {**TARGETS, place.removeprefix("target."): value}
        return values
    if place in ("kernel.0", "kernel.0.tiles.0", "kernel.1.tiles.0"):
        # Put in the old entry's place, where change() would put it before it.
        values = change((place, value))
        (values["kernel"] if place == "kernel.0" else values["kernel"][int(place[7])]["tiles"]).pop(1)
        return values
    return change((place, value))


def expect_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, matrix: Path, *words: str, command: str = "build"
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    args = ["--out", str(out), "--cache", str(cache)] if command == "build" else []
    status = run([command, "--matrix", str(matrix), *args])
    printed = capsys.readouterr()
    assert status == 2, printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("fp8-aot: error: "), printed.err
    for word in words:
        assert word in printed.err
    assert not out.exists()
    assert not cache.exists()


@pytest.mark.parametrize(("place", "value", "where", "word"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_a_mistake(
    place: str,
    value: object,
    where: str,
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_compiler: None,
) -> None:
    matrix = write_matrix(tmp_path / "my.toml", put(place, value))
    expect_error(capsys, tmp_path, matrix, f"{matrix}: {where}: ", word)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"schema = ", "not valid TOML"),
        (b"schema = 1\nschema = 1\n", "not valid TOML"),
        (b"schema = '\xff'", "not valid TOML"),
        (b"x = " + b"[" * 100_000, "not valid TOML"),
        (b"", "schema: missing"),
    ],
)
def test_a_file_that_is_no_matrix(
    text: bytes, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_compiler: None
) -> None:
    matrix = tmp_path / "my.toml"
    matrix.write_bytes(text)
    expect_error(capsys, tmp_path, matrix, f"{matrix}: ", word)
    expect_error(capsys, tmp_path, matrix, f"{matrix}: ", word, command="list")


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_compiler: None) -> None:
    matrix = tmp_path / "none.toml"
    expect_error(capsys, tmp_path, matrix, f"{matrix}: cannot read the build matrix: No such file")
    (tmp_path / "folder").mkdir()
    expect_error(capsys, tmp_path, tmp_path / "folder", "--matrix", "is a directory")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line second line"),
        ("def broken(:", "SyntaxError"),
        ("import no_such_dependency", "no_such_dependency"),
    ],
)
def test_a_third_party_module_that_fails(
    body: str,
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_compiler: None,
) -> None:
    name = f"broken_{tmp_path.name.translate(str.maketrans('-.[]', '____'))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    matrix = write_matrix(tmp_path / "my.toml", copy_matrix(f"{name}:spec"))
    expect_error(capsys, tmp_path, matrix, f"{matrix}: kernel[1].source: ", word)


def test_a_spec_that_does_not_match_its_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    source = write_kernel(tmp_path, "mismatched.copy")
    file = tmp_path / "mismatched" / "copy.py"
    file.write_text(file.read_text().replace('Tile("BLOCK"', 'Tile("BLOCK_N"'))
    monkeypatch.syspath_prepend(tmp_path)
    matrix = write_matrix(tmp_path / "my.toml", copy_matrix(source))
    expect_error(capsys, tmp_path, matrix, "kernel[1].source", "spec lists", "BLOCK_N", "the function takes")


def test_a_tensor_of_an_unknown_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    source = write_kernel(tmp_path, "odd_dtype.copy")
    file = tmp_path / "odd_dtype" / "copy.py"
    file.write_text(file.read_text().replace('"fp32")', '"int8")'))
    monkeypatch.syspath_prepend(tmp_path)
    values = copy_matrix(source)
    values["kernel"][0]["in_dtype"] = ["int8"]
    matrix = write_matrix(tmp_path / "my.toml", values)
    expect_error(capsys, tmp_path, matrix, f"{matrix}: kernel[1]: tensor x has unknown dtype 'int8', known are bf16")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--target", "sm91"], "--target: unknown target 'sm91', expected one of sm90, sm100, gfx942"),
        (["--kernel", "gem"], "--kernel: 'gem' matches no kernel, there are act_quant_lhs, gemm_1x128_128x128"),
        (["--kernel", "act*", "--kernel", "x*"], "--kernel: 'x*' matches no kernel"),
        (["--target", "only", "--kernel", "gemm*"], "there is no cell for these targets and kernels"),
    ],
)
def test_a_choice_that_matches_nothing(
    options: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_compiler: None
) -> None:
    values = change(("target.only", TARGETS["sm90"]), ("kernel.1.tiles.0.targets", list(TARGETS)))
    if "only" not in options:
        values = change()
    matrix = write_matrix(tmp_path / "my.toml", values)
    for command in ("build", "list"):
        assert run([command, "--matrix", str(matrix), *options]) == 2
        assert word in capsys.readouterr().err
