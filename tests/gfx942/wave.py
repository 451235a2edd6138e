"""A wave's registers, and how instructions name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx942.memory import Lds, Memory

LANES = 64
VCC, M0, EXEC = 106, 124, 126
_VGPR = 256

# Float constants, as bits of fp32 and of fp16.
_FLOATS = {
    240: (0x3F000000, 0x3800), 241: (0xBF000000, 0xB800), 242: (0x3F800000, 0x3C00), 243: (0xBF800000, 0xBC00),
    244: (0x40000000, 0x4000), 245: (0xC0000000, 0xC000), 246: (0x40800000, 0x4400), 247: (0xC0800000, 0xC400),
    248: (0x3E22F983, 0x3118),
}  # fmt: skip

Vector = Callable[["Wave"], np.ndarray]
"""Gives an operand of all lanes: (64,), or (1,) where they share it."""

Scalar = Callable[["Wave"], int]


class Wave:
    """64 lanes: vector registers (256, 64), scalar registers, and what they can reach."""

    def __init__(self, memory: Memory, lds: Lds, kernarg: bytes, mode: int, settings: Any) -> None:
        self.memory, self.lds, self.kernarg, self.mode, self.settings = memory, lds, kernarg, mode, settings
        # Nobody may count on a register that nothing wrote.
        self.v = np.full((_VGPR, LANES), 0xDEAD_BEEF, np.uint32)
        self.s = [0xDEAD_BEEF] * 128
        self.scc = 0
        self.at = 0
        self.set_exec(2**LANES - 1)

    def set_exec(self, mask: int) -> None:
        self.s[EXEC], self.s[EXEC + 1] = mask & 0xFFFFFFFF, mask >> 32
        self.active = to_lanes(mask)
        self.all_active = mask == 2**LANES - 1

    def pair(self, register: int) -> int:
        return self.s[register] | self.s[register + 1] << 32

    def put(self, register: int, value: int) -> None:
        """Write 32 bits of a scalar register."""
        self.s[register] = value & 0xFFFFFFFF
        if register in (EXEC, EXEC + 1):
            self.set_exec(self.pair(EXEC))

    def put_pair(self, register: int, value: int) -> None:
        """Write 64 bits of scalar registers."""
        if register == EXEC:
            self.set_exec(value)
        else:
            self.s[register], self.s[register + 1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF

    def write(self, register: int, values: np.ndarray) -> None:
        """Write a vector register in the active lanes."""
        np.copyto(self.v[register], values, where=self.active)


def to_lanes(mask: int) -> np.ndarray:
    """A 64-bit mask as 64 booleans."""
    return np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little").view(bool)


def to_mask(lanes: np.ndarray) -> int:
    """64 booleans as a mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def literal_of(instruction: Any) -> int | None:
    literal: int | None = instruction._literal
    return literal


def _constant(code: int, literal: int | None, *, half: bool = False) -> int | None:
    """The value of an operand that is a constant, signed if it is a small integer."""
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return 192 - code
    if code in _FLOATS:
        return _FLOATS[code][half]
    return literal if code == 255 else None


def vgpr(code: int) -> int:
    """The number of a vector register."""
    if code < _VGPR:
        raise NotImplementedError(f"operand {code} is not a vector register")
    return code - _VGPR


def scalar(code: int, literal: int | None = None) -> Scalar:
    """A 32-bit scalar operand."""
    constant = _constant(code, literal)
    if constant is not None:
        value = constant & 0xFFFFFFFF
        return lambda w: value
    if code == 253:
        return lambda w: w.scc
    if code >= 128:
        raise NotImplementedError(f"scalar operand {code}")
    return lambda w: w.s[code]


def scalar64(code: int, literal: int | None = None) -> Scalar:
    """A 64-bit scalar operand; a literal is extended with its sign, a float constant refused."""
    if code in _FLOATS:
        raise NotImplementedError("a 64-bit float constant")
    constant = _constant(code, literal)
    if constant is not None:
        signed = constant - 2**32 if constant >= 2**31 else constant
        value = signed & 0xFFFF_FFFF_FFFF_FFFF
        return lambda w: value
    if code >= 128:
        raise NotImplementedError(f"scalar operand {code}")
    return lambda w: w.pair(code)


def vector(code: int, literal: int | None = None, *, half: bool = False) -> Vector:
    """A 32-bit operand of a vector instruction, as uint32."""
    if code >= _VGPR:
        register = code - _VGPR
        return lambda w: w.v[register]
    constant = _constant(code, literal, half=half)
    if constant is not None:
        value = np.array([constant & 0xFFFFFFFF], np.uint32)
        return lambda w: value
    get = scalar(code)
    return lambda w: np.array([get(w)], np.uint32)


def vector64(code: int, literal: int | None = None) -> Vector:
    """A 64-bit operand of a vector instruction, as uint64."""
    if code >= _VGPR:
        register = code - _VGPR
        return lambda w: w.v[register] | w.v[register + 1].astype(np.uint64) << np.uint64(32)
    get = scalar64(code, literal)
    return lambda w: np.array([get(w)], np.uint64)


def put64(w: Wave, register: int, values: np.ndarray) -> None:
    """Write a pair of vector registers in the active lanes."""
    w.write(register, values.astype(np.uint32))
    w.write(register + 1, (values >> np.uint64(32)).astype(np.uint32))
