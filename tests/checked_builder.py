"""The interpreter's builder with every address checked and every conversion exact.

Two parts of Triton's interpreter are replaced:

* **Conversions.** Triton 3.9's interpreter truncates to bf16, rounds ties up and mishandles subnormals
  and NaN of fp8.  Here the ``ml_dtypes`` package converts, which rounds to nearest even and shares no
  code with torch or with the oracles (``test_quant_interp`` checks fp8 and bf16 against the
  definitions).  A cast to fp8 of a value beyond the largest finite one is an error, since targets differ there.
* **Memory.** A tensor lives in an address range of its own, far from all others, that exists for the
  interpreter alone.  So an address belongs to the tensor that it was computed from, however wrong it
  is, and nothing is read or written before it has been shown to be an element: right alignment and
  size, row and column inside the shape, not in the gap between rows.  Inputs are only read, outputs
  only written, each element exactly once.  Lanes that a mask excludes read garbage if no ``other`` is
  given, as they do on a GPU.  All other ways to memory (atomics, descriptors) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

REGION_BITS = 44

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

    def __init__(self, kernel: str, regions: Mapping[int, Region], *, check_overflow: bool) -> None:
        super().__init__()
        # Costs as much as all the rest, so it is for sizes at which 32-bit integers can overflow.
        self.options = InterpreterOptions(debug=check_overflow, sanitize_overflow=check_overflow)
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
        active = _active(mask, ptrs)
        found = self._elements(ptrs, active, store=False)
        if found:
            region, row, column = found
            data[active] = region.array[row, column]
        return TensorHandle(data, dtype)

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *_: Any) -> None:
        active = _active(mask, ptrs)
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


def _active(mask: TensorHandle, ptrs: TensorHandle) -> np.ndarray:
    """The lanes of an access that its mask lets through; the interpreter may hold a mask as integers."""
    return np.broadcast_to(mask.data != 0, ptrs.data.shape)
