"""What surrounds a build does not change it, and it changes nothing around it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from building import build_json, tree
from conftest import ROOT, fp8_aot
from samples import TARGETS, copy_matrix, write_matrix

from fp8_aot.aot.errors import UsageError
from fp8_aot.aot.matrix import load
from fp8_aot.aot.toolchain import toolchain
from fp8_aot.loader.bundle import Bundle


def test_no_torch_in_any_process(good: dict[str, Any], tmp_path: Path) -> None:
    marker, fake = tmp_path / "imported", tmp_path / "fake"
    (fake / "torch").mkdir(parents=True)
    (fake / "torch" / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise ImportError('torch')\n")
    env = {**good["env"], "PYTHONPATH": f"{fake}{os.pathsep}{good['env']['PYTHONPATH']}"}
    report = build_json(good["matrix"], tmp_path / "new", None, env=env)
    assert report["compiled"] == 2
    for command in ("inspect", "verify"):
        fp8_aot(command, tmp_path / "new" / "sm90.zip", env=env)
    assert not marker.exists()
    subprocess.run([sys.executable, "-c", "import torch"], env={**os.environ, **env}, capture_output=True)
    assert marker.exists()


# Python runs this in every process whose PYTHONPATH has it, workers included.
WATCH = """
import os, sys
log = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def hook(event, args):
    if event == "open" and isinstance(args[2], int) and isinstance(args[0], (str, bytes)):
        changes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    else:
        changes = event in ("os.mkdir", "os.rename", "os.symlink", "os.link")
    for path in args[: 2 if event == "os.rename" else 1] if changes else ():
        os.write(log, (os.path.abspath(os.fsdecode(path)) + "\\n").encode())
