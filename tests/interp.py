"""Run kernels in Triton's interpreter, with every address checked and every conversion exact.

Two parts of the interpreter are replaced (:class:`CheckedBuilder`):

* **Conversions.** Triton 3.9's interpreter truncates to bf16, rounds ties up and mishandles subnormals
  and NaN of fp8.  Here the ``ml_dtypes`` package converts, which rounds to nearest even and shares no
  code with torch or with the oracles (``test_quant_interp`` checks it against the definition of every
  format).  A cast to fp8 of a value beyond the largest finite one is an error, since targets differ there.
* **Memory.** A tensor lives in an address range of its own, far from all others, that exists for the
  interpreter alone.  So an address belongs to the tensor that it was computed from, however wrong it
  is, and nothing is read or written before it has been shown to be an element: right alignment and
  size, row and column inside the shape, not in the gap between rows.  Inputs are only read, outputs
  only written, each element exactly once.  Lanes that a mask excludes read garbage if no ``other`` is
  given, as they do on a GPU.  All other ways to memory (atomics, descriptors) are refused.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
)

from fp8_aot.kernels import SPECS
from fp8_aot.kernels.spec import Config, KernelSpec, Pointer, Size

MATRIX = Path(__file__).parent.parent / "build_matrix.toml"
REGION_BITS = 44

TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "uint8": torch.uint8,
}
"""The torch dtype of each dtype name in a spec."""

TRITON = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.uint8: tl.uint8,
}
STORED_AS_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
}
FLOATS = {
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
}


class OutOfBounds(Exception):
    """A kernel touched an address that it must not."""


class WrongCoverage(Exception):
    """A kernel did not write every element of its outputs exactly once."""


class OutOfRange(Exception):
    """A kernel cast a value to fp8 that is larger than the largest finite one."""


class Unchecked(Exception):
    """A kernel used a way to memory, or a conversion, that this harness does not check."""


@dataclass(frozen=True)
class Region:
    """A tensor in the interpreter's address space: ``array`` is (rows, elements of a row)."""

    name: str
    dtype: tl.dtype
    array: np.ndarray
    stride: int
    output: bool
    base: int
    writes: np.ndarray | None

    def locate(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row and column of each address, and whether it is an element of the tensor."""
        size = self.array.dtype.itemsize
        offset = addresses.view(np.int64) - self.base
        element = offset // size
        row = element // self.stride
        column = element - row * self.stride
        rows, columns = self.array.shape
        good = (row >= 0) & (row < rows) & (column < columns) & (element * size == offset)
        return row, column, good


class CheckedBuilder(InterpreterBuilder):
    """The interpreter's builder with exact conversions and checked memory."""

    def __init__(self, kernel: str, regions: Mapping[int, Region]) -> None:
        super().__init__()
        # Integers wrap as on a GPU; an address that has wrapped is out of bounds, and found there.
        self.options = InterpreterOptions(sanitize_overflow=False)
        self.kernel = kernel
        self.regions = regions

    def _convert(self, data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
        floats = np.ascontiguousarray(data).view(FLOATS[source])
        fp8_most = {tl.float8e4nv: 448.0, tl.float8e4b8: 240.0}.get(target)
        if fp8_most is not None and (np.abs(floats.astype(np.float32)) > fp8_most).any():
            raise OutOfRange(f"{self.kernel} casts a value above {fp8_most} to {target}, program {self.grid_idx}")
        return floats.astype(FLOATS[target]).view(interpreter._get_np_dtype(target))

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source in FLOATS and target in FLOATS:
            return TensorHandle(self._convert(src.data, source, target), target)
        if source.is_int() and (target.is_int() or target in (tl.float32, tl.float64)):
            return super().cast_impl(src, dst_type)
        raise Unchecked(f"{self.kernel}: a conversion from {source} to {target}")

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        if rounding_mode not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise Unchecked(f"{self.kernel}: rounding mode {rounding_mode}")
        return self.cast_impl(src, dst_type)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
        x, y = (self._convert(t.data, t.dtype.scalar, tl.float32) for t in (a, b))
        return TensorHandle(np.matmul(x, y) + d.data, d.dtype.scalar)

    def _elements(self, ptrs: TensorHandle, mask: np.ndarray, store: bool) -> tuple[Region, Any, Any] | None:
        """The tensor, rows and columns that the active lanes touch, or None where no lane is active."""
        addresses = ptrs.data[mask]
        if not addresses.size:
            return None
        act = "stores to" if store else "loads from"
        where = f"{self.kernel}, program {self.grid_idx}: {act}"
        region = self.regions.get(int(addresses[0]) >> REGION_BITS)
        if region is None:
            raise OutOfBounds(f"{where} {hex(addresses[0])}, far from every tensor")
        row, column, good = region.locate(addresses)
        if not good.all():
            bad = int(np.argmin(good))
            element = (int(addresses[bad]) - region.base) / region.array.dtype.itemsize
            raise OutOfBounds(
                f"{where} {region.name} at element {element:g} (row {row[bad]}, column {column[bad]}), which does "
                f"not exist: {region.array.shape[0]} rows of {region.array.shape[1]}, stride {region.stride}; "
                f"{np.count_nonzero(~good)} of {good.size} lanes"
            )
        if ptrs.get_element_ty() != region.dtype:
            raise OutOfBounds(f"{where} {region.name} ({region.dtype}) as {ptrs.get_element_ty()}")
        if store != region.output:
            raise OutOfBounds(f"{where} {region.name}, an {'output' if region.output else 'input'}")
        return region, row, column

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *_: Any
    ) -> TensorHandle:
        dtype = ptrs.get_element_ty()
        if other is None:
            data = np.empty(ptrs.data.shape, interpreter._get_np_dtype(dtype))
            data.view(np.uint8)[...] = 0xFF
        else:
            data = np.array(np.broadcast_to(other.data, ptrs.data.shape))
        active = np.broadcast_to(mask.data, ptrs.data.shape)
        found = self._elements(ptrs, active, store=False)
        if found:
            region, row, column = found
            data[active] = region.array[row, column]
        return TensorHandle(data, dtype)

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *_: Any) -> None:
        active = np.broadcast_to(mask.data, ptrs.data.shape)
        found = self._elements(ptrs, active, store=True)
        if found:
            region, row, column = found
            values = np.broadcast_to(value.data, ptrs.data.shape)[active]
            if values.dtype != region.array.dtype:
                raise OutOfBounds(f"{self.kernel}: stores {values.dtype} to {region.name} ({region.array.dtype})")
            region.array[row, column] = values
            if region.writes is not None:
                np.add.at(region.writes, (row, column), 1)

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unchecked(f"{self.kernel}: memory is reached in a way that is not checked")

    create_atomic_cas = create_atomic_rmw = create_atomic_poll = _refuse
    create_atomic_load = create_atomic_store = _refuse
    create_make_tensor_descriptor = create_descriptor_load = create_descriptor_store = _refuse
    create_descriptor_gather = create_descriptor_scatter = _refuse


