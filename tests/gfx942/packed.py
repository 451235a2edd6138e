"""Packed vector instructions and matrix products (VOP3P)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gfx942 import arithmetic
from gfx942.arithmetic import F32, FNUZ
from gfx942.scalar import Step
from gfx942.vector import F16, U16
from gfx942.wave import LANES, Vector, Wave, scalar, vector

_FP8 = np.arange(256, dtype=np.uint8).view(FNUZ).astype(np.float64)


def _half(code: int, high: bool) -> Vector:
    """One half of a pair of registers; a constant is in both."""
    if code >= 256:
        register = code - 256 + high
        return lambda w: w.v[register].view(F32)
    if code >= 128:
        return lambda w: vector(code)(w).view(F32)
    get = scalar(code + high)
    return lambda w: np.array([get(w)], np.uint32).view(F32)


def packed(i: Any) -> Step:
    """V_PK_MUL_F32, V_PK_FMA_F32, V_MAD_MIX_F32."""
    if i.clmp:
        raise NotImplementedError(f"{i}: clamp")
    codes = (i.src0.offset, i.src1.offset, i.src2.offset)
    d = i.vdst.offset - 256
    upper = i.opsel_hi | i.opsel_hi2 << 2
    if i.op.name == "V_MAD_MIX_F32":
        a, b, c = (
            _mixed(code, upper >> n & 1, i.opsel >> n & 1, i.neg >> n & 1, i.neg_hi >> n & 1)
            for n, code in enumerate(codes)
        )
        return lambda w: w.write(d, np.broadcast_to(arithmetic.fma(a(w), b(w), c(w)), (LANES,)).view(np.uint32))
    count = {"V_PK_MUL_F32": 2, "V_PK_FMA_F32": 3}[i.op.name]
    halves = []
    for half, choose, negate in ((0, i.opsel, i.neg), (1, upper, i.neg_hi)):
        operands = [_half(code, bool(choose >> n & 1)) for n, code in enumerate(codes[:count])]
        signs = [F32(-1 if negate >> n & 1 else 1) for n in range(count)]
        halves.append((half, operands, signs))

    def run(w: Wave) -> None:
        # Both are read before one is written.
        results = []
        for half, operands, signs in halves:
            values = [x(w) * s for x, s in zip(operands, signs, strict=True)]
            results.append((half, values[0] * values[1] if count == 2 else arithmetic.fma(*values)))
        for half, value in results:
            w.write(d + half, value.view(np.uint32))

    return run


def _mixed(code: int, is_half: int, high: int, neg: int, absolute: int) -> Vector:
    get = vector(code, half=bool(is_half))

    def value(w: Wave) -> np.ndarray:
        x = get(w)
        if is_half:
            x = (x >> np.uint32(16) if high else x & U16).astype(np.uint16).view(F16).astype(F32)
        else:
            x = x.view(F32)
        x = np.abs(x) if absolute else x
        return -x if neg else x

    return value


def mfma(i: Any) -> Step:
    """v_mfma_f32_{16x16x32,32x32x16}_fp8_fp8: D = A B + C, the sum of each instruction rounded once.

    Lane l holds 8 values of A's row l % size from column 8 * (l // size) on, and B's column likewise; it
    holds D's column l % size, in groups of four rows.  All lanes take part, whatever EXEC says.
    """
    size, depth = {"V_MFMA_F32_16X16X32_FP8_FP8": (16, 32), "V_MFMA_F32_32X32X16_FP8_FP8": (32, 16)}[i.op.name]
    if i.cbsz or i.abid or i.blgp or i.acc or i.acc_cd:
        raise NotImplementedError(f"{i}: broadcast or accumulation registers")
    a, b, c, d = i.src0.offset - 256, i.src1.offset - 256, i.src2.offset, i.vdst.offset - 256
    groups, registers = LANES // size, size * size // LANES

    def rows(w: Wave, register: int) -> np.ndarray:
        lanes = np.ascontiguousarray(w.v[register : register + 2].T).view(np.uint8)
        return _FP8[lanes.reshape(groups, size, 8)].swapaxes(0, 1).reshape(size, depth)

    def run(w: Wave) -> None:
        product = rows(w, a) @ rows(w, b).T
        by_lane = product.reshape(-1, groups, 4, size).swapaxes(1, 2).reshape(registers, LANES)
        before = w.v[c - 256 :][:registers].view(F32) if c >= 256 else vector(c)(w).view(F32)
        w.v[d : d + registers] = (by_lane + before).astype(F32).view(np.uint32)

    return run
