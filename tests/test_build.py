"""What ``fp8-aot build`` promises: reproducible, incremental, and never a broken bundle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, compiling_environment, fp8_aot
from samples import TARGETS, copy_matrix, write_kernel, write_matrix

from fp8_aot.loader import schema
from fp8_aot.loader.bundle import Bundle

SECONDS = 900
"""Ceiling for the whole matrix, compiled beside other tests; alone and on two cores it takes about 100 s."""


def pythonpath(*folders: Path) -> dict[str, str]:
    """An environment in which modules in ``folders`` can be imported too."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])}


def build_json(matrix: Path, out: Path, cache: Path | None, *options: str, **extra: Any) -> dict[str, Any]:
    """Run ``fp8-aot build --json``; gives its report."""
    where = ["--no-cache"] if cache is None else ["--cache", str(cache)]
    done = fp8_aot("build", "--matrix", matrix, "--out", out, *where, "--json", *options, **extra)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def objects(bundle: Path) -> dict[str, str]:
    """The sha256 of each variant's object."""
    return {v.id: v.object for v in Bundle(bundle).manifest.variants}


def tree(*folders: Path) -> dict[Path, tuple[int, bytes]]:
    """Time of change and contents of all files below the folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# ------------------------------------------------------------------------------------- the whole matrix


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


# --------------------------------------------------------------------------------------------- failures


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """A bundle of the third-party kernel ``their.good``, and the matrix it was built from."""
    source = write_kernel(tmp_path / "site", "their.good")
    matrix = write_matrix(tmp_path / "good.toml", copy_matrix(source, targets=("sm90", "gfx942")))
    out, cache = tmp_path / "out", tmp_path / "cache"
    env = pythonpath(tmp_path / "site")
    build_json(matrix, out, cache, env=env)
    return {"source": source, "matrix": matrix, "out": out, "cache": cache, "env": env, "site": tmp_path / "site"}


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
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs us in the background has made children ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: any(marks.iterdir()))
        process.send_signal(number)
        _, printed = process.communicate(timeout=60)
        assert process.returncode == status, printed
        assert printed.strip() == words
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


# ---------------------------------------------------------------------------------------------- options


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


# ------------------------------------------------------------------------------------- the environment


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


def test_an_assembler_that_cannot_be_run(good: dict[str, Any], tmp_path: Path) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho not a compiler\n")
    tool.chmod(0o755)
    env = {**good["env"], "TRITON_PTXAS_PATH": str(tool), "TRITON_PTXAS_BLACKWELL_PATH": str(tool)}
    args = ("build", "--matrix", good["matrix"], "--out", tmp_path / "new", "--no-cache")
    done = fp8_aot(*args, check=False, env=env)
    assert done.returncode == 2
    assert "ptxas" in done.stderr
    assert "internal error" not in done.stderr
    assert done.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------- the cache


def test_damaged_cache_entries_are_compiled_again(good: dict[str, Any], tmp_path: Path) -> None:
    entries = sorted(path for path in good["cache"].rglob("*") if path.is_file())
    assert len(entries) == 2
    whole = [path.read_bytes() for path in entries]
    before = tree(good["out"])
    for damage in (
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: bytes(32) + data[32:],
    ):
        for path, data in zip(entries, whole, strict=True):
            path.write_bytes(damage(data))
        report = build_json(good["matrix"], good["out"], good["cache"], env=good["env"])
        assert (report["compiled"], report["cached"]) == (2, 0)
        assert tree(good["out"]) == before
        assert [path.read_bytes() for path in entries] == whole
    assert sorted(path for path in good["cache"].rglob("*") if path.is_file()) == entries


def test_what_makes_a_cell_be_compiled_again(good: dict[str, Any], tmp_path: Path) -> None:
    file = good["site"] / "their" / "good.py"
    text, first = file.read_text(), objects(good["out"] / "sm90.zip")

    def rebuild(new: str) -> int:
        file.write_text(new)
        compiled: int = build_json(good["matrix"], good["out"], good["cache"], env=good["env"])["compiled"]
        return compiled

    commented = text.replace("    row = ", '    "new"\n\n    # A comment.\n    row = ').replace("import os\n", "\n" * 9)
    assert rebuild(commented.replace('    "new"\n', "")) == 0
    # And rightly so: the binary does not hold line numbers.
    file.write_text(commented.replace('    "new"\n', ""))
    build_json(good["matrix"], tmp_path / "new", None, env=good["env"])
    assert objects(tmp_path / "new" / "sm90.zip") == first
    assert rebuild(text.replace("c < cols)\n    tl.store", "c < cols - 1)\n    tl.store")) == 2
    assert rebuild(text) == 0


SOURCES = '''
import triton
import triton.language as tl
import {package}.helpers
from {package}.helpers import inner as called

GROUP = tl.constexpr(128)
PLAIN: tl.constexpr = (1, 2)
UNUSED = 5


@triton.jit
def helper(x, N: tl.constexpr):
    """Adds."""
    return x + GROUP + N


def make(n):
    m = tl.constexpr(n)

    @triton.jit
    def made(x):
        return x * m

    return made


double, triple = make(2), make(3)


@triton.jit
def unused(x):
    return x


@triton.jit
def fn(x_ptr, n, B: tl.constexpr = 4):
    x = tl.load(x_ptr)
    x = helper(x, B) + called(x) + {package}.helpers.outer(x)
    tl.store(x_ptr, double(x) + triple(x) + PLAIN[0] + {package}.helpers.OFFSET)
'''

HELPERS = """
import triton
import triton.language as tl

