"""The plain torch operations: against torchao, against the definition, and against exact sums."""

import functools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.prototype.blockwise_fp8_training import kernels as torchao

from fp8_aot.loader import reference
from fp8_aot.loader.contract import OPS, output_layout

FP8 = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz}
HIGH = (torch.bfloat16, torch.float16, torch.float32)
OUT_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
QUANTIZERS = [name for name, op in OPS.items() if op.inputs[0].dtype == "high"]
GEMMS = [name for name in OPS if name not in QUANTIZERS]

per_fp8 = pytest.mark.parametrize("fp8", FP8, ids=str)
per_high = pytest.mark.parametrize("dtype", HIGH, ids=str)
per_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
per_gemm = pytest.mark.parametrize("name", GEMMS)


def matrix(rows, cols, dtype, seed=0):
    """Values over the whole range of ``dtype``, with NaN, Inf, zeros, subnormals and huge values.

    Blocks of 128x128 differ: ordinary, wide, subnormal, all-zero, huge, and ordinary with a few
    NaN, Inf or zero lines.
    """
    g = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    x = torch.randn(rows, cols, generator=g, dtype=torch.float64)
    wide = torch.rand(rows, cols, generator=g, dtype=torch.float64) * 2 - 1
    powers = wide * math.log2(info.max)
    kinds = [
        lambda b, p: b,
        lambda b, p: b.sign() * 2.0**p,
        lambda b, p: b * info.smallest_normal / 4,
        lambda b, p: b * 0.0,
        lambda b, p: (b * info.max).clamp(info.min, info.max),
        lambda b, p: torch.where(b.abs() > 3, math.nan, b),
        lambda b, p: torch.where(b.abs() > 3, b.sign() * math.inf, b),
        lambda b, p: torch.where(p.abs() < 0.1, b * 1e-13, b * 0.0),
    ]
    block = 0
    for r in range(0, rows, 128):
        for c in range(0, cols, 128):
            here = (slice(r, r + 128), slice(c, c + 128))
            x[here] = kinds[(block + seed) % len(kinds)](x[here], powers[here])
            block += 1
    x[rows // 2] = 0.0
    x[:, cols // 3] = -0.0
    return x.to(dtype)


def assert_same(got, expected):
    """Equal bit for bit, NaN as NaN.  Signs of zero count."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    got_nan, expected_nan = got.float().isnan(), expected.float().isnan()
    assert torch.equal(got_nan, expected_nan)
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    got_bits, expected_bits = (t.contiguous().view(as_int).masked_fill(got_nan, 0) for t in (got, expected))
    assert torch.equal(got_bits, expected_bits)


# --- torchao


def torchao_oracle(name, x, fp8):
    """(y, scale) from torchao's torch references."""
    if name == "act_quant_lhs":
        return torchao.torch_blockwise_scale_act_quant_lhs(x, dtype=fp8)
    if name == "act_quant_transposed_lhs":
        return torchao.torch_blockwise_scale_act_quant_lhs(x.t().contiguous(), dtype=fp8)
    if name == "act_quant_rhs":
        # In fp32: this one clamps amax in the input's dtype, where fp16 rounds 1e-12 to 0.
        return torchao.torch_blockwise_scale_act_quant_rhs(x.float(), dtype=fp8)
    y, scale = torchao.torch_blockwise_scale_weight_quant(x, dtype=fp8)
    return (y.t(), scale.t()) if name == "weight_quant_transposed_rhs" else (y, scale)


@per_quantizer
@per_high
@per_fp8
def test_quantizer_equals_torchao(name, dtype, fp8):
    x = matrix(384, 512, dtype)
    for got, expected in zip(getattr(reference, name)(x, fp8_dtype=fp8), torchao_oracle(name, x, fp8), strict=True):
        assert_same(got, expected)


# --- the definition, group by group, in NumPy


def definition(x, group_rows, group_cols, fp8):
    """(y, scale) by the definition: fp64 division, ml_dtypes' casts, one group at a time."""
    x = x.float().numpy()
    fp8_max = float(torch.finfo(fp8).max)
    rows, cols = x.shape
    y = np.empty(x.shape, FP8[fp8])
    scales = np.empty((-(-rows // group_rows), -(-cols // group_cols)), np.float32)
    with np.errstate(all="ignore"):
        for r, c in np.ndindex(scales.shape):
            here = np.s_[r * group_rows : (r + 1) * group_rows, c * group_cols : (c + 1) * group_cols]
            amax = np.maximum(np.abs(x[here]).max(), np.float32(1e-12))
            scale = np.float32(fp8_max / np.float64(amax))
            y[here] = np.clip(x[here] * scale, np.float32(-fp8_max), np.float32(fp8_max)).astype(FP8[fp8])
            scales[r, c] = np.float32(1 / np.float64(scale))
    return torch.from_numpy(y.view(np.uint8)).view(fp8), torch.from_numpy(scales)


@functools.cache
def example(shape, dtype):
    """An input in general position: a view with a free row stride."""
    rows, cols = shape
    return matrix(rows + 1, cols + 5, dtype, seed=sum(shape))[:rows, :cols]


GROUPS = {"act_quant_lhs": (1, 128), "act_quant_transposed_lhs": (128, 1), "act_quant_rhs": (128, 1)}
SHAPES = [(1, 1), (1, 128), (2, 129), (13, 300), (127, 130), (128, 64), (129, 1), (257, 255), (300, 7)]
EMPTY = [(0, 0), (0, 5), (5, 0), (0, 129), (129, 0)]


@per_quantizer
@per_high
@per_fp8
def test_quantizer_equals_the_definition(name, dtype, fp8):
    for shape in SHAPES:
        x = example(shape, dtype)
        y, scale = definition(x, *GROUPS.get(name, (128, 128)), fp8)
        if "transposed" in name:
            y, scale = y.t(), scale.t()
        got_y, got_scale = getattr(reference, name)(x, fp8_dtype=fp8)
        assert_same(got_y, y)
        assert_same(got_scale, scale)


@per_fp8
def test_scale_division_is_correctly_rounded(fp8):
    """One value a group, so amax is that value: every result is checked against fp64 division."""
    g = torch.Generator().manual_seed(1)
    mantissas = torch.randint(0, 2**23, (1 << 18,), generator=g, dtype=torch.int32)
    exponents = torch.randint(90, 250, (1 << 18,), generator=g, dtype=torch.int32) << 23
    amax = (mantissas | exponents).view(torch.float32)
    _, scale = reference.act_quant_lhs(amax[:, None], fp8_dtype=fp8)
    multiplier = (torch.finfo(fp8).max / amax.double()).float()
    assert_same(scale[:, 0], (1 / multiplier.double()).float())


@per_fp8
def test_zeros_and_their_sign(fp8):
    x = torch.zeros(2, 128)
    x[1, 3] = -0.0
    y, scale = reference.act_quant_lhs(x, fp8_dtype=fp8)
    expected = torch.zeros(2, 128, dtype=torch.uint8)
    if fp8 == torch.float8_e4m3fn:
        expected[1, 3] = 0x80
        assert scale.flatten().tolist() == [float(np.float32(2.2321429e-15))] * 2
    # e4m3fnuz has no -0: 0x80 is its NaN.
    assert torch.equal(y.view(torch.uint8), expected)


def test_fnuz_underflow_of_a_negative_value_is_not_nan():
    x = torch.tensor([[1.0, -1e-7, -0.0, math.nan, 1.0]])
    y, _ = reference.act_quant_lhs(x[:, :3], fp8_dtype=torch.float8_e4m3fnuz)
    assert y.view(torch.uint8).tolist() == [[0x7F, 0, 0]]
    y, _ = reference.act_quant_lhs(x, fp8_dtype=torch.float8_e4m3fnuz)
    assert y.view(torch.uint8).tolist() == [[0x80] * 5]


@per_quantizer
def test_nan_and_inf_stay_in_their_group(name):
    x = torch.ones(256, 256)
    x[3, 5], x[200, 140] = math.nan, -math.inf
    y, scale = (t.t() if "transposed" in name else t for t in getattr(reference, name)(x))
    y = y.float()
    rows, cols = GROUPS.get(name, (128, 128))
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    assert torch.equal(y.isnan(), spread.isnan() | x.isinf())
    assert torch.equal(y == 0, spread.isinf() & ~x.isinf())
    assert scale.isnan().sum() == 1 and scale.isposinf().sum() == 1
    assert spread.isnan().sum() == rows * cols
    assert spread[3, 5].isnan() and spread[200, 140].isposinf()


# --- layouts


def arguments(op, sizes, fp8=torch.float8_e4m3fn, make=torch.zeros):
    """Inputs of ``op`` in their documented layouts, all ``make``'s."""
    dtypes = {"high": torch.bfloat16, "fp8": fp8, "fp32": torch.float32}
    tensors = []
    for t in op.inputs:
        rows, cols = (d.extent(sizes) for d in t.shape)
        shape = (rows, cols) if t.unit_dim else (cols, rows)
        made = make(*shape).to(dtypes[t.dtype])
        tensors.append(made if t.unit_dim else made.t())
    return tensors


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", OPS)
def test_outputs_have_the_documented_layout(name, fake):
    op = OPS[name]
    for rows, cols in SHAPES + EMPTY:
        for extra in (0, 1, 150) if "N" in op.symbols else (0,):
            sizes = dict(zip(op.symbols, (rows, cols, extra), strict=False))
            with FakeTensorMode() if fake else torch.no_grad():
                outputs = getattr(reference, name)(*arguments(op, sizes))
            outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            for tensor, got in zip(op.outputs, outputs, strict=True):
                layout = output_layout(op, sizes)[tensor.name]
                assert (tuple(got.shape), got.stride()) == layout, (sizes, tensor.name)
                dtype = {"fp8": torch.float8_e4m3fn, "fp32": torch.float32, "out": torch.bfloat16}
                assert got.dtype == dtype[tensor.dtype]


@per_quantizer
def test_any_row_stride(name):
    x = matrix(130, 200, torch.bfloat16)
    rows = x[:1].expand(130, 200)
    for view in (x[:, 3:], x[::2], rows):
        for got, expected in zip(
            getattr(reference, name)(view), getattr(reference, name)(view.contiguous()), strict=True
        ):
            assert_same(got, expected)


# --- GEMM


def operands(name, m, n, k, fp8, seed=0):
    """Random operands; scales over six decades, different in every group."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"M": m, "N": n, "K": k}
    a, b, a_s, b_s = arguments(OPS[name], sizes, fp8, lambda *s: torch.randn(*s, generator=g) * 16)
    return a, b, *(10 ** (torch.rand(s.shape, generator=g) * 6 - 5) for s in (a_s, b_s))


def product(name, a, b, a_s, b_s):
    """(c, sum of magnitudes) in fp64 of the dequantized operands: a product of two matrices."""
    k, n = b.shape
    left = a.double() * a_s.double().repeat_interleave(128, 1)[:, :k]
    spread = b_s.double().repeat_interleave(128, 0)[:k]
    if name == "gemm_1x128_128x128":
        spread = spread.repeat_interleave(128, 1)[:, :n]
    right = b.double() * spread
    return left @ right, left.abs() @ right.abs()


@per_gemm
@per_fp8
@pytest.mark.parametrize("out_dtype", HIGH, ids=str)
def test_gemm_within_the_bound_of_fp32_accumulation(name, fp8, out_dtype):
    """|error| <= gamma * sum |a b| a_s b_s, then one rounding to the output's dtype.

    Products of fp8 values are exact in fp32.  A term then passes at most 127 additions in its
    block, two multiplications by scales and one addition per further block, each one factor
    (1 + 2^-24).  fp32 output is the accumulator itself, so it has no rounding of its own.
    The fp64 oracle adds K + 3 roundings of 2^-53.
    """
    for m, n, k in [(1, 1, 1), (2, 300, 127), (13, 129, 128), (5, 128, 129), (64, 257, 640), (3, 40, 1000)]:
        args = operands(name, m, n, k, fp8, seed=k)
        got = getattr(reference, name)(*args, out_dtype=out_dtype).double()
        exact, magnitude = product(name, *args)
        steps = (min(k, 128) - 1 + 2 + -(-k // 128) - 1) * 2.0**-24
        bound = (steps / (1 - steps) + (k + 3) * 2.0**-53) * magnitude
        # fp16 overflows beyond 65504 and has an absolute rounding error below 2^-14.
        bound += OUT_ROUNDING[out_dtype] * (exact.abs() + bound) + (2.0**-25 if out_dtype == torch.float16 else 0)
        fits = exact.abs() + bound < torch.finfo(out_dtype).max
        assert fits.sum() >= 0.5 * fits.numel()
        assert ((got - exact).abs() <= bound)[fits].all()


@per_gemm
@pytest.mark.parametrize("out_dtype", HIGH, ids=str)
def test_gemm_is_exact_where_fp32_is(name, out_dtype):
    """Small integers and power-of-two scales: sums below 2^24 units, so one rounding in all."""
    g = torch.Generator().manual_seed(2)
    m, n, k = 7, 200, 300
    a, b, a_s, b_s = arguments(OPS[name], {"M": m, "N": n, "K": k})
    a, b = (torch.randint(-4, 5, t.shape, generator=g).float().to(t.dtype) for t in (a, b))
    a_s, b_s = (2.0 ** torch.randint(-3, 4, t.shape, generator=g) for t in (a_s, b_s))
    exact, magnitude = product(name, a, b, a_s, b_s)
    assert magnitude.max() * 2**6 < 2**24
    assert_same(getattr(reference, name)(a, b, a_s, b_s, out_dtype=out_dtype), exact.float().to(out_dtype))


@per_gemm
def test_gemm_adds_blocks_in_order(name):
    """In fp32, 2^25 + 1 - 2^25 is 0 from left to right, and 2^25 - 2^25 + 1 is 1."""
    a, b, _, b_s = arguments(OPS[name], {"M": 1, "N": 1, "K": 384}, make=torch.ones)
    b_s = b_s / 128
    for blocks, expected in (((2.0**25, 1.0, -(2.0**25)), 0.0), ((2.0**25, -(2.0**25), 1.0), 1.0)):
        got = getattr(reference, name)(a, b, torch.tensor([blocks]), b_s, out_dtype=torch.float32)
        assert got.item() == expected


@per_gemm
def test_gemm_without_k_is_zero(name):
    a, b, a_s, b_s = arguments(OPS[name], {"M": 3, "N": 130, "K": 0})
    assert_same(getattr(reference, name)(a, b, a_s, b_s), torch.zeros(3, 130, dtype=torch.bfloat16))


@per_gemm
def test_gemm_keeps_nan_where_it_belongs(name):
    args = arguments(OPS[name], {"M": 4, "N": 260, "K": 300}, make=torch.ones)
    args[0][1, 290] = math.nan
    args[2][2, 1] = math.nan
    args[3][0, 1] = math.nan
    got = getattr(reference, name)(*args, out_dtype=torch.float32)
    expected = torch.full((4, 260), 300.0)
    expected[1:3] = math.nan
    expected[:, slice(128, 256) if name == "gemm_1x128_128x128" else 1] = math.nan
    assert_same(got, expected)


@per_fp8
def test_a_linear_layers_step(fp8):
    """The quantizers' outputs go into the GEMMs as they are, and give Y, dX and dW."""
    g = torch.Generator().manual_seed(3)
    t, k, n = 150, 200, 270
    x, w, dy = (torch.randn(s, generator=g) for s in ((t, k), (n, k), (t, n)))
    q = {name: functools.partial(getattr(reference, name), fp8_dtype=fp8) for name in QUANTIZERS}
    steps = [
        ("gemm_1x128_128x128", q["act_quant_lhs"](x), q["weight_quant_transposed_rhs"](w), x @ w.t()),
        ("gemm_1x128_128x128", q["act_quant_lhs"](dy), q["weight_quant_rhs"](w), dy @ w),
        ("gemm_1x128_128x1", q["act_quant_transposed_lhs"](dy), q["act_quant_rhs"](x), dy.t() @ x),
    ]
    for gemm, (a, a_s), (b, b_s), expected in steps:
        got = getattr(reference, gemm)(a, b, a_s, b_s).float()
        sqnr = 20 * torch.log10(expected.norm() / (expected - got).norm())
        assert sqnr > 28
