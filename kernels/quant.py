"""Blockwise FP8 quantization: three Triton functions, five operations.

The math is that of torchao's ``blockwise_fp8_training`` references: per scaling group,

    amax  = max(max |x|, 1e-12)
    scale = fp32(FP8_MAX / amax)
    y     = fp8(clamp(x * scale, -FP8_MAX, FP8_MAX))        stored scale = fp32(1 / scale)

A NaN in a group makes the whole group and its stored scale NaN; an Inf makes finite values 0, itself
NaN, and the stored scale Inf.  Groups at the end of a dimension hold the elements that are there.

``act_quant_transposed_lhs`` and ``act_quant_rhs`` put the same bytes at the same addresses (a (K, M)
row-major tensor is a (M, K) column-major one), so one function serves both.
"""

import triton
import triton.language as tl

from fp8_aot.kernels.spec import Config, Dim, KernelSpec, Pointer, Size, Stride, Tensor, Tile, kernel

GROUP = tl.constexpr(128)
# fp32(1e-12) as an integer: the least amax, so that an all-zero group has a finite scale.
EPS_BITS = tl.constexpr(0x2B8CBCCC)

IN_DTYPES = ("bf16", "fp16", "fp32")
SOURCE = "torchao.prototype.blockwise_fp8_training.kernels (torch references), BSD-3-Clause"