GROUP = tl.constexpr(64)
OFFSET = tl.constexpr(7)


@triton.jit
def inner(x):
    return x + GROUP


@triton.jit
def deepest(x):
    return x - 1


@triton.jit
def outer(x):
    return deepest(x)
"""

SAME = [
    ("kernel", "    x = tl.load", "    # A comment.\n\n    x = tl.load"),
    ("kernel", "import triton\n", "import triton\n\n\n"),
    ("kernel", '"""Adds."""', '"""Adds, with other words."""'),
    ("kernel", '    """Adds."""\n', ""),
    ("kernel", "UNUSED = 5", "UNUSED = 6"),
    ("kernel", "def unused(x):\n    return x", "def unused(x):\n    return x + 1"),
    ("kernel", "x_ptr, n, B", "x_ptr,  n,\n    B"),
    ("helpers", "@triton.jit\ndef outer", "# More.\n@triton.jit\ndef outer"),
]
OTHER = [
    ("kernel", "tl.load(x_ptr)", "tl.load(x_ptr + 1)"),
    ("kernel", "GROUP = tl.constexpr(128)", "GROUP = tl.constexpr(64)"),
    ("kernel", "(1, 2)", "(3, 2)"),
    ("kernel", "x + GROUP + N", "x + GROUP - N"),
    ("kernel", "= 4)", "= 8)"),
    ("kernel", "make(2), make(3)", "make(2), make(4)"),
    ("kernel", "make(2), make(3)", "make(3), make(2)"),
    ("kernel", "x * m", "x + m"),
    ("kernel", "n: tl.constexpr" if False else "x_ptr, n,", "x_ptr, n: tl.int64,"),
    ("kernel", "@triton.jit\ndef helper", "@triton.jit(noinline=True)\ndef helper"),
    ("kernel", "import inner as called", "import deepest as called"),
    ("helpers", "GROUP = tl.constexpr(64)", "GROUP = tl.constexpr(128)"),
    ("helpers", "OFFSET = tl.constexpr(7)", "OFFSET = tl.constexpr(8)"),
    ("helpers", "x + GROUP", "x - GROUP"),
    ("helpers", "x - 1", "x - 2"),
]


def test_a_functions_key_is_all_that_its_code_depends_on(tmp_path: Path) -> None:
    changes = [None, *SAME, *OTHER]
    for i, change in enumerate(changes):
        texts = {"kernel": SOURCES.format(package=f"package{i}"), "helpers": HELPERS}
        if change is not None:
            where, old, new = change
            assert texts[where].count(old) == 1, change
            texts[where] = texts[where].replace(old, new)
        (tmp_path / f"package{i}").mkdir()
        for name, text in texts.items():
            # The package's own name is no part of what is changed.
            (tmp_path / f"package{i}" / f"{name}.py").write_text(text)
    code = (
        "import importlib, sys\n"
        "from fp8_aot.aot.source import source_sha256\n"
        "for i in range(int(sys.argv[1])):\n"
        "    module = importlib.import_module(f'package{i}.kernel')\n"
        "    print(source_sha256(module.fn))\n"
    )
    for i in range(len(changes)):
        # Each package refers to itself by a name of the same kind.
        text = (tmp_path / f"package{i}" / "kernel.py").read_text()
        text = text.replace(
            f"import package{i}.helpers\n", f"import package{i}.helpers\nimport package{i} as package\n"
        )
        text = text.replace(f" package{i}.helpers.outer", " package.helpers.outer")
        text = text.replace(f" package{i}.helpers.OFFSET", " package.helpers.OFFSET")
        (tmp_path / f"package{i}" / "kernel.py").write_text(text)
    env = {**compiling_environment(), **pythonpath(tmp_path)}
    command = [sys.executable, "-c", code, str(len(changes))]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    first, *digests = done.stdout.split()
    assert len(first) == 64
    for change, digest in zip(SAME, digests[: len(SAME)], strict=True):
        assert digest == first, change
    others = digests[len(SAME) :]
    for change, digest in zip(OTHER, others, strict=True):
        assert digest != first, change
    assert len(set(others)) == len(others)


def test_manifests_are_canonical(bundles: Path) -> None:
    for path in bundles.glob("*.zip"):
        data = path.read_bytes()
        entries = schema.read(data, str(path))
        manifest = bytes(entries["manifest.json"])
        assert schema.encode(schema.decode(manifest, str(path))) == manifest
        assert schema.write(manifest, {name: bytes(entries[name]) for name in list(entries)[1:]}) == data