sys.addaudithook(hook)
"""


@pytest.mark.parametrize("cached", [True, False])
def test_nothing_is_ever_written_elsewhere(good: dict[str, Any], tmp_path: Path, cached: bool) -> None:
    """Not even for a moment: every path that a builder's or a worker's Python opens to write, makes or moves."""
    watch, log, temporary = tmp_path / "watch", tmp_path / "log", tmp_path / "tmp"
    out, cache = tmp_path / "new", tmp_path / "kept" if cached else None
    watch.mkdir()
    temporary.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    env = {**good["env"], "PYTHONPATH": f"{watch}{os.pathsep}{good['env']['PYTHONPATH']}", "WATCH_LOG": str(log)}
    env |= {"TMPDIR": str(temporary), "HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    report = build_json(good["matrix"], out, cache, env=env)
    assert report["compiled"] == 2
    written = {Path(line) for line in log.read_text().splitlines()} - {Path(os.devnull)}
    assert any(path.suffix == ".zip" for path in written)
    assert any(".scratch-" in str(path) for path in written), "the workers are watched too"
    legal = [out, *([cache] if cache else [])]
    assert not [path for path in written if not any(path.is_relative_to(folder) for folder in legal)]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_nothing_is_written_elsewhere(good: dict[str, Any], tmp_path: Path) -> None:
    """Only ``--out`` and ``--cache`` change: not the home, not the checkout, not the temporary folder."""
    checkout, home, temporary = (tmp_path / name for name in ("checkout", "home", "tmp"))
    for folder in (checkout, home, temporary):
        folder.mkdir()
    matrix = checkout / "my.toml"
    shutil.copy(good["matrix"], matrix)
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    # A file that only looks changed tempts git to refresh its index.
    os.utime(matrix, ns=(10**18, 10**18))
    out, cache = tmp_path / "a" / "out", tmp_path / "b" / "cache"
    before = tree(tmp_path)
    env = {**good["env"], "HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"XDG_CACHE_HOME": str(home / "xdg"), "TRITON_HOME": str(home)}
    report = build_json(matrix, out, cache, env=env, cwd=checkout)
    assert report["compiled"] == 2
    written = [path for path in tree(tmp_path) if path not in before]
    assert written
    assert all(path.is_relative_to(out) or path.is_relative_to(cache) for path in written)
    assert {path: tree(tmp_path)[path] for path in before} == before
    assert list(temporary.iterdir()) == list(home.iterdir()) == []
    assert sorted(path.name for path in out.iterdir()) == ["gfx942.zip", "sm90.zip"]

    provenance = Bundle(out / "sm90.zip").manifest.provenance
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert (provenance.commit, provenance.dirty) == (head, False)
    matrix.write_text(matrix.read_text() + "# changed\n")
    build_json(matrix, out, cache, env=env, cwd=checkout)
    provenance = Bundle(out / "sm90.zip").manifest.provenance
    assert (provenance.commit, provenance.dirty) == (head, True)

    # Without --cache, compiled cells go where the XDG specification says.
    fp8_aot("build", "--matrix", matrix, "--out", out, env=env, cwd=checkout)
    assert [path.name for path in home.iterdir()] == ["xdg"]
    assert [path.name for path in (home / "xdg").iterdir()] == ["fp8-aot"]


HOSTILE = {
    "TRITON_INTERPRET": "1",
    "TRITON_DEBUG": "1",
    "TRITON_ALWAYS_COMPILE": "1",
    "TRITON_DISABLE_LINE_INFO": "0",
    "TRITON_DEFAULT_FP_FUSION": "0",
    "TRITON_FORCE_DISABLE_FP_FUSION": "1",
    "TRITON_KERNEL_DUMP": "1",
    "TRITON_DUMP_PTXAS_LOG": "1",
    "TRITON_OVERRIDE_ARCH": "sm80",
    "TRITON_STORE_BINARY_ONLY": "1",
    "TRITON_MOCK_PTX_VERSION": "8.0",
    "TRITON_HIP_USE_BLOCK_PINGPONG": "0",
    "TRITON_HIP_USE_ASYNC_COPY": "0",
    "AMDGCN_USE_BUFFER_OPS": "0",
    "AMDGCN_ENABLE_DUMP": "1",
    "PTXAS_OPTIONS": "--opt-level 0",
    "NVPTX_ENABLE_DUMP": "1",
    "DISABLE_PTXAS_OPT": "1",
    "DISABLE_LLVM_OPT": "1",
    "LLVM_IR_ENABLE_DUMP": "1",
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES": "1",
    "USE_IR_LOC": "ttir",
}


def hostile_environment(tmp_path: Path) -> Mapping[str, str]:
    folders = {name: str(tmp_path / name) for name in ("TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_CACHE_DIR")}
    return HOSTILE | folders


def test_the_environment_does_not_change_a_binary(tmp_path: Path) -> None:
    source = "fp8_aot.kernels.quant:act_quant_lhs"
    values = {**copy_matrix(source, targets=tuple(TARGETS)), "kernel": []}
    values["kernel"] = [{"source": source, "in_dtype": ["bf16"], "tiles": [{"BLOCK_R": 32}]}]
    matrix = write_matrix(tmp_path / "m.toml", values)
    build_json(matrix, tmp_path / "clean", None)
    # The report is all there is on standard output, whatever compilers print.
    build_json(matrix, tmp_path / "hostile", None, env=hostile_environment(tmp_path))
    for target in TARGETS:
        clean, hostile = ((tmp_path / name / f"{target}.zip").read_bytes() for name in ("clean", "hostile"))
        assert clean == hostile, target
    assert not list(tmp_path.glob("TRITON_*"))


def test_one_setting_at_a_time(tmp_path: Path) -> None:
    """Settings may undo each other, so each is taken out of a compiling process's environment."""
    code = (
        "import json, os, sys, tempfile\n"
        "from pathlib import Path\n"
        "from fp8_aot.aot.worker import prepare\n"
        "prepare(Path(sys.argv[1]))\n"
        "assert 'triton' not in sys.modules\n"
        "print(json.dumps([dict(os.environ), tempfile.gettempdir()]), file=sys.stderr)\n"
        "print('to standard error')\n"
    )
    env = {**os.environ, **hostile_environment(tmp_path), "TRITON_PTXAS_PATH": "/x/ptxas"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.stdout == ""
    report, *rest = done.stderr.splitlines()
    assert rest == ["to standard error"]
    found, temporary = json.loads(report)
    left = {name: value for name, value in found.items() if name in HOSTILE or name.startswith("TRITON_")}
    assert left.pop("TRITON_PTXAS_PATH") == "/x/ptxas"
    assert Path(temporary).parent == tmp_path
    assert left == {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": f"{temporary}/triton"}


@pytest.mark.parametrize(
    ("script", "word"),
    [("echo not a compiler", "expected a ptxas release"), ("exit 3", "exit status 3"), (None, "No such file")],
)
def test_an_assembler_that_cannot_be_run(
    script: str | None, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia import compiler

    tool = tmp_path / "ptxas"
    if script is not None:
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: SimpleNamespace(path=str(tool)))
    target = load(ROOT / "build_matrix.toml").targets["sm90"]
    with pytest.raises(UsageError, match=word):
        toolchain.__wrapped__(target)