@triton.jit
def magnitude_bits(x):
    """|x| of an fp32 tensor as int32.

    The order of these integers is the order of the magnitudes, with NaN above Inf, so an integer
    maximum finds amax and never loses a NaN, which floating-point maxima do on some targets.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, FP8_MAX: tl.constexpr):
    """The quantization multiplier of a group whose largest magnitude is ``amax_bits``."""
    amax = tl.maximum(amax_bits, EPS_BITS).to(tl.float32, bitcast=True)
    # Correctly rounded fp32 division: the same bits as torchao's fp64 division rounded to fp32.
    return tl.div_rn(FP8_MAX, amax)


@triton.jit
def reciprocal(scale):
    """The dequantization multiplier that is stored: fp32(1 / scale)."""
    return tl.div_rn(1.0, scale)


@triton.jit
def to_fp8(x, scale, FP8_MAX: tl.constexpr, dtype: tl.constexpr):
    """Scale, clamp and round to the nearest even fp8 value.

    amax * scale may land just above FP8_MAX, where the targets' casts differ, hence the clamp; it
    keeps NaN.
    """
    scaled = tl.clamp(x * scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(dtype)


@triton.jit
def load_rows(x_ptr, r, c, rows, cols, stride_x):
    """x[r, c] in fp32, 0 outside of x."""
    x = tl.load(
        x_ptr + r.to(tl.int64)[:, None] * stride_x + c[None, :],
        mask=(r < rows)[:, None] & (c < cols)[None, :],
        other=0.0,
    )
    return x.to(tl.float32)


@triton.jit
def block_max(x):
    """The largest magnitude of a tile, as int32."""
    return tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)


@triton.jit
def store_rows(y_ptr, y, r, c, rows, cols, stride_y, TRANSPOSED: tl.constexpr):
    """Store y[r, c] at r*stride_y + c, or at c*stride_y + r."""
    r_mask = r < rows
    c_mask = c < cols
    if TRANSPOSED:
        tl.store(
            y_ptr + c.to(tl.int64)[:, None] * stride_y + r[None, :],
            tl.trans(y),
            mask=c_mask[:, None] & r_mask[None, :],
        )
    else:
        tl.store(
            y_ptr + r.to(tl.int64)[:, None] * stride_y + c[None, :],
            y,
            mask=r_mask[:, None] & c_mask[None, :],
        )


def quant_args(x: str, y: str, rows: str, cols: str, y_dim: int, scale_dim: int):
    """Arguments of a quantizer; ``y_dim`` and ``scale_dim`` are the dimensions with a free stride."""
    return (
        Pointer("x_ptr", x),
        Pointer("y_ptr", y),
        Pointer("scale_ptr", "scale"),
        Size("rows", rows, specialize=True),
        Size("cols", cols, specialize=True),
        Stride("stride_x", x, 0, specialize=True),
        Stride("stride_y", y, y_dim, specialize=True),
        Stride("stride_scale", "scale", scale_dim),
    )


# Stands for each operation's own argument list where only names and specialisation matter.
_ARGS = quant_args("x", "y", "M", "K", 0, 0)


@kernel(*_ARGS)
def quant_1x128(
    x_ptr, y_ptr, scale_ptr,
    rows: tl.int32, cols: tl.int32, stride_x: tl.int64, stride_y: tl.int64, stride_scale: tl.int64,
    BLOCK_R: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Groups along the rows of x: y[r, c] at r*stride_y + c, scale[r, g] at r + g*stride_scale."""
    groups = tl.cdiv(cols, GROUP)
    pid = tl.program_id(0)
    group = pid % groups
    r = (pid // groups) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = group * GROUP + tl.arange(0, GROUP)
    x = load_rows(x_ptr, r, c, rows, cols, stride_x)
    scale = scale_of(tl.max(magnitude_bits(x), axis=1), FP8_MAX)
    y = to_fp8(x, scale[:, None], FP8_MAX, y_ptr.dtype.element_ty)
    store_rows(y_ptr, y, r, c, rows, cols, stride_y, TRANSPOSED=False)
    tl.store(scale_ptr + r.to(tl.int64) + group.to(tl.int64) * stride_scale, reciprocal(scale), mask=r < rows)


@kernel(*_ARGS)
def quant_128x1(
    x_ptr, y_ptr, scale_ptr,
    rows: tl.int32, cols: tl.int32, stride_x: tl.int64, stride_y: tl.int64, stride_scale: tl.int64,
    BLOCK_C: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Groups along the columns of x, y transposed: y at c*stride_y + r, scale at c + g*stride_scale."""
    tiles = tl.cdiv(cols, BLOCK_C)
    pid = tl.program_id(0)
    group = pid // tiles
    r = group * GROUP + tl.arange(0, GROUP)
    c = (pid % tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    x = load_rows(x_ptr, r, c, rows, cols, stride_x)
    scale = scale_of(tl.max(magnitude_bits(x), axis=0), FP8_MAX)
    y = to_fp8(x, scale[None, :], FP8_MAX, y_ptr.dtype.element_ty)
    store_rows(y_ptr, y, r, c, rows, cols, stride_y, TRANSPOSED=True)
    tl.store(scale_ptr + c.to(tl.int64) + group.to(tl.int64) * stride_scale, reciprocal(scale), mask=c < cols)


@triton.jit
def quant_block(
    x_ptr, y_ptr, scale_ptr, rows, cols, stride_x, stride_y, stride_scale,
    BLOCK_R: tl.constexpr, FP8_MAX: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """One 128x128 block, BLOCK_R rows at a time.

    With BLOCK_R = 128 the block stays in registers; smaller steps read it twice, the second time from the
    cache, and need fewer registers where elements are loaded one by one.
    """
    col_groups = tl.cdiv(cols, GROUP)
    row_groups = tl.cdiv(rows, GROUP)
    pid = tl.program_id(0)
    row_group = pid // col_groups
    col_group = pid % col_groups
    dtype = y_ptr.dtype.element_ty
    r = row_group * GROUP + tl.arange(0, BLOCK_R)
    c = col_group * GROUP + tl.arange(0, GROUP)
    if BLOCK_R == GROUP:
        x = load_rows(x_ptr, r, c, rows, cols, stride_x)
        scale = scale_of(block_max(x), FP8_MAX)
        store_rows(y_ptr, to_fp8(x, scale, FP8_MAX, dtype), r, c, rows, cols, stride_y, TRANSPOSED)
    else:
        amax = block_max(load_rows(x_ptr, r, c, rows, cols, stride_x))
        for step in range(BLOCK_R, GROUP, BLOCK_R):
            amax = tl.maximum(amax, block_max(load_rows(x_ptr, r + step, c, rows, cols, stride_x)))
        scale = scale_of(amax, FP8_MAX)
        for step in range(0, GROUP, BLOCK_R):
            x = load_rows(x_ptr, r + step, c, rows, cols, stride_x)
            y = to_fp8(x, scale, FP8_MAX, dtype)
            store_rows(y_ptr, y, r + step, c, rows, cols, stride_y, TRANSPOSED)
    if TRANSPOSED:
        scale_at = col_group.to(tl.int64) * stride_scale + row_group
    else:
        scale_at = row_group.to(tl.int64) * stride_scale + col_group
    exists = (row_group < row_groups) & (col_group < col_groups)
    tl.store(scale_ptr + scale_at, reciprocal(scale), mask=exists)


@kernel(*_ARGS)
def quant_128x128(
    x_ptr, y_ptr, scale_ptr,
    rows: tl.int32, cols: tl.int32, stride_x: tl.int64, stride_y: tl.int64, stride_scale: tl.int64,
    BLOCK_R: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """128x128 groups: y[r, c] at r*stride_y + c, scale at row_group*stride_scale + col_group."""
    quant_block(
        x_ptr, y_ptr, scale_ptr, rows, cols, stride_x, stride_y, stride_scale,
        BLOCK_R, FP8_MAX, TRANSPOSED=False,
    )  # fmt: skip


@kernel(*_ARGS)
def quant_128x128_transposed(
    x_ptr, y_ptr, scale_ptr,
    rows: tl.int32, cols: tl.int32, stride_x: tl.int64, stride_y: tl.int64, stride_scale: tl.int64,
    BLOCK_R: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """128x128 groups, y transposed: y at c*stride_y + r, scale at col_group*stride_scale + row_group."""
    quant_block(
        x_ptr, y_ptr, scale_ptr, rows, cols, stride_x, stride_y, stride_scale,
        BLOCK_R, FP8_MAX, TRANSPOSED=True,
    )  # fmt: skip


def _quantizer(name, fn, x_shape, y, scale, tiles, grid, default, promise):
    """A quantizer's spec; ``y`` and ``scale`` are (shape, unit_dim)."""
    (y_shape, y_unit), (scale_shape, scale_unit) = y, scale
    rows, cols = x_shape
    x_name = "w" if name.startswith("weight") else "x"
    return KernelSpec(
        name=name,
        fn=fn,
        tensors=(
            Tensor(x_name, "in", (Dim(rows), Dim(cols)), unit_dim=1),
            Tensor("y", "fp8", y_shape, y_unit, output=True),
            Tensor("scale", "fp32", scale_shape, scale_unit, output=True),
        ),
        args=quant_args(x_name, "y", rows, cols, 1 - y_unit, 1 - scale_unit),
        tiles=tiles,
        dtypes={"in": IN_DTYPES},
        fp8_max="FP8_MAX",
        grid=(grid,),
        default=default,
        promise=promise,
        source=SOURCE,
    )


def _groups(symbol):
    return Dim(symbol, 128)


act_quant_lhs = _quantizer(
    "act_quant_lhs",
    quant_1x128,
    ("M", "K"),
    y=((Dim("M"), Dim("K")), 1),
    scale=((Dim("M"), _groups("K")), 0),
    tiles=(Tile("BLOCK_R", 1, 256),),
    grid=(("M", "BLOCK_R"), ("K", 128)),
    default=Config({"BLOCK_R": 8}, num_warps=1),
    promise="1x128 groups; y row-major, scale column-major; bit-exact",
)

act_quant_transposed_lhs = _quantizer(
    "act_quant_transposed_lhs",
    quant_128x1,
    ("M", "K"),
    y=((Dim("K"), Dim("M")), 1),
    scale=((Dim("K"), _groups("M")), 0),
    tiles=(Tile("BLOCK_C", 1, 256),),
    grid=(("M", 128), ("K", "BLOCK_C")),
    default=Config({"BLOCK_C": 64}, num_warps=4),
    promise="128x1 groups, transposed; y row-major, scale column-major; bit-exact",
)

act_quant_rhs = _quantizer(
    "act_quant_rhs",
    quant_128x1,
    ("M", "K"),
    y=((Dim("M"), Dim("K")), 0),
    scale=((_groups("M"), Dim("K")), 1),
    tiles=(Tile("BLOCK_C", 1, 256),),
    grid=(("M", 128), ("K", "BLOCK_C")),
    default=Config({"BLOCK_C": 64}, num_warps=4),
    promise="128x1 groups; y column-major, scale row-major; bit-exact",
)

weight_quant_rhs = _quantizer(
    "weight_quant_rhs",
    quant_128x128_transposed,
    ("N", "K"),
    y=((Dim("N"), Dim("K")), 0),
    scale=((_groups("N"), _groups("K")), 0),
    tiles=(Tile("BLOCK_R", 8, 128),),
    grid=(("N", 128), ("K", 128)),
    default=Config({"BLOCK_R": 128}, num_warps=8),
    promise="128x128 groups; y and scale column-major; bit-exact",
)

weight_quant_transposed_rhs = _quantizer(
    "weight_quant_transposed_rhs",
    quant_128x128,
    ("N", "K"),
    y=((Dim("K"), Dim("N")), 0),
    scale=((_groups("K"), _groups("N")), 0),
    tiles=(Tile("BLOCK_R", 8, 128),),
    grid=(("N", 128), ("K", 128)),
    default=Config({"BLOCK_R": 128}, num_warps=8),
    promise="128x128 groups, transposed; y and scale column-major; bit-exact",
)
