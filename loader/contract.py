"""The public contract of the operations: tensors, shapes and layouts, as plain data.

Checks here work on integers, so every front end (torch, raw pointers, the fake implementations)
applies the same rules and gives the same messages.  Importing this module imports neither torch
nor Triton.

Sizes are named by symbols (``M``, ``N``, ``K``); shapes count elements; strides are in elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

GROUP = 128
"""Width of a scaling group: one scale for 1x128, 128x1 or 128x128 elements."""

MAX_SIZE = 2**31 - 2**16
"""Largest value of a size symbol: tile offsets past the end of a dimension must fit in an int32."""

DtypeClass = Literal["high", "fp8", "fp32", "out"]
"""``high``: bf16, fp16 or fp32; ``out``: the same choice, made by the caller; the others are exact."""


class Dim(Struct, frozen=True):
    """Extent of one dimension: ``ceil(symbol / group)``."""

    symbol: str
    group: int = 1

    def extent(self, sizes: Mapping[str, int]) -> int:
        """The extent for given symbol values."""
        return -(-sizes[self.symbol] // self.group)

    def __str__(self) -> str:
        return self.symbol if self.group == 1 else f"ceil({self.symbol}/{self.group})"


class Tensor(Struct, frozen=True):
    """A two-dimensional tensor of an operation.

    Attributes:
        name: the argument's name.
        dtype: which dtypes it may have.
        shape: its extents, in symbols.
        unit_dim: the dimension whose stride is 1 (1: row-major, 0: column-major).
        note: what its shape means, in words, for error messages.
    """

    name: str
    dtype: DtypeClass
    shape: tuple[Dim, Dim]
    unit_dim: Literal[0, 1]
    note: str


class Op(Struct, frozen=True):
    """An operation: its input tensors in the order of its signature, and its outputs in order."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def symbols(self) -> tuple[str, ...]:
        """The size symbols, in order of first appearance."""
        return tuple(dict.fromkeys(d.symbol for t in (*self.inputs, *self.outputs) for d in t.shape))

    def tensor(self, name: str) -> Tensor:
        """The input or output called ``name``; KeyError where there is none."""
        for tensor in (*self.inputs, *self.outputs):
            if tensor.name == name:
                return tensor
        raise KeyError(f"{self.name} has no tensor {name}")


_M, _N, _K = Dim("M"), Dim("N"), Dim("K")
_MG, _NG, _KG = Dim("M", GROUP), Dim("N", GROUP), Dim("K", GROUP)


def _quantizer(
    name: str,
    x: tuple[str, tuple[Dim, Dim]],
    y: tuple[tuple[Dim, Dim], Literal[0, 1]],
    scale: tuple[tuple[Dim, Dim], Literal[0, 1]],
    note: str,
) -> Op:
    """A quantizer; ``x`` is (name, shape), ``y`` and ``scale`` are (shape, unit_dim)."""
    y_note = "the shape of {}" if y[0] == x[1] else "the shape of {} transposed"
    return Op(
        name,
        inputs=(Tensor(x[0], "high", x[1], 1, "a matrix"),),
        outputs=(
            Tensor("y", "fp8", *y, note=y_note.format(x[0])),
            Tensor("scale", "fp32", *scale, note=note.format(x[0])),
        ),
    )


def _gemm(name: str, b_s_shape: tuple[Dim, Dim], b_s_unit: Literal[0, 1], b_s_note: str) -> Op:
    """A GEMM; b_s is what tells one from another."""
    return Op(
        name,
        inputs=(
            Tensor("a", "fp8", (_M, _K), 1, "a matrix"),
            Tensor("b", "fp8", (_K, _N), 0, "as many rows as a has columns"),
            Tensor("a_s", "fp32", (_M, _KG), 0, f"one scale per row and {GROUP} columns of a"),
            Tensor("b_s", "fp32", b_s_shape, b_s_unit, b_s_note),
        ),
        outputs=(Tensor("c", "out", (_M, _N), 1, "the rows of a and the columns of b"),),
    )


_PER_ROW = f"one scale per row and {GROUP} columns of {{}}"
_PER_COLUMN = f"one scale per {GROUP} rows and column of {{}}"
_PER_BLOCK = f"one scale per {GROUP} rows and {GROUP} columns of {{}}"

OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        _quantizer("act_quant_lhs", ("x", (_M, _K)), ((_M, _K), 1), ((_M, _KG), 0), _PER_ROW),
        _quantizer(
            "act_quant_transposed_lhs",
            ("x", (_M, _K)),
            ((_K, _M), 1),
            ((_K, _MG), 0),
            f"one scale per column and {GROUP} rows of {{}}",
        ),
        _quantizer("act_quant_rhs", ("x", (_M, _K)), ((_M, _K), 0), ((_MG, _K), 1), _PER_COLUMN),
        _quantizer("weight_quant_rhs", ("w", (_N, _K)), ((_N, _K), 0), ((_NG, _KG), 0), _PER_BLOCK),
        _quantizer(
            "weight_quant_transposed_rhs",
            ("w", (_N, _K)),
            ((_K, _N), 0),
            ((_KG, _NG), 0),
            f"one scale per {GROUP} columns and {GROUP} rows of {{}}",
        ),
        _gemm("gemm_1x128_128x128", (_KG, _NG), 0, _PER_BLOCK.format("b")),
        _gemm("gemm_1x128_128x1", (_KG, _N), 1, _PER_COLUMN.format("b")),
    )
}
"""Every operation, by name."""


