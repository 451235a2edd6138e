"""Vector instructions: VOP1, VOP2, VOP3, VOPC, with SDWA and DPP."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx942 import arithmetic
from gfx942.arithmetic import F32, I32, U32
from gfx942.scalar import Step
from gfx942.wave import (
    LANES,
    VCC,
    Vector,
    Wave,
    literal_of,
    put64,
    scalar,
    scalar64,
    to_lanes,
    to_mask,
    vector,
    vector64,
)  # fmt: skip

F16 = np.float16
U16 = U32(0xFFFF)


def _shift(x: np.ndarray) -> np.ndarray:
    return x & U32(31)


def _bfe(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a >> _shift(b) & ((U32(1) << _shift(c)) - U32(1))


def _bfe_signed(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    field, width = _bfe(a, b, c), _shift(c)
    unused = (U32(32) - width) & U32(31)
    return np.where(width == 0, U32(0), ((field << unused).view(I32) >> unused.view(I32)).view(U32))


def _max3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.maximum(np.maximum(a, b), c)


Function = Callable[..., np.ndarray]

# Name: types of the operands (u32, i32, f32, f16), and what is done to them.
OPS: dict[str, tuple[str, Function]] = {
    "V_MOV_B32": ("u", lambda a: a),
    "V_ADD_U32": ("uu", operator.add),
    "V_SUB_U32": ("uu", operator.sub),
    "V_SUBREV_U32": ("uu", lambda a, b: b - a),
    "V_AND_B32": ("uu", operator.and_),
    "V_OR_B32": ("uu", operator.or_),
    "V_XOR_B32": ("uu", operator.xor),
    "V_NOT_B32": ("u", operator.invert),
    "V_LSHLREV_B32": ("uu", lambda a, b: b << _shift(a)),
    "V_LSHRREV_B32": ("uu", lambda a, b: b >> _shift(a)),
    "V_ASHRREV_I32": ("ui", lambda a, b: b >> _shift(a).view(I32)),
    # 16-bit results have zeros above them.
    "V_LSHLREV_B16": ("uu", lambda a, b: b << (a & U32(15)) & U16),
    "V_LSHRREV_B16": ("uu", lambda a, b: (b & U16) >> (a & U32(15))),
    "V_MAX_I32": ("ii", np.maximum),
    "V_MIN_I32": ("ii", np.minimum),
    "V_MAX_U32": ("uu", np.maximum),
    "V_MIN_U32": ("uu", np.minimum),
    "V_MAX3_I32": ("iii", _max3),
    "V_MAX3_U32": ("uuu", _max3),
    "V_ADD3_U32": ("uuu", lambda a, b, c: a + b + c),
    "V_XAD_U32": ("uuu", lambda a, b, c: (a ^ b) + c),
    "V_LSHL_ADD_U32": ("uuu", lambda a, b, c: (a << _shift(b)) + c),
    "V_ADD_LSHL_U32": ("uuu", lambda a, b, c: a + b << _shift(c)),
    "V_LSHL_OR_B32": ("uuu", lambda a, b, c: a << _shift(b) | c),
    "V_AND_OR_B32": ("uuu", lambda a, b, c: a & b | c),
    "V_OR3_B32": ("uuu", lambda a, b, c: a | b | c),
    "V_BFE_U32": ("uuu", _bfe),
    "V_BFE_I32": ("uuu", _bfe_signed),
    "V_BFI_B32": ("uuu", lambda a, b, c: a & b | ~a & c),
    "V_PERM_B32": ("uuu", arithmetic.perm),
    "V_MUL_LO_U32": ("uu", operator.mul),
    "V_MUL_HI_U32": ("uu", lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(U32)),
    "V_MUL_F32": ("ff", operator.mul),
    "V_ADD_F32": ("ff", operator.add),
    "V_SUB_F32": ("ff", operator.sub),
    "V_SUBREV_F32": ("ff", lambda a, b: b - a),
    "V_FMA_F32": ("fff", arithmetic.fma),
    "V_MED3_F32": ("fff", arithmetic.med3),
    "V_DIV_FIXUP_F32": ("fff", arithmetic.div_fixup),
    "V_CVT_F32_F16": ("h", lambda a: a.astype(F32)),
    "V_CVT_F16_F32": ("f", lambda a: a.astype(F16)),
    "V_CVT_F32_U32": ("u", lambda a: a.astype(F32)),
    "V_CVT_F32_I32": ("i", lambda a: a.astype(F32)),
    "V_CVT_U32_F32": ("f", lambda a: np.clip(np.nan_to_num(a.astype(float)), 0, 2**32 - 1).astype(U32)),
    "V_PACK_B32_F16": ("uu", lambda a, b: (b & U16) << U32(16) | a & U16),
}

_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "EQ": operator.eq, "NE": operator.ne, "LG": operator.ne, "GT": operator.gt, "GE": operator.ge,
    "LT": operator.lt, "LE": operator.le, "NEQ": operator.ne,
    "O": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "U": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


def _typed(get: Vector, kind: str, neg: bool = False, absolute: bool = False, high: bool = False) -> Vector:
    """An operand in its type, with its modifiers."""
    if kind in "ui":
        if neg or absolute:
            raise NotImplementedError("modifiers of an integer")
        if high:
            return lambda w: get(w) >> U32(16)
        return get if kind == "u" else lambda w: get(w).view(I32)

    def value(w: Wave) -> np.ndarray:
        x = get(w)
        x = (x >> U32(16) if high else x & U16).astype(np.uint16).view(F16) if kind == "h" else x.view(F32)
        x = np.abs(x) if absolute else x
        return -x if neg else x

    if kind == "f" and not (neg or absolute):
        return lambda w: get(w).view(F32)
    return value


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16).astype(U32) if x.dtype == F16 else x.view(U32)


def _refuse(i: Any, *names: str) -> None:
    for name in names:
        if getattr(i, name, 0):
            raise NotImplementedError(f"{i}: {name}")


def _select(get: Vector, sel: int, sext: int) -> Vector:
    """A byte, a word or all of an operand (SDWA)."""
    if sel == 6:
        return get
    low, bits = (8 * sel, 8) if sel < 4 else (16 * (sel - 4), 16)
    mask, unused = U32((1 << bits) - 1), 32 - bits
    if sext:
        return lambda w: ((get(w) >> U32(low) << U32(unused)).view(I32) >> I32(unused)).view(U32)
    return lambda w: get(w) >> U32(low) & mask


def _dpp_lanes(control: int) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the one that it reads from, and whether that exists."""
    lane = np.arange(LANES)
    row, at = lane & ~15, lane & 15
    every = np.ones(LANES, bool)
    if control < 0x100:
        return (lane & ~3) + (control >> 2 * (lane & 3) & 3), every
    n = control & 15
    if 0x101 <= control <= 0x10F:
        return row + (at + n & 15), at + n < 16
    if 0x111 <= control <= 0x11F:
        return row + (at - n & 15), at >= n
    if 0x121 <= control <= 0x12F:
        return row + (at - n & 15), every
    if control == 0x140:
        return row + 15 - at, every
    if control == 0x141:
        return lane ^ 7, every
    if control == 0x142:
        return np.maximum(row - 1, 0), lane >= 16
    if control == 0x143:
        return np.full(LANES, 31), lane >= 32
    if 0x150 <= control <= 0x15F:
        return row + n, every
    raise NotImplementedError(f"DPP control {control:#x}")


