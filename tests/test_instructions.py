"""The GEMMs and quantizers use the fp8 instructions of each target, and spill nothing."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from building import parts
from conftest import ROOT, compiling_environment

from fp8_aot.loader.schema import Variant


def gemms(path: Path) -> dict[str, list[Variant]]:
    """Variants of the GEMMs whose tiles fill a tensor core instruction, by object."""
    manifest, _ = parts(path)
    by_object: dict[str, list[Variant]] = {}
    for v in manifest.variants:
        if v.kernel.startswith("gemm_") and v.constexprs["BLOCK_M"] >= 64:
            by_object.setdefault(v.object, []).append(v)
    return by_object


@pytest.mark.parametrize(("target", "instruction"), [("sm90", "QGMMA"), ("sm100", "UTCQMMA")])
def test_gemms_use_the_fp8_tensor_cores(target: str, instruction: str, bundles: Path, tmp_path: Path) -> None:
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("this Triton comes without nvdisasm")
    _, objects = parts(bundles / f"{target}.zip")
    found = gemms(bundles / f"{target}.zip")
    assert found
    for digest, variants in found.items():
        file = tmp_path / "x.cubin"
        file.write_bytes(objects[f"objects/{digest}.cubin"])
        text = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout
        assert re.search(rf"\b{instruction}\b", text), variants[0].id
        assert not re.search(r"\bHMMA\b", text), variants[0].id


AMD_GEMM = """
import json, sys, tempfile
from pathlib import Path
from fp8_aot.aot import worker
with tempfile.TemporaryDirectory() as scratch:
    worker.prepare(Path(scratch))
    from fp8_aot.aot.cells import expand
    from fp8_aot.aot.compile import request
    from fp8_aot.aot.matrix import load
    found = {}
    for cell in expand(load(Path(sys.argv[1])), ["gfx942"], [sys.argv[2]]):
        if cell.id in sys.argv[4:]:
            found[cell.id] = worker.triton_compile(request(cell)).asm["amdgcn"]
Path(sys.argv[3]).write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("kernel", "pattern"),
    [
        ("gemm_1x128_128x128", r"\bv_mfma_f32_\w+_fp8_fp8\b"),
        ("act_quant_lhs", r"\bv_cvt_pk_fp8_f32\b"),
    ],
)
def test_amd_kernels_use_the_fp8_instructions(kernel: str, pattern: str, bundles: Path, tmp_path: Path) -> None:
    manifest, _ = parts(bundles / "gfx942.zip")
    chosen = [v.id for v in manifest.variants if v.kernel == kernel and "bf16" in v.dtypes.values()]
    output = tmp_path / "asm.json"
    command = [sys.executable, "-c", AMD_GEMM, ROOT / "build_matrix.toml", kernel, output, *chosen]
    done = subprocess.run(command, capture_output=True, text=True, env=compiling_environment())
    assert done.returncode == 0, done.stderr
    assembly: dict[str, Any] = json.loads(output.read_text())
    assert set(assembly) == set(chosen)
    for name, text in assembly.items():
        assert re.search(pattern, text), name
        # No spills: no scratch memory, and no vector registers moved to others.
        assert re.search(r"\.private_segment_fixed_size:\s*0\b", text), name
        assert re.search(r"\.vgpr_spill_count:\s*0\b", text), name
