"""Every gfx942 binary of the bundle, launched by the loader and executed by an emulator, instruction by instruction."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import ROOT, compiling_environment, fp8_aot
from gfx942.arithmetic import OutOfRange
from gfx942.code import load
from gfx942.machine import DEFAULT, Settings
from gfx942.memory import OutOfBounds, WrongCoverage
from gfx942_kit import emulate, preferring
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interp import allocate
from loader_kit import manifest_of, objects_of
from mutation import replaced
from operands import assert_same, assert_within_bound, awkward, gemm_operands, wide
from samples import TARGETS, write_matrix

from fp8_aot.kernels import SPECS, gemm, quant
from fp8_aot.loader import config

pytest_plugins = "loader_fixtures"

FP8 = "e4m3fnuz"
MATRIX = tomllib.loads((ROOT / "build_matrix.toml").read_text())


def ids(kernels: str) -> list[str]:
    """Names of the variants of some kernels: the bundle has them, in this order or the test fails."""
    found = []
    for entry in MATRIX["kernel"]:
        name = entry["source"].rpartition(":")[2]
        axis = "out" if name.startswith("gemm_") else "in"
        for dtype in SPECS[name].dtypes[axis] if re.match(kernels, name) else ():
            for tile in entry["tiles"]:
                if "gfx942" in tile.get("targets", ["gfx942"]):
                    values = {**{t.name: tile[t.name] for t in SPECS[name].tiles}}
                    values |= {"num_warps": tile["num_warps"], "num_stages": tile.get("num_stages", 3)}
                    label = ",".join(f"{key}={value}" for key, value in values.items())
                    kinds = tile.get("specializations", ["aligned", "general"])
                    found += [f"{name}/{axis}={dtype}/{label}/{kind}" for kind in kinds]
    return found


QUANTIZERS, GEMMS = ids("act_|weight_"), ids("gemm_")


@pytest.fixture(scope="module")
def variants(bundles: Path) -> dict[str, dict[str, Any]]:
    return {v["id"]: v for v in manifest_of(bundles / "gfx942.zip")["variants"]}


@pytest.fixture
def only(clean_loader: None, bundles: Path, variants: dict[str, Any], tmp_path: Path) -> Any:
    """``only(id)``: that variant serves what it can; gives it."""

    def use(name: str) -> dict[str, Any]:
        config.update("strict", preferring(variants[name], bundles / "gfx942.zip", tmp_path / "gfx942.zip"))
        return variants[name]

    return use


# Nothing of a chip's freedom may be seen in a result.
CHIPS = st.builds(Settings, preload=st.booleans(), rcp_rounding=st.sampled_from((-1, 0, 1)), backwards=st.booleans())
few = settings(
    max_examples=2,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)


def quantize(kernel: str, x: torch.Tensor, dtype: str, chip: Settings = DEFAULT, pad: int = 0) -> Any:
    """A quantizer's bytes and scales, and the device that they were made on."""
    spec = SPECS[kernel]
    rows, cols = (d.symbol for d in spec.tensors[0].shape)
    tensors = allocate(spec, {rows: x.shape[0], cols: x.shape[1]}, {"in": dtype}, FP8, pad=pad, offset=pad)
    tensors[spec.tensors[0].name].copy_(x)
    device = emulate(kernel, tensors, chip)
    return (tensors["y"].view(torch.uint8).numpy(), tensors["scale"].numpy()), device


def test_the_bundle_has_these_variants(variants: dict[str, Any]) -> None:
    assert sorted(variants) == sorted(QUANTIZERS + GEMMS)


@pytest.mark.parametrize("name", QUANTIZERS)
@few
@given(rows=st.integers(1, 17), cols=st.integers(1, 17), seed=st.integers(0, 999), chip=CHIPS)
def test_quantizers(name: str, only: Any, rows: int, cols: int, seed: int, chip: Settings) -> None:
    """Bit for bit the oracle's, NaN and Inf included, in bounds, each element written once."""
    variant = only(name)
    kernel, dtype = variant["kernel"], variant["dtypes"]["in"]
    if variant["specialization"] == "aligned":
        shape, pad = (16 * rows, 16 * cols), 16 * (seed % 3)
    else:
        shape, pad = (16 * rows - seed % 16, 16 * cols - seed % 15), seed % 10
    x = awkward(*shape, dtype, seed)
    got, device = quantize(kernel, x, dtype, chip, pad)
    assert [load.digest for load in device.loads] == [variant["object"]]
    assert_same(got, oracle.QUANTIZERS[kernel](oracle.exact(x), FP8), FP8)


