"""What a valid build matrix expands to, and that kernels and targets of others build."""

from __future__ import annotations

import copy
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, fp8_aot
from samples import BASE, TARGETS, change, copy_matrix, write_kernel, write_matrix

from fp8_aot.aot.cells import expand
from fp8_aot.aot.cli import run
from fp8_aot.aot.matrix import load
from fp8_aot.kernels import SPECS


def listed(capsys: pytest.CaptureFixture[str], matrix: Path, *options: str) -> list[dict[str, Any]]:
    assert run(["list", "--matrix", str(matrix), "--json", *options]) == 0
    cells: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return cells


def test_cells_are_the_product_of_dtypes_tiles_targets_and_specializations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = listed(capsys, write_matrix(tmp_path / "my.toml", BASE))
    quant = itertools.product(
        ("sm90", "sm100", "gfx942"),
        ("bf16", "fp16", "fp32"),
        ("BLOCK_R=4,num_warps=1,num_stages=3", "BLOCK_R=32,num_warps=4,num_stages=3"),
        ("aligned", "general"),
    )
    gemm = itertools.product(
        ("sm90", "sm100", "gfx942"),
        ("BLOCK_M=64,BLOCK_N=64,BLOCK_K=64,GROUP_M=8,num_warps=4,num_stages=1",),
        ("aligned", "general"),
    )
    expected = {(t, f"act_quant_lhs/in={d}/{tile}/{s}") for t, d, tile, s in quant}
    expected |= {(t, f"gemm_1x128_128x128/out=bf16/{tile}/{s}") for t, tile, s in gemm}
    assert sorted((c["target"], c["id"]) for c in cells) == sorted(expected)
    excluded = {(c["target"], c["id"]): c["reason"] for c in cells if not c["built"]}
    tile = "BLOCK_R=4,num_warps=1,num_stages=3"
    assert excluded == {("sm90", f"act_quant_lhs/in=fp32/{tile}/{s}"): "slow" for s in ("aligned", "general")}
    assert all(c["reason"] is None for c in cells if c["built"])
    bounds = {(c["kernel"], c["constexprs"].get("BLOCK_R")): c["when"] for c in cells}
    assert bounds == {
        ("act_quant_lhs", 4): {"M": {"least": None, "most": 512}},
        ("act_quant_lhs", 32): {},
        ("gemm_1x128_128x128", None): {},
    }


