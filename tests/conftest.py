"""Settings and fixtures that many tests need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

ROOT = Path(__file__).parent.parent

# Triton reads it when it is imported: without a GPU, kernels run in its interpreter.
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A loaded machine must not fail a property test for its speed.
settings.register_profile("fp8_aot", deadline=None)
settings.load_profile("fp8_aot")


def compiling_environment() -> dict[str, str]:
    """An environment for subprocesses that compile: this process may run kernels in the interpreter.

    Nor do they see the width of the terminal that tests run in: tables have their whole width.
    """
    ours = ("TRITON_INTERPRET", "COLUMNS", "LINES")
    return {name: value for name, value in os.environ.items() if name not in ours}


def fp8_aot(
    *args: str | Path, check: bool = True, env: Mapping[str, str] | None = None, **extra: Any
) -> subprocess.CompletedProcess[str]:
    """Run the ``fp8-aot`` command in a process of its own, with ``env`` added to the environment."""
    command = [sys.executable, "-m", "fp8_aot.aot", *map(str, args)]
    everything = {**compiling_environment(), **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=everything, **extra)
    if check and done.returncode:
        raise AssertionError(f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    # With several test processes, each has a folder of its own below a common one.
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole matrix, built once for all test processes from an empty cache.

    ``out`` and ``cache`` are folders, ``report`` is what ``fp8-aot build --json`` printed.
    """
    shared = _shared_folder(tmp_path_factory)
    out, cache, report = shared / "artifacts", shared / "cache", shared / "build.json"
    with FileLock(shared / "build.lock"):
        if not report.exists():
            matrix = ROOT / "build_matrix.toml"
            done = fp8_aot("build", "--matrix", matrix, "--out", out, "--cache", cache, "--json", cwd=shared)
            report.write_text(done.stdout)
    return {"out": out, "cache": cache, "report": json.loads(report.read_text())}


@pytest.fixture(scope="session")
def bundles(build: dict[str, Any]) -> Path:
    """A folder with the bundle of every target."""
    return build["out"]


@pytest.fixture(scope="session")
def jit_binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """What ``jit_binaries.py`` prints for the whole matrix, run once for all test processes."""
    shared = _shared_folder(tmp_path_factory)
    found, matrix = shared / "jit.json", ROOT / "build_matrix.toml"
    with FileLock(shared / "jit.lock"):
        if not found.exists():
            script = [sys.executable, Path(__file__).parent / "jit_binaries.py", matrix]
            targets = tomllib.loads(matrix.read_text())["target"]
            done = subprocess.run(
                [*script, *targets],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=compiling_environment(),
            )
            assert done.returncode == 0, done.stderr
            found.write_text(done.stdout)
    return json.loads(found.read_text())


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """A bundle of the third-party kernel ``their.good``, and the matrix it was built from."""
    from samples import copy_matrix, write_kernel, write_matrix  # it asks for Triton, which GPU tests may lack

    source = write_kernel(tmp_path / "site", "their.good")
    matrix = write_matrix(tmp_path / "good.toml", copy_matrix(source, targets=("sm90", "gfx942")))
    out, cache = tmp_path / "out", tmp_path / "cache"
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path}
    fp8_aot("build", "--matrix", matrix, "--out", out, "--cache", cache, env=env)
    return {"source": source, "matrix": matrix, "out": out, "cache": cache, "env": env, "site": tmp_path / "site"}