@pytest.mark.parametrize("name", GEMMS)
@few
@given(
    m=st.integers(1, 9), n=st.integers(1, 10), k=st.integers(0, 17), seed=st.integers(0, 999), chip=CHIPS,
)  # fmt: skip
def test_gemms(name: str, only: Any, m: int, n: int, k: int, seed: int, chip: Settings) -> None:
    """Within what fp32 accumulation can lose, in bounds, each element written once."""
    variant = only(name)
    if variant["specialization"] == "aligned":
        # Without any K the strides would be 1.
        shape, pad = (16 * m - seed % 16, 16 * n, 16 * max(k, 1)), 16 * (seed % 3)
    else:
        shape, pad = (16 * m - seed % 16, 16 * n - seed % 15, max(16 * k - seed % 14, 0)), seed % 10
    kernel, out = variant["kernel"], variant["dtypes"]["out"]
    tensors = gemm_operands(kernel, *shape, FP8, out, seed, pad)
    device = emulate(kernel, tensors, chip)
    assert [load.digest for load in device.loads] == [variant["object"]]
    assert_within_bound(kernel, tensors, out)


@pytest.mark.parametrize("name", [name for name in GEMMS if "out=fp32" in name])
def test_small_integers_are_exact(name: str, only: Any) -> None:
    """Nothing to round: any order of any sum gives the true result."""
    variant = only(name)
    rng = np.random.default_rng(3)
    kernel, n = variant["kernel"], 144
    tensors = gemm_operands(kernel, 35, n, 304, FP8, "fp32", 0)
    for t in tensors["a"], tensors["b"]:
        t.copy_(torch.from_numpy(rng.integers(-8, 9, t.shape)))
    for t in tensors["a_s"], tensors["b_s"]:
        t.copy_(torch.from_numpy(np.exp2(rng.integers(-2, 3, t.shape))))
    device = emulate(kernel, tensors)
    assert [load.digest for load in device.loads] == [variant["object"]]
    a, b, a_s = (oracle.exact(tensors[t]) for t in ("a", "b", "a_s"))
    expected, _ = oracle.gemm(a, b, a_s, wide(tensors["b_s"], kernel, n))
    np.testing.assert_array_equal(tensors["c"].numpy(), expected)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", oracle.QUANTIZERS)
def test_nan_inf_and_negative_zero(kernel: str, dtype: str, only: Any, variants: dict[str, Any]) -> None:
    """0x80 is the only NaN; -0 and what rounds to it are 0x00."""
    only(next(v["id"] for v in variants.values() if v["kernel"] == kernel and v["dtypes"]["in"] == dtype))
    x = torch.zeros(128, 384)
    x[:, 0] = -0.0
    x[:, 128:256] = -1.0
    x[0, 128], x[127, 255] = 2.0**-13, -(2.0**-12)  # of an amax of 1: below half of the least fp8 number
    x[5, 256], x[6, 270], x[5, 300] = float("nan"), float("-inf"), -0.0
    x = x.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype])
    (y, scale), _ = quantize(kernel, x, dtype)
    assert_same((y, scale), oracle.QUANTIZERS[kernel](oracle.exact(x), FP8), FP8)
    assert not (y == 0x80)[(slice(0, 256) if y.shape[0] == 384 else slice(None))].all()
    nan = np.isnan(oracle.fp8_values(FP8)[y])
    assert (y[nan] == 0x80).all() and nan.any()


FAULTS = [
    pytest.param(gemm, "gemm_1x128_128x128", "a_s = tl.load(a_s_ptrs, mask=m_mask, other=0.0)",
                 "a_s = tl.load(a_s_ptrs)", "gemm_1x128_128x128_kernel", OutOfBounds, id="scale loads of a GEMM"),
    pytest.param(quant, "act_quant_lhs", "reciprocal(scale), mask=r < rows)",
                 "reciprocal(scale))", "quant_1x128", (OutOfBounds, WrongCoverage), id="scale stores of a quantizer"),
    pytest.param(quant, "act_quant_lhs", "mask=r_mask[:, None] & c_mask[None, :],",
                 "mask=r_mask[:, None] & (c_mask | True)[None, :],", "store_rows", (OutOfBounds, WrongCoverage),
                 id="stores beyond a row"),
    pytest.param(quant, "act_quant_rhs", "mask=(r < rows)[:, None] & (c < cols)[None, :],\n        other=0.0,",
                 "mask=(r < rows)[:, None] & (c < cols + 1)[None, :],\n        other=0.0,", "load_rows", OutOfBounds,
                 id="loads one beyond a row"),
    pytest.param(quant, "act_quant_lhs", "tl.clamp(x * scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)",
                 "x * scale * 1.001", "to_fp8", OutOfRange, id="no clamp"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "kernel", "old", "new", "function", "error"), FAULTS)