def vop(i: Any) -> Step:
    """VOP1, VOP2 and VOP3, in any encoding."""
    encoding = type(i).__name__
    name = i.op.name.removesuffix("_E32").removesuffix("_E64")
    if name in _SPECIAL:
        return _SPECIAL[name](i)
    _refuse(i, "clmp", "omod")
    kinds: str
    fn: Function | None
    if name == "V_FMAC_F32":
        kinds, fn = "fff", arithmetic.fma
    elif name == "V_RCP_F32":
        kinds, fn = "f", None
    elif name == "V_CNDMASK_B32":
        kinds, fn = "uu", None
    elif name in OPS:
        kinds, fn = OPS[name]
    else:
        raise NotImplementedError(f"{name} in {encoding}")
    operands, put = _operands(i, encoding, kinds)
    if name == "V_FMAC_F32":
        d = i.vdst.offset
        operands.append(_typed(vector(d), "f"))
    if name == "V_RCP_F32":
        (x,) = operands
        return lambda w: put(w, _bits(arithmetic.rcp(x(w), w.settings.rcp_rounding)))
    if name == "V_CNDMASK_B32":
        a, b = operands
        mask = scalar64(i.src2.offset if encoding == "VOP3" else VCC)
        return lambda w: put(w, np.where(to_lanes(mask(w)), b(w), a(w)))
    assert fn is not None
    if len(operands) == 1:
        (a,) = operands
        return lambda w: put(w, _bits(fn(a(w))))
    if len(operands) == 2:
        a, b = operands
        return lambda w: put(w, _bits(fn(a(w), b(w))))
    a, b, c = operands
    return lambda w: put(w, _bits(fn(a(w), b(w), c(w))))


