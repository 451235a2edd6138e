"""The runtime of fp8-aot: find a bundle, load its kernels, launch them.  No compiler, no Triton.

    import fp8_aot.loader as fp8
    y, scale = fp8.act_quant_lhs(x)

``import fp8_aot.loader`` imports neither torch nor Triton; the operations on torch tensors import torch
when they are first used, and the JIT fallback imports Triton when it is first needed.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fp8_aot.loader import config
from fp8_aot.loader.dispatch import Choice, Step
from fp8_aot.loader.driver import default_driver
from fp8_aot.loader.errors import (
    BundleError,
    CaptureError,
    DriverError,
    ForkError,
    IntegrityError,
    LoaderError,
    MissError,
    SchemaError,
)
from fp8_aot.loader.launch import launch
from fp8_aot.loader.runtime import Stats, runtime
from fp8_aot.loader.schema import VERSION as __version__
from fp8_aot.loader.views import TensorView

if TYPE_CHECKING:
    from fp8_aot.loader.ops import (
        act_quant_lhs,
        act_quant_rhs,
        act_quant_transposed_lhs,
        gemm_1x128_128x1,
        gemm_1x128_128x128,
        weight_quant_rhs,
        weight_quant_transposed_rhs,
    )
    from fp8_aot.loader.torch_call import MissWarning

_TORCH = {
    "act_quant_lhs": "ops",
    "act_quant_rhs": "ops",
    "act_quant_transposed_lhs": "ops",
    "gemm_1x128_128x1": "ops",
    "gemm_1x128_128x128": "ops",
    "weight_quant_rhs": "ops",
    "weight_quant_transposed_rhs": "ops",
    "MissWarning": "torch_call",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_TORCH[name]}"), name)
    globals()[name] = value
    return value


def configure(*, mode: str | None = None, bundle_path: str | os.PathLike[str] | None = None) -> None:
    """Choose the mode and where bundles are looked for first; None leaves a setting as it is.

    Kernels that are loaded are unloaded, so that the next launch follows the new settings: none may be running,
    and graphs captured with them are void.

    Args:
        mode: ``"strict"`` (a miss raises), ``"warn"`` (one warning for each missing cell, then the JIT) or
            ``"jit"`` (always the JIT, for comparison).
        bundle_path: a bundle file or a folder of them; several joined by ``os.pathsep``.

    Raises:
        TypeError: ``bundle_path`` is no path.
        ValueError: ``mode`` is not a mode.
    """
    config.update(mode, bundle_path)
    runtime.unload()


def preload(*, device: int = 0, backend: str | None = None, kernels: str | tuple[str, ...] = ()) -> int:
    """Load the prebuilt kernels of a device now, so that no launch has to: before a graph capture, or
    before traffic.

    Args:
        device: the driver's ordinal of the device.
        backend: ``"cuda"`` or ``"hip"``; by default that of the driver that this machine has.
        kernels: names or globs of kernels; all by default.

    Returns:
        How many variants are loaded; 0 where no bundle fits the device.

    Raises:
        DriverError: no driver, no such device, or the driver refused an object.
        IntegrityError: an object is damaged.
        ValueError: a glob matches no kernel.
    """
    backend = backend or default_driver().backend
    globs = (kernels,) if isinstance(kernels, str) else kernels
    return runtime.preload(runtime.state(backend, device), globs)


def stats() -> Stats:
    """Counts of loads, launches, misses and fallbacks since the process started."""
    return runtime.stats()


def unload() -> None:
    """Unload every kernel and forget every bundle; no launched kernel may still be running."""
    runtime.unload()


def explain(op: str, *inputs: Any, out_dtype: Any = None) -> Choice:
    """What a call of an operation with these torch tensors would launch, and why: nothing is launched.

    The result's ``steps`` are the very decisions that a launch makes, on bundles, tiles and specializations;
    ``print`` shows them.

    Raises:
        ValueError: there is no such operation, or an argument does not fit.
        DriverError: there is no driver for the tensors' device.
    """
    import torch

    from fp8_aot.loader.ops import CALLS

    if op not in CALLS:
        raise ValueError(f"op is {op!r}, expected one of {', '.join(CALLS)}")
    return CALLS[op].explain(inputs, out_dtype or torch.bfloat16)


__all__ = [
    "BundleError",
    "CaptureError",
    "Choice",
    "DriverError",
    "ForkError",
    "IntegrityError",
    "LoaderError",
    "MissError",
    "MissWarning",
    "SchemaError",
    "Stats",
    "Step",
    "TensorView",
    "__version__",
    "act_quant_lhs",
    "act_quant_rhs",
    "act_quant_transposed_lhs",
    "configure",
    "explain",
    "gemm_1x128_128x1",
    "gemm_1x128_128x128",
    "launch",
    "preload",
    "stats",
    "unload",
    "weight_quant_rhs",
    "weight_quant_transposed_rhs",
]