def test_faults_are_found(
    module: ModuleType, kernel: str, old: str, new: str, function: str, error: Any, tmp_path: Path, clean_loader: None
) -> None:
    """The public bugs that this project began with, and others of their kind, in binaries made from them."""
    package = tmp_path / "site" / "faulty"
    package.mkdir(parents=True)
    (package / "kernels.py").write_text(replaced(module, old, new, function))
    entry = next(e for e in MATRIX["kernel"] if e["source"].endswith(f":{kernel}"))
    axis = "out" if kernel.startswith("gemm_") else "in"
    tiles = [t for t in entry["tiles"] if "general" in t.get("specializations", ["general"])]
    tile = {**tiles[-1], "specializations": ["general"], "targets": ["gfx942"]}
    tile.pop("when", None)
    matrix = {
        "schema": MATRIX["schema"],
        "toolchain": MATRIX["toolchain"],
        "target": {"gfx942": TARGETS["gfx942"]},
        "kernel": [{"source": f"faulty.kernels:{kernel}", f"{axis}_dtype": ["bf16"], "tiles": [tile]}],
    }
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    fp8_aot(
        "build", "--matrix", write_matrix(tmp_path / "matrix.toml", matrix), "--out", tmp_path / "out",
        "--cache", tmp_path / "cache", env={"PYTHONPATH": path},
    )  # fmt: skip
    config.update("strict", tmp_path / "out" / "gfx942.zip")
    with pytest.raises(error):
        if axis == "out":
            emulate(kernel, gemm_operands(kernel, 33, 40, 130, FP8, "bf16", 1))
        else:
            quantize(kernel, awkward(33, 130, "bf16", 2), "bf16")


ASSEMBLY = """
import json, sys, tempfile
from pathlib import Path
from fp8_aot.aot import worker
with tempfile.TemporaryDirectory() as scratch:
    worker.prepare(Path(scratch))
    from fp8_aot.aot.cells import expand
    from fp8_aot.aot.compile import request
    from fp8_aot.aot.matrix import load
    found = {}
    for cell in expand(load(Path(sys.argv[1])), ["gfx942"]):
        if cell.id in sys.argv[3:]:
            found[cell.id] = worker.triton_compile(request(cell)).asm["amdgcn"]
Path(sys.argv[2]).write_text(json.dumps(found))
"""


def test_the_decoder_reads_what_the_assembler_wrote(variants: dict[str, Any], bundles: Path, tmp_path: Path) -> None:
    """For binaries of every kernel: instruction by instruction, the names of LLVM's assembly."""
    chosen = {(v["kernel"], v["specialization"]): v for v in variants.values() if "bf16" in v["dtypes"].values()}
    command = [sys.executable, "-c", ASSEMBLY, ROOT / "build_matrix.toml", tmp_path / "asm.json"]
    command += [v["id"] for v in chosen.values()]
    done = subprocess.run(command, capture_output=True, text=True, env=compiling_environment())
    assert done.returncode == 0, done.stderr
    texts = json.loads((tmp_path / "asm.json").read_text())
    objects = objects_of(bundles / "gfx942.zip")
    for v in chosen.values():
        body = texts[v["id"]].split(f"\n{v['symbol']}:", 1)[1].split(".Lfunc_end0:", 1)[0]
        written = re.findall(r"^\t([a-z]\w+)", body, re.MULTILINE)
        code = load(objects[f"objects/{v['object']}.hsaco"], v["symbol"])
        read = [i.op.name.lower() for _, i in code.instructions]
        assert plain(read) == plain(written), v["id"]


def plain(names: list[str]) -> list[str]:
    """Names without encodings and without padding."""
    same = {"v_fma_mix_f32": "v_mad_mix_f32"}
    names = [re.sub(r"_(e32|e64|sdwa|dpp|e64_dpp)$", "", name) for name in names]
    return [same.get(name, name) for name in names if name != "s_nop"]