def _operands(i: Any, encoding: str, kinds: str) -> tuple[list[Vector], Callable[[Wave, np.ndarray], None]]:
    """The operands in their types, and what writes the result."""
    d, literal = i.vdst.offset - 256, literal_of(i)

    def write(w: Wave, values: np.ndarray) -> None:
        w.write(d, values)

    if encoding == "VOP3":
        codes = [i.src0.offset, i.src1.offset, i.src2.offset][: len(kinds)]
        if i.opsel >> len(kinds):
            raise NotImplementedError(f"{i}: opsel")
        return [
            _typed(vector(code, half=kind == "h"), kind, i.neg >> n & 1, i.abs >> n & 1, bool(i.opsel >> n & 1))
            for n, (code, kind) in enumerate(zip(codes, kinds, strict=True))
        ], write
    second = [vector(i.vsrc1.offset)] if hasattr(i, "vsrc1") else []
    if encoding.endswith("_DPP16"):
        _refuse(i, "src0_neg", "src0_abs", "src1_neg", "src1_abs")
        return _dpp(i, d, second, kinds)
    if encoding.endswith("_SDWA"):
        return _sdwa(i, d, kinds)
    first = vector(i.src0.offset, literal, half="h" in kinds)
    return [_typed(get, kind) for get, kind in zip([first, *second], kinds, strict=False)], write


