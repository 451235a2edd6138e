"""From a cell to a compile request: the one place where a spec becomes Triton's terms."""

from __future__ import annotations

from collections.abc import Mapping

from fp8_aot.aot.cells import Cell
from fp8_aot.aot.source import source_sha256
from fp8_aot.aot.targets import TRITON_TYPES, Target
from fp8_aot.aot.toolchain import toolchain
from fp8_aot.aot.worker import Request
from fp8_aot.kernels.spec import COMPILE_OPTIONS, Config, KernelSpec, Pointer


def request(cell: Cell) -> Request:
    """What is to be compiled for a cell."""
    spec, target = cell.entry.spec, cell.target
    made_by = toolchain(target)
    return Request(
        source=cell.entry.source,
        source_sha256=source_sha256(spec.fn),
        backend=target.backend,
        arch=target.triton_arch,
        warp_size=target.warp_size,
        signature=signature(spec, cell.dtypes, target),
        constexprs=spec.constexprs(cell.tile.config, target.fp8),
        aligned=assumed(spec, cell.specialization),
        options=options(cell.tile.config),
        triton=made_by.triton,
        assembler=made_by.assembler.sha256,
    )


def signature(spec: KernelSpec, dtypes: Mapping[str, str], target: Target) -> dict[str, str]:
    """Triton types of a kernel's run-time arguments."""
    return {
        arg.name: "*" + TRITON_TYPES[spec.pointer_dtype(arg, dtypes, target.fp8)]
        if isinstance(arg, Pointer)
        else arg.type
        for arg in spec.args
    }


def assumed(spec: KernelSpec, specialization: str) -> tuple[str, ...]:
    """Arguments that a specialization assumes to be multiples of 16."""
    return tuple(arg.name for arg in spec.args if arg.specialize) if specialization == "aligned" else ()


def options(config: Config) -> dict[str, int | bool]:
    """Triton's options for a tile config."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "num_ctas": config.num_ctas,
        **COMPILE_OPTIONS,
    }
