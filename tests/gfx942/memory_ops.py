"""Loads and stores: GLOBAL and DS."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx942.scalar import Step
from gfx942.wave import LANES, Wave

_SIZES = {"UBYTE": 1, "BYTE": 1, "USHORT": 2, "SHORT": 2, "DWORD": 4, "DWORDX2": 8, "DWORDX3": 12, "DWORDX4": 16}
_OFF = 0x7F


def _load(w: Wave, d: int, data: np.ndarray) -> None:
    """Put (active lanes, bytes) into registers, bytes and shorts extended by zeros."""
    if data.shape[1] < 4:
        data = np.pad(data, ((0, 0), (0, 4 - data.shape[1])))
    words = np.ascontiguousarray(data).view(np.uint32)
    for n in range(words.shape[1]):
        w.v[d + n, w.active] = words[:, n]


def _stored(w: Wave, register: int, size: int, high: bool) -> np.ndarray:
    """(active lanes, bytes) out of registers; ``high`` takes them from bit 16 on."""
    words = w.v[register : register + max(size // 4, 1), w.active]
    data = np.ascontiguousarray(words.T).view(np.uint8)
    return data[:, 2 : 2 + size] if high else data[:, :size]


def global_(i: Any) -> Step:
    name = i.op.name
    found = re.fullmatch(r"GLOBAL_(LOAD|STORE)_(\w+?)(_D16_HI)?", name)
    if not found or found[2] not in _SIZES or i.acc or (found[1] == "LOAD" and found[3]):
        raise NotImplementedError(name)
    size, high = _SIZES[found[2]], bool(found[3])
    at, d, data = i.addr.offset - 256, i.vdst.offset - 256, i.data.offset - 256
    offset = i.offset - 2**13 if i.offset >> 12 else i.offset
    base = i._raw >> 48 & 0x7F

    def addresses(w: Wave) -> np.ndarray:
        low = w.v[at, w.active].astype(np.uint64)
        if base == _OFF:
            return low + (w.v[at + 1, w.active].astype(np.uint64) << np.uint64(32)) + np.uint64(offset % 2**64)
        return low + np.uint64((w.pair(base) + offset) % 2**64)

    if found[1] == "LOAD":
        return lambda w: _load(w, d, w.memory.load(addresses(w), size, name)) if w.active.any() else None
    return lambda w: w.memory.store(addresses(w), _stored(w, data, size, high), name) if w.active.any() else None


def _bpermute(i: Any) -> Step:
    at, data, d, offset = i.addr.offset - 256, i.data0.offset - 256, i.vdst.offset - 256, i.offset1 << 8 | i.offset0

    def run(w: Wave) -> None:
        lanes = (w.v[at] + np.uint32(offset)) // 4 % LANES
        w.write(d, np.where(w.active[lanes], w.v[data][lanes], np.uint32(0)))

    return run


def ds(i: Any) -> Step:
    name = i.op.name
    if name == "DS_BPERMUTE_B32":
        return _bpermute(i)
    found = re.fullmatch(r"DS_(READ|WRITE)(2?)(ST64)?_[BU](\d+)(_D16_HI)?", name)
    if not found or i.acc or i.gds or (found[1] == "READ" and found[5]):
        raise NotImplementedError(name)
    size, high = int(found[4]) // 8, bool(found[5])
    at, d = i.addr.offset - 256, i.vdst.offset - 256
    unit = size * (64 if found[3] else 1)
    offsets = (i.offset0 * unit, i.offset1 * unit) if found[2] else (i.offset1 << 8 | i.offset0,)
    sources = (i.data0.offset - 256, i.data1.offset - 256)

    def read(w: Wave) -> None:
        address = w.v[at, w.active].astype(np.int64)
        parts = [w.lds.load(address + o, size, name) for o in offsets]
        _load(w, d, np.concatenate(parts, axis=1))

    def write(w: Wave) -> None:
        address = w.v[at, w.active].astype(np.int64)
        for o, source in zip(offsets, sources, strict=False):
            w.lds.store(address + o, _stored(w, source, size, high), name)

    run: Callable[[Wave], None] = read if found[1] == "READ" else write
    return lambda w: run(w) if w.active.any() else None
