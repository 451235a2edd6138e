"""The ``fp8-aot`` command itself: help, errors, exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, compiling_environment, fp8_aot
from samples import copy_matrix, write_matrix

from fp8_aot.aot.cli import COMMANDS
from fp8_aot.loader import schema

# Prints which of the heavy packages were imported, after the command line has run.
IMPORTED = """
import sys
from fp8_aot.aot.cli import run
try:
    status = run(sys.argv[1:])
finally:
    heavy = [name for name in ("triton", "torch", "numpy", "pebble", "elftools") if name in sys.modules]
    print("imported", *heavy, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_quick(args: list[str]) -> None:
    """It imports no compiler; the fastest of some runs counts, since the machine may be busy."""
    times = []
    while len(times) < 5 and min(times, default=9.0) > 1:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", IMPORTED, *args], capture_output=True, text=True, env=compiling_environment()
        )
        times.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert done.stderr == "imported\n"
        assert done.stdout
    assert min(times) < 1


@pytest.mark.parametrize(("command", "imported"), [("inspect", "imported"), ("verify", "imported elftools")])
def test_looking_at_a_bundle_needs_no_triton(command: str, imported: str, bundles: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, command, bundles / "sm90.zip"],
        capture_output=True,
        text=True,
        env=compiling_environment(),
    )
    assert (done.returncode, done.stderr) == (0, f"{imported}\n")


def test_help_names_every_command() -> None:
    text = fp8_aot("--help").stdout
    folder = ROOT / "aot" / "cli"
    assert {path.name.removesuffix("_command.py") for path in folder.glob("*_command.py")} == set(COMMANDS)
    for name, summary in COMMANDS.items():
        assert f"  {name} " in text
        assert summary.split(":")[0] in " ".join(text.split())
        assert "--json" in fp8_aot(name, "--help").stdout


def test_version() -> None:
    assert fp8_aot("--version").stdout == f"fp8-aot, version {schema.VERSION}\n"


def test_no_command_shows_the_help() -> None:
    done = fp8_aot(check=False)
    assert done.returncode == 2
    assert "Usage: fp8-aot [OPTIONS] COMMAND" in done.stderr
    assert "error:" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["bild"], "No such command 'bild'"),
        (["--verbos"], "No such option"),
        (["build", "--taget", "sm90"], "No such option"),
        (["build", "--jobs", "0"], "--jobs"),
        (["build", "--jobs", "many"], "--jobs"),
        (["build", "extra"], "unexpected extra argument"),
        (["list", "--matrix"], "--matrix"),
        (["inspect"], "BUNDLE"),
        (["verify"], "BUNDLES"),
        (["inspect", "."], "is a directory"),
        (["list", "--matrix", "none.toml"], "none.toml: cannot read the build matrix"),
    ],
)
def test_wrong_usage(args: list[str], word: str) -> None:
    done = fp8_aot(*args, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fp8-aot: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert word in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["--debug", "list", "--matrix", "none.toml"],
        ["list", "--debug", "--matrix", "none.toml"],
        ["list", "--matrix", "none.toml", "--debug"],
    ],
)
def test_debug_shows_a_traceback_wherever_it_stands(args: list[str]) -> None:
    done = fp8_aot(*args, check=False)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("fp8-aot: error: none.toml: cannot read")
    assert "matrix.py" in done.stderr


def test_an_error_of_our_own_is_one_line_too(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import fp8_aot.aot.matrix as m\n"
        "def broken(path): raise KeyError('first\\nsecond')\n"
        "m.load = broken\n"
        "from fp8_aot.aot.cli import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    for extra, lines in (([], 1), (["--debug"], None)):
        done = subprocess.run(
            [sys.executable, "-c", code, "list", *extra], capture_output=True, text=True, env=compiling_environment()
        )
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("fp8-aot: error: internal error: KeyError: ")
        assert "--debug shows where" in last
        assert ("Traceback" in done.stderr) == (lines is None)
        assert lines is None or done.stderr.count("\n") == lines


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """As in ``fp8-aot list --json | head -1``, with more output than a pipe holds."""
    matrix = copy_matrix("fp8_aot.kernels.quant:act_quant_lhs")
    names = [f"sm90-{i}" for i in range(200)]
    matrix["target"] = {name: {"backend": "cuda", "arch": 90, "fp8": "e4m3fn"} for name in names}
    matrix["kernel"] = [{"source": "fp8_aot.kernels.quant:act_quant_lhs", "tiles": [{"BLOCK_R": 32}]}]
    path = write_matrix(tmp_path / "m.toml", matrix)
    for options in (["--json"], []):
        process = subprocess.Popen(
            [sys.executable, "-m", "fp8_aot.aot", "list", "--matrix", path, *options],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("w"),
            env=compiling_environment(),
        )
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=60)
        assert (tmp_path / "stderr").read_text() == ""


def test_output_that_cannot_be_written() -> None:
    """A full disk is an error, not silence."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fp8_aot.aot", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=compiling_environment(),
            cwd=ROOT,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("fp8-aot: error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "module", "package"),
    [
        (["list"], "triton", "Triton"),
        (["build", "--dry-run"], "pebble", "pebble"),
        (["build"], "triton", "Triton"),
        (["verify", "BUNDLE"], "elftools", "pyelftools"),
    ],
)
def test_what_is_not_installed_is_named(args: list[str], module: str, package: str, bundles: Path) -> None:
    script = f"import sys; sys.modules[{module!r}] = None; from fp8_aot.aot.cli import run; sys.exit(run(sys.argv[1:]))"
    args = [str(bundles / "sm90.zip") if arg == "BUNDLE" else arg for arg in args]
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, cwd=ROOT)
    expected = f"this command needs {package}, which is not installed: pip install 'fp8-aot[build]'"
    assert (done.returncode, done.stderr, done.stdout) == (2, f"fp8-aot: error: {expected}\n", "")


def test_inspect_needs_nothing_of_the_builder(bundles: Path) -> None:
    missing = "".join(f"sys.modules[{name!r}] = None; " for name in ("triton", "pebble", "elftools", "torch"))
    script = f"import sys; {missing}from fp8_aot.aot.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "inspect", str(bundles / "sm90.zip")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
