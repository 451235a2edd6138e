"""Kernels with faults, which the bounds checker must find."""

import triton.language as tl

from fp8_aot.kernels.spec import Config, Dim, KernelSpec, Pointer, Size, Stride, Tensor, Tile, kernel

_COPY_ARGS = (
    Pointer("x_ptr", "x"),
    Pointer("y_ptr", "y"),
    Size("rows", "R"),
    Size("cols", "C"),
    Stride("stride_x", "x", 0),
    Stride("stride_y", "y", 0),
)


@kernel(*_COPY_ARGS)
def _copy(x_ptr, y_ptr, rows: tl.int32, cols: tl.int32, stride_x: tl.int64, stride_y: tl.int64, FAULT: tl.constexpr):
    """Copy one row in each program; FAULT is the number of the fault in the test's table."""
    r = tl.program_id(0)
    c = tl.arange(0, 8)
    x = x_ptr + r * stride_x + c
    y = y_ptr + r * stride_y + c
    mask = c < cols
    if FAULT == 1:
        mask = c < stride_x
    if FAULT == 4:
        x = (x.to(tl.pointer_type(tl.int8)) + 1).to(tl.pointer_type(tl.float32))
    if FAULT == 5:
        tl.load(x.to(tl.pointer_type(tl.int8)), mask=mask, other=0)
    if FAULT == 6:
        tl.load(y, mask=mask, other=0.0)
    value = tl.load(x, mask=c < 4) if FAULT == 12 else tl.load(x, mask=mask, other=0.0)
    if FAULT == 2:
        y = y - 1
    if FAULT == 3:
        y = y + stride_y
    if FAULT == 7:
        tl.store(x, value, mask=mask)
    if FAULT == 8:
        tl.store(y, value, mask=mask & (r == 0))
    if FAULT == 9:
        mask = c < 4
    if FAULT == 10:
        y = y + (1 << 50)
    if FAULT == 11:
        tl.atomic_add(y, value, mask=mask)
    tl.store(y, value, mask=mask)


copy = KernelSpec(
    name="copy",
    fn=_copy,
    tensors=(
        Tensor("x", "fp32", (Dim("R"), Dim("C")), unit_dim=1),
        Tensor("y", "fp32", (Dim("R"), Dim("C")), unit_dim=1, output=True),
    ),
    args=_COPY_ARGS,
    tiles=(Tile("FAULT", 0, 16),),
    dtypes={},
    grid=((("R", 1),),),
    default=Config({"FAULT": 0}),
    promise="none",
    source="none",
)

_MX_ARGS = (Pointer("scale_ptr", "scale"), Size("rows", "R"), Size("cols", "C"))


@kernel(*_MX_ARGS)
def _mx_scales(
    scale_ptr, rows: tl.int32, cols: tl.int32, ROW_TILE: tl.constexpr, COL_TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Store the E8M0 scale bytes of blocks of 32 rows, scale (C, ceil(R/32)) row-major.

    Without MASKED, every lane of a tile stores, and a column's scales are as many as whole tiles have.
    """
    tiles = tl.cdiv(cols, COL_TILE)
    pid = tl.program_id(0)
    c = (pid % tiles) * COL_TILE + tl.arange(0, COL_TILE)
    b = (pid // tiles) * (ROW_TILE // 32) + tl.arange(0, ROW_TILE // 32)
    one = tl.full((COL_TILE, ROW_TILE // 32), 127, tl.uint8)
    if MASKED:
        blocks = tl.cdiv(rows, 32)
        mask = (c < cols)[:, None] & (b < blocks)[None, :]
        tl.store(scale_ptr + c[:, None] * blocks + b[None, :], one, mask=mask)
    else:
        blocks = tl.cdiv(rows, ROW_TILE) * (ROW_TILE // 32)
        tl.store(scale_ptr + c[:, None] * blocks + b[None, :], one)


mx_scales = KernelSpec(
    name="mx_scales",
    fn=_mx_scales,
    tensors=(
        Tensor("x", "fp32", (Dim("R"), Dim("C")), unit_dim=1),
        Tensor("scale", "uint8", (Dim("C"), Dim("R", 32)), unit_dim=1, output=True),
    ),
    args=_MX_ARGS,
    tiles=(Tile("ROW_TILE", 32, 512), Tile("COL_TILE", 32, 512), Tile("MASKED", 0, 1)),
    dtypes={},
    grid=((("R", "ROW_TILE"), ("C", "COL_TILE")),),
    default=Config({"ROW_TILE": 128, "COL_TILE": 128, "MASKED": 1}),
    promise="none",
    source="none",
)
