"""Run kernels in Triton's interpreter, with every address checked and every conversion exact.

``checked_builder`` says how; here are launches, the tensors for them, and the tile configs to launch.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from checked_builder import REGION_BITS, CheckedBuilder, Region, WrongCoverage
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from fp8_aot.kernels import SPECS
from fp8_aot.kernels.spec import Config, KernelSpec, Pointer, Size

if not knobs.runtime.interpret:
    pytest.skip("kernels were imported for a GPU, not for the interpreter", allow_module_level=True)

MATRIX = Path(__file__).parent.parent / "build_matrix.toml"

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
        programs: run only these programs of a one-dimensional grid.  Coverage is not checked then, and
            32-bit integers that overflow are an ``AssertionError`` instead.

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
    builder = CheckedBuilder(spec.name, regions, check_overflow=programs is not None)
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
