"""What ``fp8-aot build`` makes of the whole matrix: complete, reproducible, incremental."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from building import build_json, objects, tree
from conftest import ROOT, compiling_environment, fp8_aot
from samples import copy_matrix, write_matrix

from fp8_aot.aot.bundle import dispatch
from fp8_aot.aot.cells import expand
from fp8_aot.aot.matrix import load
from fp8_aot.loader import schema
from fp8_aot.loader.bundle import Bundle

SECONDS = 240
"""Ceiling for the whole matrix on two cores; beside other tests it takes two or three times its 43 s."""


def test_the_whole_matrix(build: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = build["report"]
    with capsys.disabled():
        print(f"\n{report['compiled']} cells compiled in {report['seconds']:.0f} s")
    assert report["failures"] == []
    assert report["seconds"] < SECONDS
    listed = json.loads(fp8_aot("list", "--matrix", ROOT / "build_matrix.toml", "--json").stdout)
    for row in report["targets"]:
        path = build["out"] / f"{row['target']}.zip"
        assert row["bundle"] == str(path)
        assert row["bytes"] == path.stat().st_size <= 8 * 2**20
        assert row["failed"] == row["spilling"] == 0
        assert 0 < row["compile_seconds"] < report["seconds"] * (os.cpu_count() or 1)
        manifest = Bundle(path).manifest
        assert {v.spills for v in manifest.variants} == {0}
        wanted = [cell["id"] for cell in listed if cell["target"] == row["target"] and cell["built"]]
        assert [v.id for v in manifest.variants] == wanted
    assert {row["target"] for row in report["targets"]} == {cell["target"] for cell in listed}


def test_dispatch_follows_the_matrix(bundles: Path) -> None:
    """Rules are the tiles in matrix order, up to the first that serves any launch."""
    listed = json.loads(fp8_aot("list", "--matrix", ROOT / "build_matrix.toml", "--json").stdout)
    for path in sorted(bundles.glob("*.zip")):
        manifest = Bundle(path).manifest
        for entry in manifest.dispatch:
            cells = [
                cell
                for cell in listed
                if (cell["target"], cell["kernel"], cell["dtypes"])
                == (manifest.target.name, entry.kernel, entry.dtypes)
            ]
            rules: list[tuple[dict[str, Any], dict[str, str]]] = []
            previous = None
            for cell in cells:
                config = (cell["constexprs"], cell["num_warps"], cell["num_stages"], cell["num_ctas"], cell["when"])
                if config != previous:
                    if rules and not rules[-1][0] and "general" in rules[-1][1]:
                        break
                    rules.append((cell["when"], {}))
                    previous = config
                rules[-1][1][cell["specialization"]] = cell["id"]
            found = [
                ({c.symbol: {"least": c.least, "most": c.most} for c in rule.when}, rule.variants)
                for rule in entry.rules
            ]
            assert found == rules


def test_a_tile_after_the_last_resort_is_no_rule(tmp_path: Path) -> None:
    tile = {"num_warps": 1, "specializations": ["aligned"]}
    tiles = [{"BLOCK_R": 8, **tile}, {"BLOCK_R": 32}, {"BLOCK_R": 64, "when": {"M": {"most": 9}}}, {"BLOCK_R": 16}]
    source = "fp8_aot.kernels.quant:act_quant_lhs"
    values = {**copy_matrix(source), "kernel": [{"source": source, "in_dtype": ["bf16"], "tiles": tiles}]}
    (entry,) = dispatch(expand(load(write_matrix(tmp_path / "m.toml", values))))
    assert [rule.when for rule in entry.rules] == [(), ()]
    assert [{kind: name.split("/")[2][:10] for kind, name in rule.variants.items()} for rule in entry.rules] == [
        {"aligned": "BLOCK_R=8,"},
        {"aligned": "BLOCK_R=32", "general": "BLOCK_R=32"},
    ]


def test_a_second_build_compiles_and_writes_nothing(build: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "artifacts"
    shutil.copytree(build["out"], out)
    for path in out.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    before = tree(out)
    report = build_json(ROOT / "build_matrix.toml", out, build["cache"])
    assert report["compiled"] == 0
    assert report["cached"] == build["report"]["compiled"] + build["report"]["cached"]
    assert [row["changed"] for row in report["targets"]] == [False] * len(before)
    assert [row["compile_seconds"] for row in report["targets"]] == [0] * len(before)
    assert tree(out) == before


def last_resorts() -> dict[str, Any]:
    """This project's matrix, cut down to the last resort of each kernel and one dtype."""
    values = tomllib.loads((ROOT / "build_matrix.toml").read_text())
    for kernel in values["kernel"]:
        last = [t for t in kernel["tiles"] if "when" not in t and "general" in t.get("specializations", ["general"])]
        kernel["tiles"] = [{**tile, "specializations": ["general"]} for tile in last]
        kernel["out_dtype" if "gemm" in kernel["source"] else "in_dtype"] = ["bf16"]
    return values


def test_another_checkout_builds_the_same_objects(bundles: Path, tmp_path: Path) -> None:
    """In another folder, without git, with another home, every object has the same bytes."""
    copy = tmp_path / "some where" / "else"
    for name in ("kernels", "aot", "loader"):
        shutil.copytree(ROOT / name, copy / "fp8_aot" / name, ignore=shutil.ignore_patterns("__pycache__"))
    matrix = write_matrix(copy / "build_matrix.toml", last_resorts())
    env = {"PYTHONPATH": str(copy), "HOME": str(tmp_path / "home"), "PYTHONHASHSEED": "7"}
    where = [sys.executable, "-c", "import fp8_aot.aot.build as b; print(b.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, env={**compiling_environment(), **env}, cwd=copy)
    assert Path(found.stdout.strip()).is_relative_to(copy), found
    report = build_json(matrix, copy / "artifacts", copy / "cache", env=env, cwd=copy)
    assert report["cached"] == 0
    for row in report["targets"]:
        ours, theirs = (objects(folder / f"{row['target']}.zip") for folder in (bundles, copy / "artifacts"))
        assert len(theirs) == len(last_resorts()["kernel"])
        assert theirs == {name: ours[name] for name in theirs}
        assert Bundle(copy / "artifacts" / f"{row['target']}.zip").manifest.provenance.commit is None


def test_two_compilations_give_the_same_bundles(tmp_path: Path) -> None:
    values = last_resorts()
    values["kernel"] = values["kernel"][-1:]
    matrix = write_matrix(tmp_path / "my.toml", values)
    made = []
    for i in (1, 2):
        folder = tmp_path / f"folder{i}"
        (folder / "tmp").mkdir(parents=True)
        env = {"PYTHONHASHSEED": str(i), "TMPDIR": str(folder / "tmp"), "TZ": f"UTC{i}"}
        report = build_json(matrix, folder / "out", None, "--jobs", str(i), env=env, cwd=folder)
        assert report["compiled"] == len(values["target"])
        made.append({path.name: path.read_bytes() for path in (folder / "out").iterdir()})
    assert made[0] == made[1]
    assert len(made[0]) == len(values["target"])


def test_manifests_are_canonical(bundles: Path) -> None:
    for path in bundles.glob("*.zip"):
        data = path.read_bytes()
        entries = schema.read(data, str(path))
        manifest = bytes(entries["manifest.json"])
        assert schema.encode(schema.decode(manifest, str(path))) == manifest
        assert schema.write(manifest, {name: bytes(entries[name]) for name in list(entries)[1:]}) == data
