"""The quantizers in Triton's interpreter, bit for bit against torchao and against an fp64 oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from checked_builder import FLOATS, OutOfRange
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interp import TORCH, TRITON, allocate, label, matrix_configs, run
from mutation import load_mutated, replaced
from operands import assert_same, awkward
from torchao.prototype.blockwise_fp8_training import kernels as torchao

from fp8_aot.kernels import SPECS, quant
from fp8_aot.kernels.spec import Config, KernelSpec

FP8 = ("e4m3fn", "e4m3fnuz")
DTYPES = ("bf16", "fp16", "fp32")
SIZES = (0, 1, 2, 5, 31, 33, 64, 100, 127, 128, 129, 200, 256, 257, 300)

per_fp8 = pytest.mark.parametrize("fp8", FP8)
per_dtype = pytest.mark.parametrize("dtype", DTYPES)
per_quantizer = pytest.mark.parametrize("name", oracle.QUANTIZERS)
per_tile = pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(n, c, id=f"{n}-{label(c)}") for n in oracle.QUANTIZERS for c in matrix_configs(n)],
)


def quantize(
    spec: KernelSpec, config: Config, x: torch.Tensor, fp8: str, *, pad: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """A quantizer's fp8 bytes and fp32 scales, from the interpreter."""
    rows, cols = (d.symbol for d in spec.tensors[0].shape)
    dtype = next(name for name, known in TORCH.items() if known == x.dtype)
    tensors = allocate(spec, {rows: x.shape[0], cols: x.shape[1]}, {"in": dtype}, fp8, pad=pad, offset=pad)
    tensors[spec.tensors[0].name].copy_(x)
    run(spec, tensors, config, fp8)
    return tensors["y"].view(torch.uint8).numpy(), tensors["scale"].numpy()


def torchao_quantize(name: str, x: torch.Tensor, fp8: str) -> tuple[np.ndarray, np.ndarray]:
    """The same from torchao's torch references, of which there are three for five operations."""
    dtype = TORCH[fp8]
    if name == "act_quant_lhs":
        y, scale = torchao.torch_blockwise_scale_act_quant_lhs(x, dtype=dtype)
    elif name == "act_quant_transposed_lhs":
        y, scale = torchao.torch_blockwise_scale_act_quant_lhs(x.T.contiguous(), dtype=dtype)
    elif name == "act_quant_rhs":
        # It clamps amax in the input's dtype, where 1e-12 is another number, or 0; every input fits in fp32.
        y, scale = torchao.torch_blockwise_scale_act_quant_rhs(x.float(), dtype=dtype)
    else:
        y, scale = torchao.torch_blockwise_scale_weight_quant(x, dtype=dtype)
    if name == "weight_quant_transposed_rhs":
        y, scale = y.T, scale.T
    return y.view(torch.uint8).numpy(), scale.numpy()


@per_fp8
def test_fp8_conversions_of_the_interpreter_round_to_nearest_even(fp8: str) -> None:
    """Every value, every midpoint, and the fp32 numbers next to both; NaN; both zeros; subnormals of fp32."""
    target = FLOATS[TRITON[TORCH[fp8]]]
    values = oracle.fp8_values(fp8)
    np.testing.assert_array_equal(np.arange(256, dtype=np.uint8).view(target).astype(np.float64), values)
    finite = np.sort(values[np.isfinite(values)])
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    near = [np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf)]
    tiny = np.array([0.0, -0.0, 1e-45, -1e-45, np.nan], np.float32)
    x = np.concatenate([points, *near, tiny])
    x = x[~(np.abs(x) > finite[-1])]
    got = x.astype(target).view(np.uint8)
    expected = oracle.to_fp8(x.astype(np.float64), fp8)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(got[~is_nan], expected[~is_nan])
    assert np.isnan(values[got[is_nan]]).all()


def test_bf16_conversions_of_the_interpreter_round_to_nearest_even() -> None:
    """Every bf16 value, every midpoint, and the fp32 numbers next to both."""
    bfloat16 = FLOATS[TRITON[torch.bfloat16]]
    every = np.arange(2**16, dtype=np.uint32) << 16
    values = every.view(np.float32)
    assert np.array_equal((every >> 16).astype(np.uint16).view(bfloat16).astype(np.float32), values, equal_nan=True)
    finite = np.isfinite(values)
    x = np.concatenate([(every[finite] + d).view(np.float32) for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    got = x.astype(bfloat16).astype(np.float64)
    np.testing.assert_array_equal(got, oracle.round_to(x.astype(np.float64), "bf16"))


@per_fp8
@per_dtype
@per_tile
@settings(deadline=None, derandomize=True, max_examples=4, database=None)
@given(rows=st.sampled_from(SIZES), cols=st.sampled_from(SIZES), pad=st.integers(0, 9), seed=st.integers(0, 999))
@example(rows=129, cols=257, pad=0, seed=1)
@example(rows=0, cols=5, pad=0, seed=0)
@example(rows=5, cols=0, pad=0, seed=0)
def test_equals_the_oracle(
    name: str, config: Config, dtype: str, fp8: str, rows: int, cols: int, pad: int, seed: int
) -> None:
    """Any shape, any row stride: bytes and scales are those of the definition."""
    x = awkward(rows, cols, dtype, seed)
    expected = oracle.QUANTIZERS[name](oracle.exact(x), fp8)
    assert_same(quantize(SPECS[name], config, x, fp8, pad=pad), expected, fp8)


@per_fp8
@per_dtype
@per_tile
def test_equals_torchao(name: str, config: Config, dtype: str, fp8: str) -> None:
    """Where torchao takes the shape, bytes and scales are those of its torch references."""
    x = awkward(128, 256, dtype, seed=7)
    assert_same(quantize(SPECS[name], config, x, fp8), torchao_quantize(name, x, fp8), fp8)


@per_fp8
@per_dtype
@per_quantizer
@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_equals_torchao(name: str, dtype: str, fp8: str, seed: int) -> None:
    x = awkward(256, 384, dtype, seed)
    assert_same(oracle.QUANTIZERS[name](oracle.exact(x), fp8), torchao_quantize(name, x, fp8), fp8)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 13])
