"""Wheels, source archives and editable installs hold the package, all of it and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, compiling_environment
from samples import copy_matrix, write_matrix

from fp8_aot.loader import schema

FOLDERS = ("aot", "kernels", "loader")


def call(*command: str | Path, path: Path | None = None, cwd: Path) -> str:
    """Run a program with nothing but ``path`` in PYTHONPATH; gives its output."""
    env = {name: value for name, value in compiling_environment().items() if name != "PYTHONPATH"}
    env |= {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of what is to be installed."""
    copy = tmp_path_factory.mktemp("checkout") / "fp8-aot"
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "build_matrix.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, checkout, cwd=out)
    (made,) = out.iterdir()
    return made


def sources() -> set[str]:
    """What an installed package holds, by path."""
    files = {path for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    files |= {ROOT / name / "py.typed" for name in FOLDERS} | {ROOT / "aot" / "build_matrix.toml"}
    return {f"fp8_aot/{path.relative_to(ROOT)}" for path in files if "__pycache__" not in path.parts}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_every_package_on_disk_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    on_disk = {
        "fp8_aot." + ".".join(path.parent.relative_to(ROOT).parts)
        for name in FOLDERS
        for path in (ROOT / name).rglob("*.py")
    }
    assert sorted(on_disk) == setuptools["packages"]
    assert setuptools["package-dir"] == {f"fp8_aot.{name}": name for name in FOLDERS}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"fp8_aot-{schema.VERSION}-py3-none-any.whl"
    files = contents(wheel)
    assert set(files) == sources()
    for name, data in files.items():
        assert data == (ROOT / name.removeprefix("fp8_aot/")).read_bytes(), name
    with zipfile.ZipFile(wheel) as archive:
        info = f"fp8_aot-{schema.VERSION}.dist-info"
        assert archive.read(f"{info}/entry_points.txt").decode().split("\n")[:2] == [
            "[console_scripts]",
            "fp8-aot = fp8_aot.aot.cli:main",
        ]
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_source_archive_makes_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, checkout, cwd=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    out = tmp_path / "out"
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, unpacked, cwd=tmp_path)
    (again,) = out.iterdir()
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def other_portion(folder: Path) -> None:
    """A package of somebody else's below the namespace ``fp8_aot``, as wheels with bundles are."""
    (folder / "fp8_aot" / "artifacts" / "x").mkdir(parents=True)
    (folder / "fp8_aot" / "artifacts" / "x" / "__init__.py").write_text("NAME = 'x'\n")


SHOW = (
    "import fp8_aot.aot, fp8_aot.kernels, fp8_aot.loader, fp8_aot.artifacts.x as x; "
    "print(fp8_aot.aot.__path__[0], fp8_aot.kernels.__file__, fp8_aot.loader.__file__, x.NAME, sep='\\n')"
)


def test_an_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    site, cwd = tmp_path / "site", tmp_path / "empty"
    cwd.mkdir()
    call(*(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel), cwd=cwd)
    assert {path.name for path in site.iterdir()} == {"fp8_aot", f"fp8_aot-{schema.VERSION}.dist-info", "bin"}
    other_portion(tmp_path / "other")
    paths = call(sys.executable, "-c", SHOW, path=Path(f"{site}{os.pathsep}{tmp_path / 'other'}"), cwd=cwd).split("\n")
    assert all(Path(path).is_relative_to(site) for path in paths[:3]), paths
    assert paths[3] == "x"
    # There is no matrix in this folder: the packaged one is used.
    cells = json.loads(call(sys.executable, "-m", "fp8_aot.aot", "list", "--json", path=site, cwd=cwd))
    own = call(sys.executable, "-m", "fp8_aot.aot", "list", "--json", path=site, cwd=ROOT)
    assert cells == json.loads(own)
    assert cells
    call(sys.executable, "-m", "fp8_aot.aot", "build", "--dry-run", path=site, cwd=cwd)
    assert list(cwd.iterdir()) == []


def test_an_editable_install_works(checkout: Path, tmp_path: Path) -> None:
    environment, cwd = tmp_path / "venv", tmp_path / "empty"
    cwd.mkdir()
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=cwd).strip())
    # What the package depends on, and the tools that build it, come from this environment.
    ours = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    call(*pip, "--ignore-installed", "--no-build-isolation", "-e", checkout, cwd=cwd)

    other_portion(tmp_path / "other")
    paths = call(python, "-c", SHOW, path=tmp_path / "other", cwd=cwd).split("\n")
    assert all(Path(path).is_relative_to(checkout) for path in paths[:3]), paths
    assert paths[3] == "x"
    for name in FOLDERS:
        gone = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        call(python, "-c", gone, cwd=cwd)

    command = environment / "bin" / "fp8-aot"
    assert call(command, "--version", cwd=cwd) == f"fp8-aot, version {schema.VERSION}\n"
    assert json.loads(call(command, "list", "--json", cwd=cwd))
    # Compiling processes find the package, too.
    values = copy_matrix("fp8_aot.kernels.quant:act_quant_lhs", targets=("gfx942",))
    values["kernel"][0]["tiles"] = [{"BLOCK_R": 32, "specializations": ["general"]}]
    matrix = write_matrix(cwd / "my.toml", values)
    call(command, "build", "--matrix", matrix, "--out", cwd / "out", "--no-cache", cwd=cwd)
    assert [path.name for path in (cwd / "out").iterdir()] == ["gfx942.zip"]