def matrix_configs(spec: KernelSpec | str) -> list[Config]:
    """Tile configs to test, without repetition: the matrix's, the default, all least, all most."""
    spec = SPECS[spec] if isinstance(spec, str) else spec
    found: list[Mapping[str, int]] = []
    for entry in tomllib.loads(MATRIX.read_text())["kernel"]:
        if entry["source"].rpartition(":")[2] == spec.name:
            found += [{t.name: tile[t.name] for t in spec.tiles} for tile in entry["tiles"]]
    found.append({t.name: spec.default.constexprs[t.name] for t in spec.tiles})
    found.append({t.name: t.least for t in spec.tiles})
    found.append({t.name: t.most for t in spec.tiles})
    unique = {tuple(values.items()): values for values in found}
    return [Config(values) for values in unique.values()]


def label(config: Config) -> str:
    """A short name of a config, for test ids."""
    return "x".join(str(value) for value in config.constexprs.values()) or "fixed"


def allocate(
    spec: KernelSpec,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str] | None = None,
    fp8: str = "e4m3fn",
    *,
    pad: int = 0,
    offset: int = 0,
) -> dict[str, torch.Tensor]:
    """The tensors of a launch, in their documented layouts, every byte 0xFF (NaN in most formats).

    ``pad`` elements lie between rows (columns where those are contiguous), ``offset`` before the first.
    """
    names = {"fp8": fp8, **(dtypes or {})}
    tensors = {}
    for t in spec.tensors:
        dtype = TORCH[names.get(t.dtype, t.dtype)]
        shape = tuple(d.extent(sizes) for d in t.shape)
        outer, inner = shape[1 - t.unit_dim], shape[t.unit_dim]
        stride = max(inner, 1) + pad
        raw = torch.full(((offset + outer * stride) * dtype.itemsize,), 0xFF, dtype=torch.uint8)
        strides = (stride, 1) if t.unit_dim == 1 else (1, stride)
        tensors[t.name] = torch.as_strided(raw.view(dtype), shape, strides, offset)
    return tensors