def test_few_rows_and_the_largest_row_tile(rows: int) -> None:
    """Scales of rows that do not exist would land in the next column (pytorch/ao #4036)."""
    x = awkward(rows, 640, "bf16", seed=2)
    spec = SPECS["act_quant_lhs"]
    (largest,) = (c for c in matrix_configs(spec) if c.constexprs["BLOCK_R"] == spec.tiles[0].most)
    expected = oracle.QUANTIZERS["act_quant_lhs"](oracle.exact(x), "e4m3fn")
    assert_same(quantize(spec, largest, x, "e4m3fn"), expected, "e4m3fn")


def above_the_top(dtype: str, fp8: str) -> torch.Tensor:
    """Rows of one group each, whose amax times scale is just above FP8_MAX in fp32."""
    rng = np.random.default_rng(0)
    top = oracle.FP8_MAX[fp8]
    amax = oracle.round_to(np.exp2(rng.uniform(-10, 10, 4000)), dtype)
    scale = oracle.round_to(top / amax, "fp32")
    amax = amax[oracle.round_to(amax * scale, "fp32") > top][:40]
    assert amax.size == 40
    x = amax[:, None] * rng.uniform(-1, 1, (40, 128))
    x[np.arange(40), rng.integers(0, 128, 40)] = amax * rng.choice([-1, 1], 40)
    return torch.from_numpy(x).to(TORCH[dtype])


@per_fp8
@per_dtype
def test_a_product_above_the_largest_value_is_clamped(dtype: str, fp8: str) -> None:
    x = above_the_top(dtype, fp8)
    spec = SPECS["act_quant_lhs"]
    expected = oracle.QUANTIZERS[spec.name](oracle.exact(x), fp8)
    assert_same(quantize(spec, spec.default, x, fp8), expected, fp8)


@per_fp8
def test_a_missing_clamp_is_seen(fp8: str, tmp_path: Path) -> None:
    """The largest value would be the result without it too, here, but not on every target."""
    clamped = "tl.clamp(x * scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)"
    spec = load_mutated(replaced(quant, clamped, "x * scale", "to_fp8"), tmp_path)["act_quant_lhs"]
    with pytest.raises(OutOfRange, match="above"):
        quantize(spec, spec.default, above_the_top("fp32", fp8), fp8)


@per_fp8
@per_quantizer
@pytest.mark.parametrize(
    ("special", "value", "stored"), [(np.nan, np.nan, np.nan), (np.inf, 0.0, np.inf), (-np.inf, 0.0, np.inf)]
)
def test_nan_and_inf_stay_in_their_group(name: str, fp8: str, special: float, value: float, stored: float) -> None:
    """NaN: the whole group and its scale; Inf: itself NaN, the rest 0, scale Inf; other groups: untouched."""
    x = torch.ones(256, 256)
    x[130, 140] = special
    spec = SPECS[name]
    y, scale = quantize(spec, spec.default, x, fp8)
    y = oracle.fp8_values(fp8)[y]
    if "transposed" in name:
        y, scale = y.T, scale.T
    rows = slice(130, 131) if name == "act_quant_lhs" else slice(128, 256)
    cols = slice(140, 141) if name in ("act_quant_transposed_lhs", "act_quant_rhs") else slice(128, 256)
    expected = np.full((256, 256), oracle.FP8_MAX[fp8])
    expected[rows, cols] = value
    expected[130, 140] = np.nan
    np.testing.assert_array_equal(y, expected)
    expected_scale = np.full(scale.shape, oracle.round_to(np.float64(1 / oracle.FP8_MAX[fp8]), "fp32"))
    expected_scale[130 * scale.shape[0] // 256, 140 * scale.shape[1] // 256] = stored
    np.testing.assert_array_equal(scale, expected_scale.astype(np.float32))


@per_fp8
@per_quantizer
def test_a_group_of_zeros(name: str, fp8: str) -> None:
    """y is 0 and the scale finite; -0 is kept where the format has it."""
    x = torch.zeros(3, 5)
    x[1] = -0.0
    y, scale = quantize(SPECS[name], SPECS[name].default, x, fp8)
    expected = np.zeros((3, 5), np.uint8)
    expected[1] = 0x80 if fp8 == "e4m3fn" else 0
    np.testing.assert_array_equal(y, expected.T if "transposed" in name else expected)
    least = {"e4m3fn": 2.2321429e-15, "e4m3fnuz": 4.1666666e-15}[fp8]
    np.testing.assert_array_equal(scale, np.full(scale.shape, least, np.float32))
