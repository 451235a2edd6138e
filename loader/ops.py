"""The torch face: seven operations on torch tensors, also as ``torch.ops.fp8_aot.*``.

GPU tensors run prebuilt kernels (or the JIT, as the mode says) on the tensor's device and the caller's
current stream; CPU tensors run :mod:`fp8_aot.loader.reference`.  The math is torchao's
``blockwise_fp8_training``; shapes, dtypes and layouts are in :mod:`fp8_aot.loader.contract`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8_aot.loader import torch_ops
from fp8_aot.loader.torch_call import Call

_Pair = tuple[torch.Tensor, torch.Tensor]

_act_quant_lhs = Call("act_quant_lhs")
_act_quant_transposed_lhs = Call("act_quant_transposed_lhs")
_act_quant_rhs = Call("act_quant_rhs")
_weight_quant_rhs = Call("weight_quant_rhs")
_weight_quant_transposed_rhs = Call("weight_quant_transposed_rhs")
_gemm_1x128_128x128 = Call("gemm_1x128_128x128")
_gemm_1x128_128x1 = Call("gemm_1x128_128x1")

CALLS = {
    call.op.name: call
    for call in (
        _act_quant_lhs,
        _act_quant_transposed_lhs,
        _act_quant_rhs,
        _weight_quant_rhs,
        _weight_quant_transposed_rhs,
        _gemm_1x128_128x128,
        _gemm_1x128_128x1,
    )
}
"""Every operation, by name."""

for _call in CALLS.values():
    torch_ops.register(_call)


def act_quant_lhs(x: torch.Tensor, *, out: Sequence[torch.Tensor] | None = None) -> _Pair:
    """Quantize an activation as a left operand: groups of 1×128.

    Args:
        x: (M, K), bf16, fp16 or fp32, last stride 1, any M, K >= 0 and row stride.
        out: (y, scale) to write into, of the shapes, dtypes and layouts returned.

    Returns:
        y: (M, K), the device's fp8 dtype, row-major.
        scale: (M, ceil(K/128)), fp32, column-major: the dequantization multiplier.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was launched.
        MissError: mode ``strict``, and no prebuilt kernel fits.
    """
    return _act_quant_lhs.quantize(x, out)


def act_quant_transposed_lhs(x: torch.Tensor, *, out: Sequence[torch.Tensor] | None = None) -> _Pair:
    """Quantize an activation's transpose as a left operand: groups of 128 rows of x.

    Args:
        x: (M, K), as for :func:`act_quant_lhs`.
        out: (y, scale) to write into.

    Returns:
        y: (K, M), the device's fp8 dtype, row-major.
        scale: (K, ceil(M/128)), fp32, column-major.

    Raises:
        As :func:`act_quant_lhs`.
    """
    return _act_quant_transposed_lhs.quantize(x, out)


def act_quant_rhs(x: torch.Tensor, *, out: Sequence[torch.Tensor] | None = None) -> _Pair:
    """Quantize an activation as a right operand: groups of 128×1.

    Args:
        x: (M, K), as for :func:`act_quant_lhs`.
        out: (y, scale) to write into.

    Returns:
        y: (M, K), the device's fp8 dtype, column-major.
        scale: (ceil(M/128), K), fp32, row-major.

    Raises:
        As :func:`act_quant_lhs`.
    """
    return _act_quant_rhs.quantize(x, out)


def weight_quant_rhs(w: torch.Tensor, *, out: Sequence[torch.Tensor] | None = None) -> _Pair:
    """Quantize a weight as a right operand: groups of 128×128.

    Args:
        w: (N, K), bf16, fp16 or fp32, last stride 1.
        out: (y, scale) to write into.

    Returns:
        y: (N, K), the device's fp8 dtype, column-major.
        scale: (ceil(N/128), ceil(K/128)), fp32, column-major.

    Raises:
        As :func:`act_quant_lhs`.
    """
    return _weight_quant_rhs.quantize(w, out)


def weight_quant_transposed_rhs(w: torch.Tensor, *, out: Sequence[torch.Tensor] | None = None) -> _Pair:
    """Quantize a weight's transpose as a right operand: groups of 128×128.

    Args:
        w: (N, K), bf16, fp16 or fp32, last stride 1.
        out: (y, scale) to write into.

    Returns:
        y: (K, N), the device's fp8 dtype, column-major.
        scale: (ceil(K/128), ceil(N/128)), fp32, column-major.

    Raises:
        As :func:`act_quant_lhs`.
    """
    return _weight_quant_transposed_rhs.quantize(w, out)


def gemm_1x128_128x128(
    a: torch.Tensor,
    b: torch.Tensor,
    a_s: torch.Tensor,
    b_s: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blockwise-scaled fp8 product for fprop and dgrad: 1×128 scales of a, 128×128 scales of b.

    Each 128-wide partial product is scaled and added in fp32, in a fixed order.

    Args:
        a: (M, K), the device's fp8 dtype, row-major with any row stride.
        b: (K, N), the same dtype, column-major with any column stride.
        a_s: (M, ceil(K/128)), fp32, column-major.
        b_s: (ceil(K/128), ceil(N/128)), fp32, column-major.
        out_dtype: bf16, fp16 or fp32.
        out: (M, N) tensor of ``out_dtype`` to write into, row-major.

    Returns:
        c: (M, N), row-major; zeros where K is 0.

    Raises:
        As :func:`act_quant_lhs`.
    """
    return _gemm_1x128_128x128.multiply(a, b, a_s, b_s, out_dtype, out)


def gemm_1x128_128x1(
    a: torch.Tensor,
    b: torch.Tensor,
    a_s: torch.Tensor,
    b_s: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blockwise-scaled fp8 product for wgrad: 1×128 scales of a, 128×1 scales of b.

    Args:
        a, b, a_s, out_dtype, out: as for :func:`gemm_1x128_128x128`.
        b_s: (ceil(K/128), N), fp32, row-major.

    Returns:
        c: (M, N), row-major; zeros where K is 0.

    Raises:
        As :func:`act_quant_lhs`.
    """
    return _gemm_1x128_128x1.multiply(a, b, a_s, b_s, out_dtype, out)
