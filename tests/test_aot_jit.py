"""Each object in a bundle is the binary that Triton's JIT makes of the same kernel, tile and target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, compiling_environment
from samples import TRITON

from fp8_aot.loader.bundle import Bundle

MATRIX = ROOT / "build_matrix.toml"

# ptxas 12.9, which Triton 3.6 has for Blackwell, gives other bytes each time: there, what it is given is compared.
PTX_ONLY = {"sm100"} if TRITON.startswith("3.6.") else set()


@pytest.mark.parametrize("target", ["sm90", "sm100", "gfx942"])
def test_objects_are_what_the_jit_makes(
    target: str, bundles: Path, jit_binaries: dict[str, dict[str, list[str]]], tmp_path: Path
) -> None:
    jit = jit_binaries[target]
    if target in PTX_ONLY:
        ours = ptx(target, tmp_path / "ptx.json")
        theirs = {name: ptx for name, (_, ptx) in jit.items()}
    else:
        ours = {v.id: v.object for v in Bundle(bundles / f"{target}.zip").manifest.variants}
        theirs = {name: binary for name, (binary, _) in jit.items()}
    assert set(ours) == set(theirs)
    assert len(set(ours.values())) > 1
    different = [name for name, digest in ours.items() if digest != theirs[name]]
    assert not different


def ptx(target: str, output: Path) -> dict[str, str]:
    command = [sys.executable, Path(__file__).parent / "aot_ptx.py", MATRIX, target, output]
    done = subprocess.run(command, capture_output=True, text=True, env=compiling_environment())
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(output.read_text())
    return found


def test_the_jit_was_asked_for_every_cell(bundles: Path, jit_binaries: dict[str, dict[str, list[str]]]) -> None:
    assert set(jit_binaries) == {path.stem for path in bundles.glob("*.zip")}
