"""The GEMMs in Triton's interpreter, against fp64 products with the error bound of ``oracle.gemm``.

A result in fp32 must lie within that bound of the fp64 product.  bf16 and fp16 results must lie between the
two ends of the bound after these are rounded to the same format: rounding is monotone, so nothing wider
is needed, and no tolerance is chosen anywhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interp import allocate, label, matrix_configs, run
from mutation import load_mutated, replaced
from operands import assert_within_bound, gemm_operands, wide

from fp8_aot.kernels import SPECS, gemm
from fp8_aot.kernels.spec import Config, KernelSpec

FP8 = ("e4m3fn", "e4m3fnuz")
OUT = ("bf16", "fp16", "fp32")
GEMMS = ("gemm_1x128_128x128", "gemm_1x128_128x1")
TILES = [(n, c) for n in GEMMS for c in matrix_configs(n)]

UPSTREAM = (
    (2, 512, 128),
    (2, 5120, 1280),
    (3, 2048, 2048),
    (4, 3584, 640),
    (13, 8704, 8576),
    (26, 18944, 1664),
    (67, 6656, 1408),
)
"""The shapes (M, N, K) of torchao's tests."""

per_fp8 = pytest.mark.parametrize("fp8", FP8)
per_out = pytest.mark.parametrize("out", OUT)
per_gemm = pytest.mark.parametrize("name", GEMMS)
per_tile = pytest.mark.parametrize(("name", "config"), [pytest.param(n, c, id=f"{n}-{label(c)}") for n, c in TILES])


def small(size: int) -> int:
    """A size of at most 1024 as it is; a larger one cut to 512 + its remainder of 512, for speed."""
    return size if size <= 1024 else 512 + size % 512


@per_fp8
@per_out
@per_tile
@settings(deadline=None, derandomize=True, max_examples=3, database=None)
@given(
    m=st.sampled_from((1, 2, 15, 17, 65, 130)),
    n=st.sampled_from((1, 31, 64, 127, 129, 200)),
    k=st.sampled_from((1, 31, 33, 100, 127, 128, 129, 256, 300)),
    pad=st.integers(0, 9),
    seed=st.integers(0, 999),
)
@example(m=67, n=130, k=300, pad=1, seed=1)
def test_within_the_error_bound(
    name: str, config: Config, out: str, fp8: str, m: int, n: int, k: int, pad: int, seed: int
) -> None:
    """Any shape, any row stride: within what fp32 accumulation can lose."""
    tensors = gemm_operands(name, m, n, k, fp8, out, seed, pad)
    run(SPECS[name], tensors, config, fp8)
    assert_within_bound(name, tensors, out)


@per_fp8
@per_tile
def test_small_integers_are_exact(name: str, config: Config, fp8: str) -> None:
    """Integer operands and powers of two as scales leave nothing to round: fp32 results are the true ones."""
    rng = np.random.default_rng(3)
    m, n, k = 35, 140, 300
    tensors = gemm_operands(name, m, n, k, fp8, "fp32", 0)
    for t in tensors["a"], tensors["b"]:
        t.copy_(torch.from_numpy(rng.integers(-8, 9, t.shape)))
    for t in tensors["a_s"], tensors["b_s"]:
        t.copy_(torch.from_numpy(np.exp2(rng.integers(-2, 3, t.shape))))
    run(SPECS[name], tensors, config, fp8)
    a, b, a_s = (oracle.exact(tensors[t]) for t in ("a", "b", "a_s"))
    expected, _ = oracle.gemm(a, b, a_s, wide(tensors["b_s"], name, n))
    np.testing.assert_array_equal(tensors["c"].numpy(), expected)


@per_out
@per_tile
@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 0), (0, 7, 130), (5, 0, 130), (0, 0, 0)])
def test_empty(name: str, config: Config, out: str, m: int, n: int, k: int) -> None:
    """K = 0 gives zeros, positive ones; M = 0 or N = 0 nothing, without a launch."""
    tensors = gemm_operands(name, m, n, k, "e4m3fn", out, 0)
    run(SPECS[name], tensors, config)
    assert tensors["c"].shape == (m, n)
    assert (tensors["c"] == 0).all() and not torch.signbit(tensors["c"]).any()


@per_fp8
@per_tile
def test_nan_reaches_its_row_or_column_only(name: str, config: Config, fp8: str) -> None:
    """A NaN in a or a_s makes a row of c NaN, one in b or b_s a column, or the columns that share its scale."""
    m, n, k = 40, 150, 200
    rows, cols = np.zeros(m, bool), np.zeros(n, bool)
    tensors = gemm_operands(name, m, n, k, fp8, "fp32", 0)
    tensors["a"][3, 199] = torch.nan
    tensors["a_s"][17, 1] = torch.nan
    rows[[3, 17]] = True
    tensors["b"][130, 10] = torch.nan
    cols[10] = True
    if name == "gemm_1x128_128x1":
        tensors["b_s"][1, 140] = torch.nan
        cols[140] = True
    else:
        tensors["b_s"][1, 1] = torch.nan
        cols[128:] = True
    run(SPECS[name], tensors, config, fp8)
    assert_within_bound(name, tensors, "fp32")
    np.testing.assert_array_equal(np.isnan(tensors["c"].numpy()), rows[:, None] | cols)