def run(
    spec: KernelSpec,
    tensors: Mapping[str, torch.Tensor],
    config: Config,
    fp8: str = "e4m3fn",
    *,
    strides: Mapping[str, int] | None = None,
    programs: Iterable[int] | None = None,
) -> None:
    """Launch ``spec`` on ``tensors`` in the interpreter.

    Args:
        strides: free strides, in elements, to tell the kernel instead of the tensors' own; memory need not
            be that large, since addresses are virtual.
        programs: run only these programs of a one-dimensional grid, and skip the check of coverage.

    Raises:
        OutOfBounds, WrongCoverage, OutOfRange, Unchecked: see there.
    """
    sizes = _sizes(spec, tensors)
    regions: dict[int, Region] = {}
    by_name: dict[str, Region] = {}
    for number, t in enumerate(spec.tensors, 1):
        tensor = tensors[t.name]
        stride = (strides or {}).get(t.name, tensor.stride(1 - t.unit_dim))
        array = tensor.view(STORED_AS_BITS.get(tensor.dtype, tensor.dtype)).numpy()
        array = array if t.unit_dim == 1 else array.T
        counted = t.output and programs is None
        region = Region(
            name=t.name,
            dtype=TRITON[tensor.dtype],
            array=array,
            stride=max(stride, 1),
            output=t.output,
            base=(number << REGION_BITS) + (1 << REGION_BITS - 1),
            writes=np.zeros(array.shape, np.int32) if counted else None,
        )
        if region.array.shape[0] > 1 and region.stride < region.array.shape[1]:
            raise ValueError(f"{t.name}: rows of {region.array.shape[1]} overlap at stride {region.stride}")
        regions[number] = by_name[t.name] = region

    arguments: dict[str, Any] = {}
    for arg in spec.args:
        if isinstance(arg, Pointer):
            region = by_name[arg.tensor]
            arguments[arg.name] = _scalar(region.base, np.uint64, tl.pointer_type(region.dtype))
        elif isinstance(arg, Size):
            arguments[arg.name] = _scalar(sizes[arg.symbol], np.int32, tl.int32)
        else:
            arguments[arg.name] = _scalar(by_name[arg.tensor].stride, np.int64, tl.int64)
    arguments.update(spec.constexprs(config, fp8))

    grid = spec.grid_size(sizes, config)
    builder = CheckedBuilder(spec.name, regions)
    builder.set_grid_dim(*grid, *(1,) * (3 - len(grid)))
    indices = itertools.product(*map(range, grid)) if programs is None else ((p,) for p in programs)
    function = spec.fn.rewrite()
    with _interpreting(builder), np.errstate(all="ignore"):
        for index in indices:
            builder.set_grid_idx(*index, *(0,) * (3 - len(index)))
            function(**arguments)
    for region in regions.values():
        if region.writes is not None and (region.writes != 1).any():
            row, column = np.argwhere(region.writes != 1)[0]
            raise WrongCoverage(
                f"{spec.name}: {region.name} (row {row}, column {column} of {region.array.shape}) was written "
                f"{region.writes[row, column]} times, expected once"
            )


def _sizes(spec: KernelSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The value of each size symbol, from the shapes, all of which must agree."""
    sizes = {
        dim.symbol: extent
        for t in spec.tensors
        for dim, extent in zip(t.shape, tensors[t.name].shape, strict=True)
        if dim.group == 1
    }
    for t in spec.tensors:
        expected = tuple(d.extent(sizes) for d in t.shape)
        if tuple(tensors[t.name].shape) != expected:
            raise ValueError(f"{t.name}: shape {tuple(tensors[t.name].shape)}, expected {expected}")
    return sizes


def _scalar(value: int, dtype: type[np.generic], ty: tl.dtype) -> tl.tensor:
    return tl.tensor(TensorHandle(np.array([value], dtype), ty), ty)


@contextmanager
def _interpreting(builder: CheckedBuilder) -> Iterator[None]:
    """Make ``triton.language`` act on ``builder``, and calls between functions cheap."""

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    semantic, own_call = interpreter.interpreter_semantic, InterpretedFunction.__call__
    own_builder = semantic.builder
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    semantic.builder, InterpretedFunction.__call__ = builder, call
    try:
        yield
    finally:
        semantic.builder, InterpretedFunction.__call__ = own_builder, own_call
        scope.restore()
