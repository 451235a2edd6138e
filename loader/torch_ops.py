"""Registration of the operations as ``torch.ops.fp8_aot.*``, with fake implementations.

``torch.library.Library`` rather than ``custom_op``: its call is about three times cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8_aot.loader.torch_call import Call
from fp8_aot.loader.torch_check import Signature

_library = torch.library.Library("fp8_aot", "DEF")
_KEYS = ("CUDA", "CPU")


def register(call: Call) -> None:
    """Define ``fp8_aot::name`` and its ``out`` overload for an operation."""
    op = call.op
    gemm = op.outputs[0].dtype == "out"
    inputs = ", ".join(f"Tensor {t.name}" for t in op.inputs)
    option = ", ScalarType? out_dtype=None" if gemm else ""
    results = "Tensor" if gemm else f"({', '.join('Tensor' for _ in op.outputs)})"
    outs = ", ".join(f"Tensor({chr(97 + i)}!) {t.name}" for i, t in enumerate(op.outputs))
    _library.define(f"{op.name}({inputs}{option}) -> {results}")
    _library.define(f"{op.name}.out({inputs}, *, {outs}) -> ()")
    functional, into = _implementations(call, len(op.inputs), gemm)
    for key in _KEYS:
        _library.impl(op.name, functional, key)
        _library.impl(f"{op.name}.out", into, key)
    for name, fake in zip((op.name, f"{op.name}.out"), _fakes(call.signature, len(op.inputs)), strict=True):
        if torch.version.hip is None:
            # All devices have one fp8 dtype, so what a Meta kernel sees is enough, and torch registers it ten
            # times as fast: this is part of the first launch.
            _library.impl(name, fake, "Meta")
        else:
            torch.library.register_fake(f"fp8_aot::{name}", fake, lib=_library)


def _implementations(call: Call, count: int, gemm: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def functional(*args: Any, out_dtype: torch.dtype | None = None) -> Any:
        dtype = out_dtype or (args[count] if len(args) > count else None) or torch.bfloat16
        outputs = call.run(args[:count], None, dtype)
        return outputs[0] if gemm else outputs

    def into(*inputs: torch.Tensor, **out: torch.Tensor) -> None:
        outputs = tuple(out.values())
        call.run(inputs, outputs, outputs[0].dtype if gemm else torch.bfloat16)

    return functional, into


def _fakes(signature: Signature, count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def functional(*args: Any, out_dtype: torch.dtype | None = None) -> Any:
        dtype = out_dtype or (args[count] if len(args) > count else None) or torch.bfloat16
        inputs = args[:count]
        sizes = signature.check(inputs, dtype)
        outputs = tuple(
            torch.empty_strided(shape, strides, dtype=kind, device=inputs[0].device)
            for shape, strides, kind in signature.layouts(inputs, sizes, dtype)
        )
        return outputs[0] if signature.gemm else outputs

    def into(*inputs: torch.Tensor, **out: torch.Tensor) -> None:
        outputs = tuple(out.values())
        dtype = outputs[0].dtype if signature.gemm else torch.bfloat16
        sizes = signature.check(inputs, dtype)
        signature.check_out(outputs, inputs[0].device, signature.layouts(inputs, sizes, dtype), sizes, dtype)

    return functional, into