def test_the_table_shows_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    matrix = write_matrix(tmp_path / "my.toml", BASE)
    assert run(["list", "--matrix", str(matrix)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    tile = "BLOCK_R=4,num_warps=1,num_stages=3"
    assert ["sm90", f"act_quant_lhs/in=fp32/{tile}/general", "excluded:", "slow"] in lines
    assert ["sm100", f"act_quant_lhs/in=fp32/{tile}/general", "built"] in lines
    assert lines[-1] == ["40", "cells", "to", "build,", "2", "excluded"]


def test_the_table_can_be_narrowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = write_matrix(tmp_path / "my.toml", BASE)
    cells = listed(capsys, matrix, "--target", "gfx942", "--target", "sm90", "--kernel", "gemm_*")
    assert {(c["target"], c["kernel"]) for c in cells} == {(t, "gemm_1x128_128x128") for t in ("sm90", "gfx942")}


def test_defaults_of_a_tile(tmp_path: Path) -> None:
    values = copy.deepcopy(BASE)
    values["kernel"][0]["tiles"] = [{"BLOCK_R": 32}]
    values["exclude"] = []
    entry = load(write_matrix(tmp_path / "my.toml", values)).kernels[0]
    tile = entry.tiles[0]
    assert (tile.config.num_warps, tile.config.num_stages, tile.config.num_ctas) == (4, 3, 1)
    assert tile.targets == set(TARGETS)
    assert tile.specializations == ("aligned", "general")
    assert tile.when == ()
    assert entry.dtypes == {"in": ("bf16", "fp16", "fp32")}


@pytest.mark.parametrize(
    ("bounds", "least", "most"),
    [({"least": 3}, 3, None), ({"most": 0}, None, 0), ({"least": 7, "most": 7}, 7, 7)],
)
def test_bounds(bounds: dict[str, int], least: int | None, most: int | None, tmp_path: Path) -> None:
    matrix = load(write_matrix(tmp_path / "my.toml", change(("kernel.0.tiles.0.when", {"K": bounds}))))
    (bound,) = matrix.kernels[0].tiles[0].when
    assert (bound.symbol, bound.least, bound.most) == ("K", least, most)


def test_this_projects_matrix() -> None:
    matrix = load(ROOT / "build_matrix.toml")
    assert {"sm90", "sm100", "gfx942"} <= set(matrix.targets)
    assert {entry.spec.name for entry in matrix.kernels} == set(SPECS)
    raw = tomllib.loads((ROOT / "build_matrix.toml").read_text())
    assert all(target.triton == raw["toolchain"]["triton"] for target in matrix.targets.values())
    for target in matrix.targets.values():
        assert target.fp8 == ("e4m3fnuz" if target.arch == "gfx942" else "e4m3fn")
        assert target.warp_size == (64 if target.backend == "hip" else 32)
    cells = expand(matrix)
    ids = [(cell.target.name, cell.id) for cell in cells]
    assert len(ids) == len(set(ids))


def test_other_targets_are_a_table_away(tmp_path: Path) -> None:
    """Kernels of this package, for architectures that its own matrix does not name."""
    values = copy.deepcopy(BASE)
    values["target"] = {
        "sm89": {"backend": "cuda", "arch": 89, "fp8": "e4m3fn"},
        "sm120": {"backend": "cuda", "arch": 120, "fp8": "e4m3fn"},
        "gfx950": {"backend": "hip", "arch": "gfx950", "fp8": "e4m3fn"},
        "gfx1200": {"backend": "hip", "arch": "gfx1200", "fp8": "e4m3fn"},
    }
    values["kernel"][0]["in_dtype"] = ["bf16"]
    values["kernel"][0]["tiles"] = [{"BLOCK_R": 32}]
    values["exclude"] = []
    matrix = write_matrix(tmp_path / "my.toml", values)
    targets = load(matrix).targets
    assert {name: target.warp_size for name, target in targets.items()} == {
        "sm89": 32,
        "sm120": 32,
        "gfx950": 64,
        "gfx1200": 32,
    }
    assert targets["gfx950"].max_shared == 163_840
    assert targets["gfx1200"].max_shared is None
    out = tmp_path / "out"
    done = fp8_aot("build", "--matrix", matrix, "--out", out, "--no-cache", "--json")
    assert {row["target"]: row["failed"] for row in json.loads(done.stdout)["targets"]} == dict.fromkeys(targets, 0)
    fp8_aot("verify", *sorted(out.glob("*.zip")))
    assert len(list(out.iterdir())) == 4


def test_a_third_party_kernel(tmp_path: Path) -> None:
    source = write_kernel(tmp_path / "site", "their_pkg.copy")
    values = copy_matrix(source, blocks=(64, 256), targets=tuple(TARGETS))
    values["kernel"][0] |= {"in_dtype": ["bf16", "fp32"]}
    for tile in values["kernel"][0]["tiles"]:
        del tile["specializations"]
    matrix, out = write_matrix(tmp_path / "my.toml", values), tmp_path / "out"
    import os

    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    fp8_aot("build", "--matrix", matrix, "--out", out, "--no-cache", env={"PYTHONPATH": path})
    assert sorted(p.name for p in out.iterdir()) == ["gfx942.zip", "sm100.zip", "sm90.zip"]
    fp8_aot("verify", *out.iterdir())
    for bundle in out.iterdir():
        shown = json.loads(fp8_aot("inspect", bundle, "--json").stdout)
        (kernel,) = shown["kernels"]
        assert (kernel["name"], kernel["source"]) == ("copy", "their_pkg.copy:spec")
        assert len(shown["variants"]) == 2 * 2 * 2
        for entry in shown["dispatch"]:
            assert [rule["when"] for rule in entry["rules"]] == [[{"symbol": "N", "least": None, "most": 64}], []]
