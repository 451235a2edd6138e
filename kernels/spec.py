"""The one description of a kernel, from which everything else is derived.

A :class:`KernelSpec` stands beside its Triton function and says all that a builder, a loader, the
JIT fallback and the tests need: which tensors there are (dtype, shape, layout), which run-time
arguments the function takes and where each comes from, its constexprs, its grid, and what a
specialised binary may assume.  It is plain data: nothing in it is code, so it can be written into a
bundle's manifest and read back without trusting the bundle.

Sizes are named by symbols (``M``, ``N``, ``K``).  An extent is a symbol, or a symbol divided by a
group size and rounded up (``ceil(K / 128)`` scaling groups).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton

FP8_MAX: Mapping[str, float] = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}
"""Largest finite value of each fp8 dtype (OCP FP8 specification; AMD's fnuz variant)."""

COMPILE_OPTIONS: Mapping[str, bool] = {"enable_fp_fusion": True}
"""Compiler options that all kernels share, AOT and JIT; Triton's defaults differ between versions."""

MAX_SIZE = 2**31 - 2**16
"""Largest value of a size symbol: tile offsets past the end of a dimension must fit in an int32."""


@dataclass(frozen=True)
class Dim:
    """Extent of one tensor dimension: ``ceil(symbol / group)``."""

    symbol: str
    group: int = 1

    def extent(self, sizes: Mapping[str, int]) -> int:
        """The extent for given symbol values."""
        return -(-sizes[self.symbol] // self.group)


@dataclass(frozen=True)
class Tensor:
    """A two-dimensional tensor that a kernel reads or writes.

    ``dtype`` is a concrete dtype (``"fp32"``) or the name of a dtype axis of the kernel
    (``"in"``, ``"out"``, ``"fp8"``).  ``unit_dim`` is the dimension whose stride is 1; the other
    stride is free.
    """

    name: str
    dtype: str
    shape: tuple[Dim, Dim]
    unit_dim: int
    output: bool = False


@dataclass(frozen=True)
class Pointer:
    """Run-time argument: the address of ``tensor``'s first element."""

    name: str
    tensor: str
    specialize: bool = True


@dataclass(frozen=True)
class Size:
    """Run-time argument: the value of a size symbol, an int32."""

    name: str
    symbol: str
    specialize: bool = False

    type = "i32"


@dataclass(frozen=True)
class Stride:
    """Run-time argument: the stride, in elements, of dimension ``dim`` of ``tensor``, an int64."""

    name: str
    tensor: str
    dim: int
    specialize: bool = False

    type = "i64"


Argument = Pointer | Size | Stride


@dataclass(frozen=True)
class Tile:
    """A constexpr that a matrix chooses: a power of two between ``least`` and ``most``."""

    name: str
    least: int
    most: int


@dataclass(frozen=True)
class Config:
    """A tile config: values of the tile constexprs and the compiler's options."""

    constexprs: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1


@dataclass(frozen=True)
class KernelSpec:
    """Everything that is to be known of one kernel.

    Attributes:
        name: the kernel's name in the matrix, the manifest and the loader.
        fn: the Triton function (``triton.JITFunction``).
        tensors: its tensors, inputs first, in the order of the operation's signature.
        args: its run-time arguments, in the order of the function's parameters.
        tiles: the constexprs that a tile config chooses.
        dtypes: dtype axes that the user of the kernel chooses, each with the dtypes it may take.
            The axis ``fp8`` is not among them: a target has exactly one fp8 dtype.
        fp8_max: name of the constexpr that receives FP8_MAX of the target's fp8 dtype, if any.
        grid: launch grid, one entry a dimension, each a product of ``ceil(symbol / tile)``, where
            ``tile`` is a tile constexpr or a number.
        default: the tile config used by the JIT fallback where no bundle names one.
        staged: bytes of shared memory that one pipeline stage needs at least: a sum of products of
            tile constexprs and numbers.
        promise: what the operation guarantees, in one sentence.
        source: where the math comes from.
    """

    name: str
    fn: Any
    tensors: tuple[Tensor, ...]
    args: tuple[Argument, ...]
    tiles: tuple[Tile, ...]
    dtypes: Mapping[str, tuple[str, ...]]
    grid: tuple[tuple[tuple[str, str | int], ...], ...]
    default: Config
    promise: str
    source: str
    fp8_max: str | None = None
    staged: tuple[tuple[str | int, ...], ...] = ()
    symbols: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        symbols = dict.fromkeys(d.symbol for t in self.tensors for d in t.shape)
        object.__setattr__(self, "symbols", tuple(symbols))
        names = [a.name for a in self.args] + [t.name for t in self.tiles]
        names += [self.fp8_max] if self.fp8_max else []
        declared = list(self.fn.arg_names)
        if names != declared:
            raise ValueError(f"kernel {self.name}: spec lists {names}, the function takes {declared}")

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``."""
        return next(t for t in self.tensors if t.name == name)

    def constexprs(self, config: Config, fp8: str) -> dict[str, int | float]:
        """All constexprs of the function, in order, for a tile config and an fp8 dtype."""
        values: dict[str, int | float] = {t.name: config.constexprs[t.name] for t in self.tiles}
        if self.fp8_max:
            values[self.fp8_max] = FP8_MAX[fp8]
        return values

    def pointer_dtype(self, arg: Pointer, dtypes: Mapping[str, str], fp8: str) -> str:
        """The concrete dtype behind a pointer argument."""
        role = self.tensor(arg.tensor).dtype
        return fp8 if role == "fp8" else dtypes.get(role, role)

    def staged_bytes(self, config: Config) -> int:
        """Bytes of shared memory that one pipeline stage needs at least."""

        def value(factor: str | int) -> int:
            return factor if isinstance(factor, int) else config.constexprs[factor]

        return sum(math.prod(value(factor) for factor in product) for product in self.staged)

    def grid_size(self, sizes: Mapping[str, int], config: Config) -> tuple[int, ...]:
        """The launch grid for given sizes."""

        def blocks(symbol: str, tile: str | int) -> int:
            step = tile if isinstance(tile, int) else config.constexprs[tile]
            return -(-sizes[symbol] // step)

        return tuple(math.prod(blocks(symbol, tile) for symbol, tile in axis) for axis in self.grid)


def kernel(*args: Argument) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: ``triton.jit`` for a function whose run-time arguments are ``args``.

    Arguments that the spec does not specialise are not specialised by the JIT either, so the JIT
    knows exactly the variants that a bundle holds.
    """
    plain: Sequence[str] = [a.name for a in args if not a.specialize]

    def decorate(fn: Callable[..., Any]) -> Any:
        return triton.jit(fn, do_not_specialize=plain, do_not_specialize_on_alignment=plain)

    return decorate
