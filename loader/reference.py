"""The operations in plain torch: the path of CPU tensors, and what the kernels are tested against.

The quantizers equal the kernels bit for bit (NaN payloads aside); a GEMM rounds where the kernel
does, save that the order of additions inside a 128-wide product is torch's.  All are free of
data-dependent control flow, so they run on any device and under ``FakeTensorMode``.  Arguments are
not checked here: callers do that with ``contract``.
"""

from __future__ import annotations

import torch

from fp8_aot.loader.contract import GROUP

LEAST_AMAX = 1e-12
"""Lower bound of a group's amax, which gives an all-zero group a finite scale."""


def act_quant_lhs(
    x: torch.Tensor, *, fp8_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x (M, K) in 1x128 groups: y (M, K) row-major, scale (M, ceil(K/128)) column-major."""
    y, scale = _quantize(x, 1, GROUP, fp8_dtype)
    return _row_major(y), _column_major(scale)


def act_quant_transposed_lhs(
    x: torch.Tensor, *, fp8_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x (M, K) in 128x1 groups: y (K, M) row-major, scale (K, ceil(M/128)) column-major."""
    y, scale = _quantize(x, GROUP, 1, fp8_dtype)
    return _row_major(y.t()), _column_major(scale.t())


def act_quant_rhs(
    x: torch.Tensor, *, fp8_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x (M, K) in 128x1 groups: y (M, K) column-major, scale (ceil(M/128), K) row-major."""
    y, scale = _quantize(x, GROUP, 1, fp8_dtype)
    return _column_major(y), _row_major(scale)


def weight_quant_rhs(
    w: torch.Tensor, *, fp8_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize w (N, K) in 128x128 groups.

    Returns y (N, K) and scale (ceil(N/128), ceil(K/128)), both column-major.
    """
    y, scale = _quantize(w, GROUP, GROUP, fp8_dtype)
    return _column_major(y), _column_major(scale)


def weight_quant_transposed_rhs(
    w: torch.Tensor, *, fp8_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize w (N, K) in 128x128 groups, transposed.

    Returns y (K, N) and scale (ceil(K/128), ceil(N/128)), both column-major.
    """
    y, scale = _quantize(w, GROUP, GROUP, fp8_dtype)
    return _column_major(y.t()), _column_major(scale.t())


def gemm_1x128_128x128(
    a: torch.Tensor,
    b: torch.Tensor,
    a_s: torch.Tensor,
    b_s: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply a (M, K) by b (K, N), both fp8, into c (M, N) row-major.

    a_s (M, ceil(K/128)) scales 1x128 groups of a, b_s (ceil(K/128), ceil(N/128)) 128x128 of b.
    """
    columns = b_s.repeat_interleave(GROUP, dim=1)[:, : b.shape[1]]
    acc = _zeros(a, b)
    for kb in range(a_s.shape[1]):
        acc += _product(a, b, kb) * (a_s[:, kb, None] * columns[kb])
    return acc.to(out_dtype)


def gemm_1x128_128x1(
    a: torch.Tensor,
    b: torch.Tensor,
    a_s: torch.Tensor,
    b_s: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply a (M, K) by b (K, N), both fp8, into c (M, N) row-major.

    a_s (M, ceil(K/128)) scales 1x128 groups of a, b_s (ceil(K/128), N) 128x1 groups of b.
    """
    acc = _zeros(a, b)
    for kb in range(a_s.shape[1]):
        acc += _product(a, b, kb) * a_s[:, kb, None] * b_s[kb]
    return acc.to(out_dtype)


def _quantize(
    x: torch.Tensor, group_rows: int, group_cols: int, fp8_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values (R, C) of x (R, C), and the dequantization multiplier of each of its groups."""
    rows, cols = x.shape
    row_groups, col_groups = -(-rows // group_rows), -(-cols // group_cols)
    pad = (0, col_groups * group_cols - cols, 0, row_groups * group_rows - rows)
    # Zeros never raise an amax, so a padded tail has the scale of the elements that are there.
    padded = torch.nn.functional.pad(x.float(), pad)
    groups = padded.reshape(row_groups, group_rows, col_groups, group_cols)

    fp8_max = torch.finfo(fp8_dtype).max
    amax = groups.abs().amax(dim=(1, 3), keepdim=True).clamp(min=LEAST_AMAX)
    # Not `fp8_max / amax`, which torch computes as amax.reciprocal() * fp8_max: two roundings.
    scale = torch.full_like(amax, fp8_max) / amax
    y = (groups * scale).clamp(-fp8_max, fp8_max).to(fp8_dtype)
    return y.reshape(padded.shape)[:rows, :cols], scale.reciprocal().reshape(row_groups, col_groups)


def _zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fp32 accumulator of a times b."""
    return torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)


def _product(a: torch.Tensor, b: torch.Tensor, kb: int) -> torch.Tensor:
    """fp32 product of block ``kb`` of K: 128 columns of a, 128 rows of b, or those that are left.

    An fp8 value fits in bf16 and TF32, so torch's matmul precision settings cannot change a factor.
    """
    k = slice(kb * GROUP, (kb + 1) * GROUP)
    return a[:, k].float() @ b[k].float()


def _row_major(t: torch.Tensor) -> torch.Tensor:
    """A copy of ``t`` with strides (columns, 1), whatever strides dimensions of extent 1 had."""
    return t.clone(memory_format=torch.contiguous_format)


def _column_major(t: torch.Tensor) -> torch.Tensor:
    """A copy of ``t`` with strides (1, rows)."""
    return _row_major(t.t()).t()
