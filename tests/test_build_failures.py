"""A build that fails, dies or is stopped names what failed and never breaks a bundle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from building import tree
from conftest import compiling_environment, fp8_aot
from samples import TARGETS, copy_matrix, write_kernel, write_matrix

from fp8_aot.aot.cache import write_atomically


def test_a_cell_that_fails(good: dict[str, Any], tmp_path: Path) -> None:
    """It is named, with the compiler's words; all other cells are compiled and kept."""
    bad = write_kernel(good["site"], "their.bad", 'tl.static_assert(BLOCK != 64, "blocks of 64 are not for us")')
    matrix = write_matrix(
        tmp_path / "bad.toml", copy_matrix(bad, good["source"], blocks=(64, 128, 256), targets=("sm90", "gfx942"))
    )
    before = tree(good["out"])
    args = ("build", "--matrix", matrix, "--out", good["out"], "--cache", good["cache"])
    done = fp8_aot(*args, check=False, env=good["env"])
    assert done.returncode == 1
    for target in ("sm90", "gfx942"):
        assert f"failed: {target} bad/in=bf16/BLOCK=64,num_warps=4,num_stages=3/general" in done.stderr
    assert "blocks of 64 are not for us" in done.stderr
    assert done.stderr.count("failed: ") == 2
    assert "Traceback" not in done.stderr
    assert done.stdout.count("not written, the old one stays") == 2
    assert tree(good["out"]) == before

    done = fp8_aot(*args, "--json", check=False, env=good["env"])
    assert done.returncode == 1
    report = json.loads(done.stdout)
    # All but the two that fail are in the cache by now.
    assert (report["compiled"], report["cached"]) == (2, 10)
    assert {(f["target"], f["id"].split("/")[0]) for f in report["failures"]} == {("sm90", "bad"), ("gfx942", "bad")}
    assert all("blocks of 64 are not for us" in failure["message"] for failure in report["failures"])
    assert [(row["failed"], row["bundle"], row["changed"]) for row in report["targets"]] == [(1, None, False)] * 2
    assert tree(good["out"]) == before

    assert "Traceback" in fp8_aot(*args, "--debug", check=False, env=good["env"]).stderr


def test_one_target_fails_and_the_other_is_written(good: dict[str, Any], tmp_path: Path) -> None:
    # 64-bit addresses of an array that shared memory cannot hold: an error of the last compiler stage.
    big = write_kernel(
        good["site"],
        "their.big",
        "r = tl.arange(0, 128)[:, None]\n    d = tl.dot(tl.load(x_ptr + r * 128 + tl.arange(0, 128)[None, :]), "
        "tl.load(x_ptr + r * 128 + tl.arange(0, 128)[None, :]))\n    tl.store(y_ptr + r * 128 + "
        "tl.arange(0, 128)[None, :], d.to(x_ptr.dtype.element_ty))",
    )
    values = copy_matrix(big, targets=("sm90", "gfx942"))
    values["target"] = {**values["target"], "sm90": {**TARGETS["sm90"], "max_shared": 1024}}
    matrix = write_matrix(tmp_path / "big.toml", values)
    before = tree(good["out"])
    done = fp8_aot(
        "build", "--matrix", matrix, "--out", good["out"], "--no-cache", "--json", check=False, env=good["env"]
    )
    assert done.returncode == 1
    report = json.loads(done.stdout)
    (failure,) = report["failures"]
    assert failure["target"] == "sm90"
    assert "bytes of shared memory, sm90 has 1,024" in failure["message"]
    assert {row["target"]: row["changed"] for row in report["targets"]} == {"sm90": False, "gfx942": True}
    after = tree(good["out"])
    assert after[good["out"] / "sm90.zip"] == before[good["out"] / "sm90.zip"]
    assert after[good["out"] / "gfx942.zip"] != before[good["out"] / "gfx942.zip"]


@pytest.mark.parametrize(
    ("death", "words"),
    [("os.kill(os.getpid(), signal.SIGSEGV)", "Segmentation fault"), ("os._exit(3)", "exit status 3")],
)
def test_a_compiler_that_dies(death: str, words: str, good: dict[str, Any], tmp_path: Path) -> None:
    setup = f"if multiprocessing.parent_process() is not None:\n    {death}\n"
    dying = write_kernel(good["site"], "their.dying", setup=setup)
    matrix = write_matrix(tmp_path / "m.toml", copy_matrix(dying, good["source"], blocks=(32, 64, 128)))
    before = tree(good["out"])
    args = ("build", "--matrix", matrix, "--out", good["out"], "--cache", good["cache"], "--json", "--jobs", "2")
    done = fp8_aot(*args, check=False, env=good["env"], timeout=120)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [f["id"].split("/")[0] for f in report["failures"]] == ["dying"] * 3
    assert {f["message"] for f in report["failures"]} == {f"the compiling process died: {words}"}
    assert report["targets"][0]["variants"] == 3
    assert tree(good["out"]) == before


@pytest.mark.parametrize("broken", ["fsync", "chmod", "replace"])
def test_a_write_that_fails_leaves_the_old_file(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sm90.zip"
    write_atomically(file, b"old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, broken, fail)
        write_atomically(file, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"sm90.zip": b"old"}
    write_atomically(file, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"sm90.zip": b"new"}
    assert file.stat().st_mode & 0o777 == 0o644


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGINT, 1, "fp8-aot: error: stopped"), (signal.SIGTERM, 143, ""), (signal.SIGKILL, -9, "")],
)
def test_a_build_that_is_stopped(
    number: signal.Signals, status: int, words: str, good: dict[str, Any], tmp_path: Path
) -> None:
    """The old bundle stays whole, and no process and no temporary file is left."""
    marks, temporary = tmp_path / "marks", tmp_path / "tmp"
    marks.mkdir()
    temporary.mkdir()
    setup = (
        "if multiprocessing.parent_process() is not None:\n"
        "    Path(os.environ['MARKS'], str(os.getpid())).touch()\n"
        "    time.sleep(600)\n"
    )
    slow = write_kernel(good["site"], "their.slow", setup=setup)
    matrix = write_matrix(tmp_path / "m.toml", copy_matrix(slow, good["source"], blocks=(64, 128)))
    before = tree(good["out"])
    command = ["build", "--matrix", matrix, "--out", good["out"], "--cache", good["cache"], "--jobs", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8_aot.aot", *map(str, command)],
        env={**compiling_environment(), **good["env"], "MARKS": str(marks), "TMPDIR": str(temporary)},
        stderr=(tmp_path / "stderr").open("w"),
        # A shell that runs us in the background has made children ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: any(marks.iterdir()))
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        assert (tmp_path / "stderr").read_text().strip() == words
        assert tree(good["out"]) == before
        if number != signal.SIGKILL:
            for mark in marks.iterdir():
                wait_for(lambda pid=int(mark.name): not is_running(pid))  # type: ignore[misc]
            assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        for mark in marks.iterdir():
            if is_running(int(mark.name)):
                os.kill(int(mark.name), signal.SIGKILL)
