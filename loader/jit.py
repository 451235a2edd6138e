"""The JIT fallback: the same kernels, compiled by Triton on this machine.

The only module of the loader that needs Triton and ``fp8_aot.kernels``; imported on the first fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8_aot.loader.schema import Variant


def available() -> str | None:
    """None where the JIT can be used, else what is missing."""
    try:
        import triton  # noqa: F401

        import fp8_aot.kernels  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def launch(
    kernel: str,
    tensors: Mapping[str, Any],
    sizes: Mapping[str, int],
    fp8: str,
    like: Variant | None,
) -> None:
    """Launch a kernel of ``fp8_aot.kernels`` by the JIT on torch tensors, on the current stream.

    Only where :func:`available` finds nothing missing.

    Args:
        kernel: the kernel's name.
        tensors: torch tensors by name, inputs and outputs.
        sizes: values of the size symbols.
        fp8: the device's fp8 dtype.
        like: the variant whose tile config is to be used; the kernel's default config without one.
    """
    from fp8_aot.kernels import SPECS
    from fp8_aot.kernels.spec import COMPILE_OPTIONS, Config, Pointer, Size

    spec = SPECS[kernel]
    config = spec.default
    if like is not None:
        tiles = {tile.name: int(like.constexprs[tile.name]) for tile in spec.tiles}
        config = Config(tiles, like.num_warps, like.num_stages, like.num_ctas)
    args = [
        tensors[arg.tensor]
        if isinstance(arg, Pointer)
        else sizes[arg.symbol]
        if isinstance(arg, Size)
        else tensors[arg.tensor].stride(arg.dim)
        for arg in spec.args
    ]
    spec.fn[spec.grid_size(sizes, config)](
        *args,
        **spec.constexprs(config, fp8),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        **COMPILE_OPTIONS,
    )
