"""Scalar instructions: SOP1, SOP2, SOPC, SOPK, SOPP and SMEM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx942.memory import OutOfBounds
from gfx942.wave import EXEC, Wave, literal_of, scalar, scalar64

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
BARRIER, END = -1, -2

Step = Callable[[Wave], int | None]
"""Runs an instruction: gives None, the index of the next one, BARRIER or END."""


def signed(x: int) -> int:
    return x - 2**32 if x >> 31 else x


def _nonzero(result: int) -> tuple[int, int]:
    return result, int(result != 0)


def _overflow(result: int) -> tuple[int, int]:
    return result & M32, int(not -(2**31) <= result < 2**31)


def _bfe(a: int, b: int) -> tuple[int, int]:
    """Offset in bits 4:0, width in bits 22:16."""
    return _nonzero(a >> (b & 31) & ((1 << min(b >> 16 & 127, 32)) - 1))


def _bfe_signed(a: int, b: int) -> tuple[int, int]:
    width = min(b >> 16 & 127, 32)
    field = signed(a) >> (b & 31) & ((1 << width) - 1)
    if width and field >> width - 1:
        field -= 1 << width
    return _nonzero(field & M32)


def _extreme(pick: Callable[[int, int], int]) -> Callable[[int, int], tuple[int, int]]:
    return lambda a, b: (pick(signed(a), signed(b)) & M32, int(pick(signed(a), signed(b)) == signed(a) != signed(b)))


# Name: (a, b) to (result, SCC), or to (result, None) where SCC stays.
SOP2: dict[str, Callable[[int, int], tuple[int, int | None]]] = {
    "S_ADD_U32": lambda a, b: (a + b & M32, a + b >> 32),
    "S_ADD_I32": lambda a, b: _overflow(signed(a) + signed(b)),
    "S_SUB_I32": lambda a, b: _overflow(signed(a) - signed(b)),
    "S_SUB_U32": lambda a, b: (a - b & M32, int(b > a)),
    "S_MUL_I32": lambda a, b: (a * b & M32, None),
    "S_MUL_HI_U32": lambda a, b: (a * b >> 32, None),
    "S_MUL_HI_I32": lambda a, b: (signed(a) * signed(b) >> 32 & M32, None),
    "S_LSHL2_ADD_U32": lambda a, b: ((a << 2) + b & M32, int((a << 2) + b > M32)),
    "S_MIN_I32": _extreme(min),
    "S_MAX_I32": _extreme(max),
    "S_BFE_U32": _bfe,
    "S_BFE_I32": _bfe_signed,
    "S_AND_B32": lambda a, b: _nonzero(a & b),
    "S_OR_B32": lambda a, b: _nonzero(a | b),
    "S_XOR_B32": lambda a, b: _nonzero(a ^ b),
    "S_ANDN2_B32": lambda a, b: _nonzero(a & ~b & M32),
    "S_LSHL_B32": lambda a, b: _nonzero(a << (b & 31) & M32),
    "S_LSHR_B32": lambda a, b: _nonzero(a >> (b & 31)),
    "S_ASHR_I32": lambda a, b: _nonzero(signed(a) >> (b & 31) & M32),
}

SOP2_64: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "S_AND_B64": lambda a, b: _nonzero(a & b),
    "S_OR_B64": lambda a, b: _nonzero(a | b),
    "S_XOR_B64": lambda a, b: _nonzero(a ^ b),
    "S_ANDN2_B64": lambda a, b: _nonzero(a & ~b & M64),
}

_SHIFTS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "S_LSHL_B64": lambda a, b: _nonzero(a << (b & 63) & M64),
    "S_LSHR_B64": lambda a, b: _nonzero(a >> (b & 63)),
}

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b,
    "LG": lambda a, b: a != b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
}


def sop2(i: Any) -> Step:
    name, d, literal = i.op.name, i.sdst.offset, literal_of(i)
    a0, b0 = i.ssrc0.offset, i.ssrc1.offset
    if name in SOP2:
        fn, a, b = SOP2[name], scalar(a0, literal), scalar(b0, literal)

        def run(w: Wave) -> None:
            value, scc = fn(a(w), b(w))
            w.put(d, value)
            if scc is not None:
                w.scc = scc

        return run
    if name in ("S_ADDC_U32", "S_SUBB_U32"):
        a, b, sign = scalar(a0, literal), scalar(b0, literal), 1 if name == "S_ADDC_U32" else -1

        def carry(w: Wave) -> None:
            total = a(w) + sign * (b(w) + w.scc)
            w.put(d, total)
            w.scc = int(not 0 <= total <= M32)

        return carry
    if name in ("S_CSELECT_B32", "S_CSELECT_B64"):
        wide = name.endswith("64")
        get, put = (scalar64, Wave.put_pair) if wide else (scalar, Wave.put)
        a, b = get(a0, literal), get(b0, literal)
        return lambda w: put(w, d, a(w) if w.scc else b(w))
    wide_fn = SOP2_64.get(name) or _SHIFTS.get(name)
    if wide_fn is None:
        raise NotImplementedError(name)
    a, b = scalar64(a0, literal), (scalar if name in _SHIFTS else scalar64)(b0, literal)

    def run64(w: Wave) -> None:
        value, w.scc = wide_fn(a(w), b(w))
        w.put_pair(d, value)

    return run64


def sop1(i: Any) -> Step:
    name, d, literal, a0 = i.op.name, i.sdst.offset, literal_of(i), i.ssrc0.offset
    if name == "S_MOV_B32":
        a = scalar(a0, literal)
        return lambda w: w.put(d, a(w))
    if name == "S_MOV_B64":
        a = scalar64(a0, literal)
        return lambda w: w.put_pair(d, a(w))
    if name == "S_ABS_I32":
        a = scalar(a0, literal)

        def absolute(w: Wave) -> None:
            value = abs(signed(a(w))) & M32
            w.put(d, value)
            w.scc = int(value != 0)

        return absolute
    saves: dict[str, Callable[[int, int], int]] = {
        "S_AND_SAVEEXEC_B64": lambda x, e: x & e,
        "S_OR_SAVEEXEC_B64": lambda x, e: x | e,
        "S_ANDN2_SAVEEXEC_B64": lambda x, e: x & ~e & M64,
    }
    if name not in saves:
        raise NotImplementedError(name)
    fn, a = saves[name], scalar64(a0, literal)

    def save(w: Wave) -> None:
        before, value = w.pair(EXEC), a(w)
        w.put_pair(d, before)
        w.set_exec(fn(value, before))
        w.scc = int(w.pair(EXEC) != 0)

    return save


def sopc(i: Any) -> Step:
    _, _, test, kind = i.op.name.split("_")
    fn, literal = _COMPARE[test], literal_of(i)
    a, b = scalar(i.ssrc0.offset, literal), scalar(i.ssrc1.offset, literal)
    view = {"I32": signed, "U32": int}[kind]

    def run(w: Wave) -> None:
        w.scc = int(fn(view(a(w)), view(b(w))))

    return run


def sopk(i: Any) -> Step:
    name, d, raw = i.op.name, i.sdst.offset, i.simm16
    simm = raw - 2**16 if raw >> 15 else raw
    if name == "S_MOVK_I32":
        return lambda w: w.put(d, simm)
    if name in ("S_ADDK_I32", "S_MULK_I32"):

        def arithmetic(w: Wave) -> None:
            if name == "S_MULK_I32":
                w.put(d, signed(w.s[d]) * simm)
            else:
                value, w.scc = _overflow(signed(w.s[d]) + simm)
                w.put(d, value)

        return arithmetic
    if name.startswith("S_CMPK_"):
        _, _, test, kind = name.split("_")
        fn = _COMPARE[test]
        if kind == "I32":
            return lambda w: setattr(w, "scc", int(fn(signed(w.s[d]), simm)))
        return lambda w: setattr(w, "scc", int(fn(w.s[d], raw)))
    if name == "S_SETREG_IMM32_B32" and raw & 63 == 1:  # MODE
        low, mask = raw >> 6 & 31, (1 << (raw >> 11) + 1) - 1
        value = literal_of(i) or 0

        def mode(w: Wave) -> None:
            w.mode = w.mode & ~(mask << low) | (value & mask) << low

        return mode
    raise NotImplementedError(name)


def sopp(i: Any, target: int | None) -> Step:
    """``target`` is the index of the instruction that a branch goes to."""
    name = i.op.name
    if name in ("S_NOP", "S_WAITCNT", "S_SLEEP", "S_SETPRIO"):
        return lambda w: None
    if name == "S_BARRIER":
        return lambda w: BARRIER
    if name == "S_ENDPGM":
        return lambda w: END
    conditions: dict[str, Callable[[Wave], bool]] = {
        "S_BRANCH": lambda w: True,
        "S_CBRANCH_SCC0": lambda w: not w.scc,
        "S_CBRANCH_SCC1": lambda w: bool(w.scc),
        "S_CBRANCH_VCCZ": lambda w: w.pair(106) == 0,
        "S_CBRANCH_VCCNZ": lambda w: w.pair(106) != 0,
        "S_CBRANCH_EXECZ": lambda w: w.pair(EXEC) == 0,
        "S_CBRANCH_EXECNZ": lambda w: w.pair(EXEC) != 0,
    }
    if name not in conditions:
        raise NotImplementedError(name)
    condition = conditions[name]
    return lambda w: target if condition(w) else None


def smem(i: Any) -> Step:
    """Loads of arguments, and of values that a whole wave shares."""
    name = i.op.name
    counts = {"S_LOAD_DWORD": 1, "S_LOAD_DWORDX2": 2, "S_LOAD_DWORDX4": 4, "S_LOAD_DWORDX8": 8, "S_LOAD_DWORDX16": 16}
    count, d, base, offset = counts[name], i.sdata.offset, i.sbase.offset, i.offset
    if i.soffset_en or not i.imm or offset >> 20:
        raise NotImplementedError(f"{i}: addressing")

    def run(w: Wave) -> None:
        address = w.pair(base) + offset
        at = address - w.settings.kernarg_address
        if 0 <= at < 2**16:
            data = w.kernarg[at : at + 4 * count]
            if len(data) < 4 * count:
                raise OutOfBounds(f"{name} reads {4 * count} bytes at {at} of {len(w.kernarg)} bytes of arguments")
        else:
            words = np.array([address + 4 * n for n in range(count)], np.uint64)
            data = w.memory.load(words, 4, name).tobytes()
        for n in range(count):
            w.put(d + n, int.from_bytes(data[4 * n : 4 * n + 4], "little"))

    return run