@per_tile
def test_inf_scales(name: str, config: Config) -> None:
    """Inf times a sum is Inf of its sign, times zero NaN, and Inf - Inf NaN, as in fp64."""
    m, n, k = 20, 140, 256
    tensors = gemm_operands(name, m, n, k, "e4m3fn", "fp32", 0)
    tensors["a"].copy_(torch.ones(m, k))
    tensors["b"].copy_(torch.ones(k, n))
    tensors["a"][5, :128] = 0.0
    tensors["b"][:128, 9] = -1.0
    tensors["a_s"][4:7, 0] = torch.inf
    tensors["a_s"][6, 1] = -torch.inf
    run(SPECS[name], tensors, config)
    c = tensors["c"]
    assert_within_bound(name, tensors, "fp32")
    assert c[4, 0] == torch.inf and c[4, 9] == -torch.inf
    assert torch.isnan(c[5]).all() and torch.isnan(c[6, 0]) and c[6, 9] == -torch.inf
    assert torch.isfinite(c[7:]).all()


@per_gemm
@pytest.mark.parametrize(("out", "most"), [("fp16", 65504.0), ("bf16", 3.3895e38)])
def test_results_beyond_the_output_format_are_inf(name: str, out: str, most: float) -> None:
    tensors = gemm_operands(name, 3, 20, 128, "e4m3fn", out, 0)
    tensors["a"].copy_(torch.ones(3, 128))
    tensors["b"].copy_(torch.ones(128, 20))
    tensors["b_s"].fill_(1.0)
    tensors["a_s"][:, 0] = torch.tensor([most / 128, most / 128 * 1.002, -most / 128 * 1.002])
    run(SPECS[name], tensors, SPECS[name].default)
    assert_within_bound(name, tensors, out)
    assert torch.isfinite(tensors["c"][0]).all()
    assert (tensors["c"][1] == torch.inf).all() and (tensors["c"][2] == -torch.inf).all()


@per_fp8
@pytest.mark.parametrize(("m", "n", "k"), UPSTREAM)
@per_gemm
def test_quantized_product_is_close_to_the_true_one(name: str, m: int, n: int, k: int, fp8: str) -> None:
    """Quantizers and GEMM together: 28 dB (torchao's bar) against the product of what was quantized.

    M is upstream's; N and K are too, up to 1024, and cut as :func:`small` says above that.  The shapes take
    turns with the tiles.
    """
    shape = UPSTREAM.index((m, n, k))
    n, k = small(n), small(k)
    tiles = matrix_configs(name)
    config = tiles[(shape + FP8.index(fp8) * len(UPSTREAM)) % len(tiles)]
    g = torch.Generator().manual_seed(shape)
    x, w = torch.randn(m, k, generator=g).bfloat16(), torch.randn(k, n, generator=g).bfloat16()

    a, a_s = quantized("act_quant_lhs", x, fp8)
    if name == "gemm_1x128_128x1":
        b, b_s = quantized("act_quant_rhs", w, fp8)
    else:
        b, b_s = quantized("weight_quant_transposed_rhs", w.T.contiguous(), fp8)
    c = torch.empty(m, n, dtype=torch.bfloat16)
    tensors = {"a": a, "b": b, "a_s": a_s, "b_s": b_s, "c": c}
    run(SPECS[name], tensors, config, fp8)
    assert_within_bound(name, tensors, "bf16")
    assert oracle.sqnr(oracle.exact(x) @ oracle.exact(w), oracle.exact(c)) >= 28


def quantized(name: str, x: torch.Tensor, fp8: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a quantizer, from the interpreter, with a large tile for speed."""
    spec = SPECS[name]
    rows, cols = (d.symbol for d in spec.tensors[0].shape)
    tensors = allocate(spec, {rows: x.shape[0], cols: x.shape[1]}, {"in": "bf16"}, fp8)
    tensors[spec.tensors[0].name].copy_(x)
    run(spec, tensors, Config({t.name: t.most for t in spec.tiles}), fp8)
    return tensors["y"], tensors["scale"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("acc += product * a_s[:, None] * b_s[None, :]", "acc = product * a_s[:, None] * b_s[None, :]"),
        ("a_s_ptrs += stride_a_s", "a_s_ptrs += 0"),
        ("b_s_ptrs += stride_b_s", "b_s_ptrs += 0"),
        (
            "acc += product * a_s[:, None] * b_s[None, :]",
            "acc += product.to(tl.bfloat16).to(tl.float32) * a_s[:, None] * b_s[None, :]",
        ),
    ],
)
def test_the_bound_sees_a_wrong_kernel(old: str, new: str, tmp_path: Path) -> None:
    """Each change of one line takes the result out of the bound, even after rounding to bf16."""
    mutated: KernelSpec = load_mutated(replaced(gemm, old, new, "gemm_1x128_128x1_kernel"), tmp_path)[GEMMS[1]]
    tensors = gemm_operands(mutated.name, 20, 40, 384, "e4m3fn", "bf16", 0)
    run(mutated, tensors, mutated.default)
    with pytest.raises(AssertionError, match="expected"):
        assert_within_bound(mutated.name, tensors, "bf16")
