"""What the kernels should give, in fp64 and by definition.

Independent of torch's casts and of ``ml_dtypes``: bf16 and fp8 are decoded and rounded from the definitions
of the formats.  Every rounding to fp32 of a quotient goes through fp64, which is innocuous: a quotient of
two 24-bit numbers that is rounded to 53 >= 2 * 24 + 2 bits first rounds to the same 24 bits (Figueroa,
1995).  Products of two fp32 numbers are exact in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

GROUP = 128
FP8_MAX = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}
FP8_NAMES = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}

FORMATS = {"fp32": (24, -125, 128), "bf16": (8, -125, 128), "fp16": (11, -13, 16)}
"""Significand bits, and the exponents e (m * 2**e, 0.5 <= m < 1) of the least and greatest normal numbers."""


def round_to(x: np.ndarray, name: str) -> np.ndarray:
    """fp64 values rounded to nearest even in fp32, bf16 or fp16, overflow to Inf, as fp64."""
    bits, least, most = FORMATS[name]
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent, least) - bits
    rounded = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    too_large = np.abs(rounded) >= np.ldexp(1.0, most)
    return np.where(too_large, np.copysign(np.inf, x), np.where(np.isfinite(x), rounded, x))


@cache
def fp8_values(name: str) -> np.ndarray:
    """The fp64 value of each of the 256 bytes."""
    code = np.arange(256)
    sign, exponent, mantissa = np.where(code >> 7, -1.0, 1.0), code >> 3 & 15, code & 7
    bias = {"e4m3fn": 7, "e4m3fnuz": 8}[name]
    normal = np.ldexp(8.0 + mantissa, exponent - bias - 3)
    value = sign * np.where(exponent == 0, np.ldexp(mantissa.astype(float), -bias - 2), normal)
    is_nan = (code & 0x7F == 0x7F) if name == "e4m3fn" else (code == 0x80)
    return np.where(is_nan, np.nan, value)


def to_fp8(x: np.ndarray, name: str) -> np.ndarray:
    """The byte of the nearest fp8 value, ties to the even byte, for values within +-FP8_MAX and NaN.

    e4m3fnuz has one zero and one NaN, neither with a sign.
    """
    values = fp8_values(name)
    magnitudes = values[: np.count_nonzero(~np.isnan(values[:128]))]
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2  # exact
    size = np.abs(x)
    if (size > FP8_MAX[name]).any():
        raise ValueError(f"{np.nanmax(size)} is beyond the range of {name}")
    below = np.searchsorted(midpoints, size, side="left")  # midpoints below size
    tie = np.isin(size, midpoints)
    byte = below + (tie & (below % 2 == 1))
    signed = np.signbit(x) & ((byte > 0) | (name == "e4m3fn"))
    return np.where(np.isnan(x), 0x7F if name == "e4m3fn" else 0x80, byte + 128 * signed).astype(np.uint8)


def exact(t: torch.Tensor) -> np.ndarray:
    """The values of a tensor in fp64, decoded by definition."""
    if t.dtype == torch.bfloat16:
        bits = t.view(torch.uint16).numpy().astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    if t.dtype in FP8_NAMES:
        return fp8_values(FP8_NAMES[t.dtype])[t.view(torch.uint8).numpy()]
    return t.numpy().astype(np.float64)


def quantize(x: np.ndarray, group_rows: int, group_cols: int, fp8: str) -> tuple[np.ndarray, np.ndarray]:
    """fp8 bytes (R, C) of fp64 x (R, C), and the stored scale (fp32) of each group."""
    rows, cols = x.shape
    amax = np.empty((-(-rows // group_rows), -(-cols // group_cols)))
    for i, j in np.ndindex(*amax.shape):
        group = x[i * group_rows : (i + 1) * group_rows, j * group_cols : (j + 1) * group_cols]
        amax[i, j] = np.abs(group).max()  # numpy's max keeps NaN
    amax = np.maximum(amax, round_to(np.float64(1e-12), "fp32"))
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = round_to(FP8_MAX[fp8] / amax, "fp32")
        stored = round_to(1.0 / scale, "fp32").astype(np.float32)
        per_element = scale.repeat(group_rows, 0)[:rows].repeat(group_cols, 1)[:, :cols]
        scaled = round_to(x * per_element, "fp32")
    return to_fp8(np.clip(scaled, -FP8_MAX[fp8], FP8_MAX[fp8]), fp8), stored


Quantized = tuple[np.ndarray, np.ndarray]


def _transposed(q: Quantized) -> Quantized:
    return q[0].T, q[1].T


QUANTIZERS: dict[str, Callable[[np.ndarray, str], Quantized]] = {
    "act_quant_lhs": lambda x, fp8: quantize(x, 1, GROUP, fp8),
    "act_quant_transposed_lhs": lambda x, fp8: quantize(x.T, 1, GROUP, fp8),
    "act_quant_rhs": lambda x, fp8: quantize(x, GROUP, 1, fp8),
    "weight_quant_rhs": lambda w, fp8: quantize(w, GROUP, GROUP, fp8),
    "weight_quant_transposed_rhs": lambda w, fp8: _transposed(quantize(w, GROUP, GROUP, fp8)),
}
"""Each quantizer: fp64 input to fp8 bytes and fp32 scale, in the shapes that the operation documents."""


def gemm(a: np.ndarray, b: np.ndarray, a_s: np.ndarray, b_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fp64 product of scaled operands, and the greatest error of an fp32 evaluation of it.

    a (M, K), b (K, N), a_s (M, ceil(K/128)), and b_s (ceil(K/128), N), which repeats scales of wider groups.

    The evaluation may add the products of a 128-wide block in any order.  With u = 2**-24, each term
    a * b * a_s * b_s meets at most

    * no rounding in a * b: two 4-bit significands give 8 bits, and no exponent leaves fp32's range;
    * 127 roundings in the sum of its block;
    * 2 where the scales are multiplied in, in either order;
    * one for each block that is added to the accumulator,

    n in all, so its weight in the result is off by at most gamma(n) = n*u / (1 - n*u), and the result by
    gamma(n) * sum |a b a_s b_s| (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).  Products
    with scales that end below fp32's normal range add half its least subnormal, 2**-150, each, multiplied by
    what is multiplied in later.  fp64's own error, here n * 2**-53 of the same sum, is added.
    """
    blocks = a_s.shape[1]
    value, size, below = (np.zeros((a.shape[0], b.shape[1])) for _ in range(3))
    for kb in range(blocks):
        k = slice(kb * GROUP, (kb + 1) * GROUP)
        scale = a_s[:, kb, None] * b_s[kb]
        magnitude = np.abs(a[:, k]) @ np.abs(b[k])
        value += (a[:, k] @ b[k]) * scale
        size += magnitude * np.abs(scale)
        below += 2.0**-149 * (1.0 + magnitude + np.abs(b_s[kb]))
    n = 127 + 2 + blocks
    gamma = n * 2.0**-24 / (1 - n * 2.0**-24)
    return value, (gamma + n * 2.0**-53) * size + below


def sqnr(reference: np.ndarray, x: np.ndarray) -> float:
    """Signal to quantization noise ratio in dB."""
    return float(20 * np.log10(np.linalg.norm(reference) / np.linalg.norm(reference - x)))