def _dpp(i: Any, d: int, second: list[Vector], kinds: str) -> tuple[list[Vector], Callable[[Wave, np.ndarray], None]]:
    lanes, exists = _dpp_lanes(i.dpp)
    register = i.vsrc0.offset - 256
    lane = np.arange(LANES)
    enabled = (i.row_mask >> lane // 16 & 1 != 0) & (i.bank_mask >> lane % 16 // 4 & 1 != 0)

    def first(w: Wave) -> np.ndarray:
        # Lanes that are off cannot be read either.
        return np.where(exists & w.active[lanes], w.v[register][lanes], U32(0))

    def write(w: Wave, values: np.ndarray) -> None:
        where = w.active & enabled
        if not i.bc:
            where &= exists & w.active[lanes]
        np.copyto(w.v[d], values, where=where)

    return [_typed(get, kind) for get, kind in zip([first, *second], kinds, strict=False)], write


def _sdwa(i: Any, d: int, kinds: str) -> tuple[list[Vector], Callable[[Wave, np.ndarray], None]]:
    def source(n: int, code: int) -> Vector:
        # A flag says that the register's number is a scalar register's.
        get = vector(code - 256 if getattr(i, f"s{n}") else code)
        chosen = _select(get, getattr(i, f"src{n}_sel"), getattr(i, f"src{n}_sext"))
        return _typed(chosen, kinds[n], getattr(i, f"src{n}_neg"), getattr(i, f"src{n}_abs"))

    operands = [source(0, i.vsrc0.offset)]
    if len(kinds) > 1:
        operands.append(source(1, i.vsrc1.offset))
    sel, unused = i.dst_sel, i.dst_unused
    low, bits = (0, 32) if sel == 6 else (8 * sel, 8) if sel < 4 else (16 * (sel - 4), 16)
    mask = U32(((1 << bits) - 1) << low)
    if unused == 1 and sel != 6:
        raise NotImplementedError(f"{i}: sign extension of the result")

    def write(w: Wave, values: np.ndarray) -> None:
        placed = values << U32(low) & mask
        w.write(d, placed | w.v[d] & ~mask if unused == 2 else placed)

    return operands, write


def compare(i: Any) -> Step:
    """VOPC, and its form in VOP3 whose result is any pair of scalar registers."""
    _, kind, test, of = i.op.name.removesuffix("_E32").removesuffix("_E64").split("_")
    if kind != "CMP":
        raise NotImplementedError(i.op.name)
    letter = {"F32": "f", "F16": "h", "I32": "i", "U32": "u"}[of]
    fn = _COMPARE[test]
    encoding = type(i).__name__
    if encoding == "VOP3_SDST":
        _refuse(i, "clmp", "omod", "opsel")
        codes, d = (i.src0.offset, i.src1.offset), i.vdst.offset
        a, b = (_typed(vector(c), letter, i.neg >> n & 1, i.abs >> n & 1) for n, c in enumerate(codes))
    elif encoding in ("VOPC", "VOPC_LIT"):
        a, b = (_typed(vector(c, literal_of(i)), letter) for c in (i.src0.offset, i.vsrc1.offset))
        d = VCC
    else:
        raise NotImplementedError(encoding)
    return lambda w: w.put_pair(d, to_mask(np.broadcast_to(fn(a(w), b(w)), (LANES,)) & w.active))


def _cvt_pk_fp8(i: Any) -> Step:
    _refuse(i, "clmp", "omod")
    d, high = i.vdst.offset - 256, i.opsel == 8
    if i.opsel not in (0, 8):
        raise NotImplementedError(f"{i}: opsel")
    a, b = (
        _typed(vector(c), "f", i.neg >> n & 1, i.abs >> n & 1) for n, c in enumerate((i.src0.offset, i.src1.offset))
    )

    def run(w: Wave) -> None:
        low, up = (arithmetic.to_fp8(np.broadcast_to(x(w), (LANES,)), w.active) for x in (a, b))
        both = up << U32(8) | low
        w.write(d, both << U32(16) | w.v[d] & U16 if high else both | w.v[d] & ~U16)

    return run


def _readlane(i: Any) -> Step:
    register, d = i.src0.offset - 256, i.vdst.offset - 256
    lane = scalar(i.src1.offset)
    return lambda w: w.put(d, int(w.v[register][lane(w) & 63]))


def _readfirstlane(i: Any) -> Step:
    register, d = i.src0.offset - 256, i.vdst.offset - 256
    return lambda w: w.put(d, int(w.v[register][int(np.argmax(w.active))]))


def _three_floats(i: Any) -> list[Vector]:
    _refuse(i, "clmp", "omod", "abs")
    return [_typed(vector(c), "f", i.neg >> n & 1) for n, c in enumerate((i.src0.offset, i.src1.offset, i.src2.offset))]


def _div_scale(i: Any) -> Step:
    a, b, c = _three_floats(i)
    d, flags = i.vdst.offset - 256, i.sdst.offset

    def run(w: Wave) -> None:
        value, undo = arithmetic.div_scale(a(w), b(w), c(w))
        w.write(d, _bits(value))
        w.put_pair(flags, to_mask(np.broadcast_to(undo, (LANES,)) & w.active))

    return run


def _div_fmas(i: Any) -> Step:
    a, b, c = _three_floats(i)
    d = i.vdst.offset - 256
    return lambda w: w.write(d, _bits(arithmetic.div_fmas(a(w), b(w), c(w), to_lanes(w.pair(VCC)))))


def _mad_u64(i: Any) -> Step:
    a, b, c = vector(i.src0.offset), vector(i.src1.offset), vector64(i.src2.offset)
    d, carry = i.vdst.offset - 256, i.sdst.offset

    def run(w: Wave) -> None:
        product = a(w).astype(np.uint64) * b(w)
        total = np.broadcast_to(product + c(w), (LANES,))
        put64(w, d, total)
        w.put_pair(carry, to_mask(np.broadcast_to(total < product, (LANES,)) & w.active))

    return run


def _lshl_add_u64(i: Any) -> Step:
    a, b, c, d = vector64(i.src0.offset), vector(i.src1.offset), vector64(i.src2.offset), i.vdst.offset - 256
    return lambda w: put64(w, d, np.broadcast_to((a(w) << (b(w) & U32(7)).astype(np.uint64)) + c(w), (LANES,)))


def _lshlrev_b64(i: Any) -> Step:
    a, b, d = vector(i.src0.offset), vector64(i.src1.offset), i.vdst.offset - 256
    return lambda w: put64(w, d, np.broadcast_to(b(w) << (a(w) & U32(63)).astype(np.uint64), (LANES,)))


def _mov_b64(i: Any) -> Step:
    a, d = vector64(i.src0.offset, literal_of(i)), i.vdst.offset - 256
    return lambda w: put64(w, d, np.broadcast_to(a(w), (LANES,)))


_SPECIAL: dict[str, Callable[[Any], Step]] = {
    "V_CVT_PK_FP8_F32": _cvt_pk_fp8,
    "V_READLANE_B32": _readlane,
    "V_READFIRSTLANE_B32": _readfirstlane,
    "V_DIV_SCALE_F32": _div_scale,
    "V_DIV_FMAS_F32": _div_fmas,
    "V_MAD_U64_U32": _mad_u64,
    "V_LSHL_ADD_U64": _lshl_add_u64,
    "V_LSHLREV_B64": _lshlrev_b64,
    "V_MOV_B64": _mov_b64,
}
