"""The options of ``fp8-aot build``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from building import build_json, tree
from conftest import compiling_environment, fp8_aot
from samples import TARGETS, copy_matrix, write_kernel, write_matrix

from fp8_aot.loader.bundle import Bundle


def test_dry_run_writes_nothing(good: dict[str, Any], tmp_path: Path) -> None:
    before = tree(tmp_path)
    args = ("build", "--matrix", good["matrix"], "--out", tmp_path / "new", "--cache", tmp_path / "new_cache")
    env = {**good["env"], "PYTHONDONTWRITEBYTECODE": "1"}
    plan = json.loads(fp8_aot(*args, "--dry-run", "--json", env=env).stdout)
    assert plan == [{"target": target, "kernel": "good", "variants": 1, "excluded": 0} for target in ("sm90", "gfx942")]
    assert "good" in fp8_aot(*args, "--dry-run", env=env).stdout
    assert tree(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_only_some_targets_and_kernels(good: dict[str, Any], tmp_path: Path) -> None:
    other = write_kernel(good["site"], "their.other")
    matrix = write_matrix(tmp_path / "m.toml", copy_matrix(other, good["source"], targets=("sm90", "sm100", "gfx942")))
    out = tmp_path / "some"
    args = ("--target", "sm90", "--target", "gfx942", "--kernel", "oth*")
    report = build_json(matrix, out, good["cache"], *args, env=good["env"])
    assert [(row["target"], row["variants"]) for row in report["targets"]] == [("sm90", 1), ("gfx942", 1)]
    assert sorted(path.name for path in out.iterdir()) == ["gfx942.zip", "sm90.zip"]
    for path in out.iterdir():
        assert [kernel.name for kernel in Bundle(path).manifest.kernels] == ["other"]


def test_another_triton_than_the_matrix_names(good: dict[str, Any], tmp_path: Path) -> None:
    values = copy_matrix(good["source"])
    values["toolchain"] = {"triton": "3.5.99"}
    matrix = write_matrix(tmp_path / "m.toml", values)
    args = ("build", "--matrix", matrix, "--out", tmp_path / "new", "--cache", good["cache"])
    for extra in ((), ("--dry-run",)):
        done = fp8_aot(*args, *extra, check=False, env=good["env"])
        assert done.returncode == 2
        assert "the matrix builds sm90 with Triton 3.5.99, installed is 3." in done.stderr
        assert "pip install triton==3.5.99, or pass --allow-toolchain-mismatch" in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "new").exists()
    fp8_aot(*args, "--allow-toolchain-mismatch", env=good["env"])
    manifest = Bundle(tmp_path / "new" / "sm90.zip").manifest
    # The bundle says what it was built with, whatever the matrix names.
    assert manifest.toolchain.triton == Bundle(good["out"] / "sm90.zip").manifest.toolchain.triton

    # A target's own pin goes before the common one.
    values = copy_matrix(good["source"])
    values["target"] = {"sm90": {**TARGETS["sm90"], "triton": "3.4.0"}}
    done = fp8_aot(
        "build", "--matrix", write_matrix(matrix, values), "--out", tmp_path / "new", check=False, env=good["env"]
    )
    assert (done.returncode, "sm90 with Triton 3.4.0" in done.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--out", "--cache"])
@pytest.mark.parametrize("way", ["a file", "below a file", "read-only"])
def test_a_folder_that_cannot_be_written(option: str, way: str, good: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "folder",
        "read-only": Path("/proc/fp8-aot") if os.geteuid() == 0 else tmp_path / "read-only",
    }[way]
    if way == "read-only" and os.geteuid():
        folder.mkdir(mode=0o555)
    folders = {"--out": tmp_path / "new", "--cache": good["cache"], option: folder}
    args = [str(part) for pair in folders.items() for part in pair]
    done = fp8_aot("build", "--matrix", good["matrix"], *args, check=False, env=good["env"])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert option in done.stderr
    assert str(folder) in done.stderr
    assert not list(tmp_path.glob("new/*"))


def test_no_home_to_cache_in(good: dict[str, Any], tmp_path: Path) -> None:
    """A user without a home folder, as containers have, is told what to do."""
    code = (
        "import pathlib, sys\n"
        "def home(): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = home\n"
        "from fp8_aot.aot.cli import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    env = {**compiling_environment(), **good["env"]}
    env.pop("XDG_CACHE_HOME", None)
    args = ["build", "--matrix", str(good["matrix"]), "--out", str(tmp_path / "new")]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--cache: there is no home folder" in done.stderr