def solve(op: Op, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The size symbols of ``op`` from the shapes of its inputs.

    Raises:
        ValueError: an input is missing or unknown, is not two-dimensional, disagrees with an input
            before it, or has a dimension above ``MAX_SIZE``.
    """
    if len(shapes) != len(op.inputs) or any(t.name not in shapes for t in op.inputs):
        wanted = [t.name for t in op.inputs]
        raise ValueError(f"{op.name}: got shapes of {list(shapes)}, expected shapes of {wanted}")
    sizes: dict[str, int] = {}
    for tensor in op.inputs:
        shape = shapes[tensor.name]
        if len(shape) != len(tensor.shape):
            check_shape(op, tensor.name, shape, sizes)
        fits = True
        # A symbol's first dimension is never divided by a group, so it gives the symbol its value.
        for dim, extent in zip(tensor.shape, shape, strict=True):
            size = sizes.get(dim.symbol)
            if size is not None:
                fits = fits and -(-size // dim.group) == extent
            elif 0 <= extent <= MAX_SIZE:
                sizes[dim.symbol] = extent
            else:
                raise ValueError(
                    f"{op.name}: argument {tensor.name} has shape {tuple(shape)}, "
                    f"expected {dim.symbol} between 0 and {MAX_SIZE}"
                )
        if not fits:
            check_shape(op, tensor.name, shape, sizes)
    return sizes


def check_shape(op: Op, name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> None:
    """Check the shape of one tensor of ``op`` (an input or an ``out=``) against known sizes.

    Symbols that ``sizes`` lacks are not checked.

    Raises:
        ValueError: the shape is not the one that the sizes ask for.
    """
    tensor = op.tensor(name)
    shape = tuple(shape)
    expected = [d.extent(sizes) if d.symbol in sizes else None for d in tensor.shape]
    if len(shape) == len(expected) and all(e is None or e == extent for e, extent in zip(expected, shape, strict=True)):
        return
    shown = ", ".join(str(d) if e is None else str(e) for d, e in zip(tensor.shape, expected, strict=True))
    raise ValueError(f"{op.name}: argument {name} has shape {shape}, expected ({shown}): {tensor.note}")


_POSITION = ("first", "last")
_ORDER = ("column-major", "row-major")
_REMEDY = (
    "a row-major tensor? call .t().contiguous().t()",
    "a transposed view? call .contiguous()",
)


def check_layout(op: Op, name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Check that a kernel can address a tensor of ``op``.

    The stride of the tensor's ``unit_dim`` must be 1.  The other stride is free for an input (0, a
    broadcast, included); for an output it must keep rows (or columns) apart.  The stride of a
    dimension of extent 0 or 1 does not matter, nor do the strides of an empty tensor.

    Raises:
        ValueError: the strides do not fit.
    """
    tensor = op.tensor(name)
    shape, strides = tuple(shape), tuple(strides)
    if len(strides) != len(shape) or len(shape) != len(tensor.shape):
        raise ValueError(f"{op.name}: argument {name} has shape {shape} and strides {strides}, expected 2 dimensions")
    if 0 in shape:
        return
    unit, free = tensor.unit_dim, 1 - tensor.unit_dim
    if shape[unit] > 1 and strides[unit] != 1:
        raise ValueError(
            f"{op.name}: argument {name} must have {_POSITION[unit]} stride 1 ({_ORDER[unit]}), "
            f"got strides {strides}: {_REMEDY[unit]}"
        )
    least = shape[unit] if tensor in op.outputs else 0
    if shape[free] > 1 and strides[free] < least:
        line = "rows" if unit else "columns"
        why = f"its {line} overlap" if tensor in op.outputs else "a negative stride is not supported"
        raise ValueError(
            f"{op.name}: argument {name} must have {_POSITION[free]} stride at least {least}, "
            f"got strides {strides}: {why}"
        )


def output_layout(op: Op, sizes: Mapping[str, int]) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Shape and strides of every output of ``op``, by name: contiguous in the documented order."""
    layouts = {}
    for tensor in op.outputs:
        rows, cols = (dim.extent(sizes) for dim in tensor.shape)
        # An extent of 0 counts as 1, as it does in torch's own strides.
        strides = (max(cols, 1), 1) if tensor.unit_dim else (1, max(rows, 1))
        layouts[tensor.name] = ((rows, cols), strides)
    return layouts
