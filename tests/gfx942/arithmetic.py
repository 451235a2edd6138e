"""fp32 arithmetic as the vector unit does it, on numpy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32, F64, I32, U32 = np.float32, np.float64, np.int32, np.uint32
FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)
FP8_MAX = 240.0


class OutOfRange(Exception):
    """A value beyond fp8's range is converted: what comes out depends on the MODE register."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once.

    The product is exact in fp64.  The sum is rounded to odd there, after which rounding it to fp32 is
    the only rounding that counts (Boldo and Melquiond, 2008).
    """
    product, addend = a.astype(F64) * b.astype(F64), c.astype(F64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(F64).astype(F32)


def med3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The middle one; where one is NaN, the least of the others."""
    least = np.fmin(np.fmin(a, b), c)
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, middle)


def rcp(x: np.ndarray, direction: int) -> np.ndarray:
    """1 / x, rounded to nearest (0), away from zero (1) or towards it (-1), subnormals taken and given as zeros.

    The unit promises an error of at most one unit in the last place, and any of these has less.
    """
    tiny = np.finfo(F32).tiny
    x = np.where(np.abs(x) < tiny, np.copysign(F32(0), x), x)
    y = F32(1) / x
    if direction:
        error = np.abs(y.astype(F64)) - np.abs(F64(1) / x.astype(F64))
        wrong = np.isfinite(y) & (error * direction < 0)
        y = np.where(wrong, (y.view(I32) + I32(direction)).view(F32), y)
    return np.where(np.abs(y) < tiny, np.copysign(F32(0), y), y)


def _exponent(x: np.ndarray) -> np.ndarray:
    return x.view(I32) >> 23 & 0xFF


def _is_subnormal(x: np.ndarray) -> np.ndarray:
    return (_exponent(x) == 0) & (x != 0)


def div_scale(s0: np.ndarray, divisor: np.ndarray, dividend: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V_DIV_SCALE_F32: one of the two, scaled so that a division by steps stays in range; and where to undo it."""
    s0, divisor, dividend = np.broadcast_arrays(s0, divisor, dividend)
    up, down = np.ldexp(s0, 64), np.ldexp(s0, -64)
    invalid = (divisor == 0) | (dividend == 0)
    huge = _exponent(dividend) - _exponent(divisor) >= 96
    small_inverse = _is_subnormal((F64(1) / divisor.astype(F64)).astype(F32))
    small_quotient = _is_subnormal((dividend.astype(F64) / divisor.astype(F64)).astype(F32))
    of_divisor, of_dividend = s0 == divisor, s0 == dividend
    cases = [
        (invalid, np.full_like(s0, np.nan), False),
        (huge, np.where(of_divisor, up, s0), True),
        (_is_subnormal(divisor), up, False),
        (small_inverse & small_quotient, np.where(of_divisor, up, s0), True),
        (small_inverse, down, False),
        (small_quotient, np.where(of_dividend, up, s0), True),
        (_exponent(dividend) <= 23, up, False),
    ]
    conditions = [case for case, _, _ in cases]
    value = np.select(conditions, [v for _, v, _ in cases], s0).astype(F32)
    return value, np.select(conditions, [np.full(s0.shape, f) for _, _, f in cases], False)


def div_fmas(a: np.ndarray, b: np.ndarray, c: np.ndarray, undo: np.ndarray) -> np.ndarray:
    """V_DIV_FMAS_F32: fma, and where ``undo`` is set the scale taken back, up or down."""
    value = fma(a, b, c)
    scaled = np.where(_exponent(c) > 127, np.ldexp(value, 64), np.ldexp(value, -64)).astype(F32)
    return np.where(undo, scaled, value)


def div_fixup(quotient: np.ndarray, divisor: np.ndarray, dividend: np.ndarray) -> np.ndarray:
    """V_DIV_FIXUP_F32: the sign, and the special cases, of dividend / divisor."""
    negative = np.signbit(divisor) ^ np.signbit(dividend)

    def of_sign(x: object) -> np.ndarray:
        return np.where(negative, -np.abs(F32(x)), np.abs(F32(x)))

    with_nan = np.isnan(divisor) | np.isnan(dividend)
    infinite, over = np.isinf(dividend), np.isinf(divisor)
    cases = [
        (with_nan | ((divisor == 0) & (dividend == 0)) | (infinite & over), np.full_like(quotient, np.nan)),
        ((divisor == 0) | infinite, of_sign(np.inf)),
        (over | (dividend == 0), of_sign(0)),
        (_exponent(dividend) - _exponent(divisor) < -150, of_sign(0)),
    ]
    own = np.where(negative, -np.abs(quotient), np.abs(quotient))
    return np.select([c for c, _ in cases], [v for _, v in cases], own).astype(F32)


def perm(s0: np.ndarray, s1: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """V_PERM_B32: each byte of the selector picks one of the eight bytes of (s0, s1), s1 the lower ones."""
    s0, s1, selector = np.broadcast_arrays(s0, s1, selector)
    data = s0.astype(np.uint64) << np.uint64(32) | s1
    result = np.zeros(data.shape, U32)
    for byte in range(4):
        pick = selector >> U32(8 * byte) & U32(0xFF)
        if (pick > 12).any() or ((pick > 7) & (pick < 12)).any():
            raise NotImplementedError("V_PERM_B32 with signs")
        value = (data >> (np.minimum(pick, 7).astype(np.uint64) * np.uint64(8))).astype(U32) & U32(0xFF)
        result |= np.where(pick == 12, U32(0), value) << U32(8 * byte)
    return result


def to_fp8(x: np.ndarray, active: np.ndarray) -> np.ndarray:
    """The bytes of fp32 values, in 32 bits."""
    beyond = active & (np.abs(x) > FP8_MAX)
    if beyond.any():
        raise OutOfRange(f"{x[beyond][0]} is converted to fp8")
    return x.astype(FNUZ).view(np.uint8).astype(U32)
