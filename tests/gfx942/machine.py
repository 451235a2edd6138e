"""Programs, workgroups and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gfx942.code import PRELOAD_ENTRY, Code
from gfx942.memory import Lds, Memory
from gfx942.memory_ops import ds, global_
from gfx942.packed import mfma, packed
from gfx942.scalar import END, Step, smem, sop1, sop2, sopc, sopk, sopp
from gfx942.vector import compare, vop
from gfx942.wave import LANES, Wave

# fp32 and fp16 round to nearest even and keep subnormals; with FP16_OVFL, too, which conversions to fp8 obey.
_MODE, _FP16_OVFL = 0xF0, 1 << 23


@dataclass(frozen=True)
class Settings:
    """What differs between chips, firmware and runs, and must not change a result.

    Attributes:
        preload: firmware puts the first arguments in registers.
        rcp_rounding: of V_RCP_F32, whose last bit is free: 0 to nearest, 1 away from zero, -1 towards it.
        backwards: waves and workgroups run in the reverse order.
    """

    preload: bool = True
    rcp_rounding: int = 0
    backwards: bool = False
    kernarg_address: int = 0x7E00_0000_0000


DEFAULT = Settings()


class Program:
    """A kernel's instructions, ready to run."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._index = {at: n for n, (at, _) in enumerate(code.instructions)}
        self._steps = [self._step(at, instruction) for at, instruction in code.instructions]
        names = {i.op.name for _, i in code.instructions}
        # It obeys FP16_OVFL too, and is written here for the mode without.
        self._modes = {_MODE} if "V_CVT_F16_F32_E32" in names else {_MODE, _MODE | _FP16_OVFL}

    def _step(self, at: int, i: Any) -> Step:
        encoding = type(i).__name__
        if encoding == "SOPP":
            simm = i.simm16 - 2**16 if i.simm16 >> 15 else i.simm16
            return sopp(i, self._index.get(at + 4 + 4 * simm) if "BRANCH" in i.op.name else None)
        if "CMP" in i.op.name and encoding.startswith(("VOPC", "VOP3")):
            return compare(i)
        by_encoding = {
            "SOP1": sop1, "SOP2": sop2, "SOPC": sopc, "SOPK": sopk, "SMEM": smem, "VOP1": vop, "VOP2": vop,
            "VOP3": vop, "VOP3SD": vop, "VOP3P": packed, "VOP3P_MFMA": mfma, "GLOBAL": global_, "DS": ds,
        }  # fmt: skip
        key = encoding if encoding in by_encoding else encoding.rpartition("_")[0]
        if key not in by_encoding:
            raise NotImplementedError(f"{i} at {at:#x}: {encoding}")
        return by_encoding[key](i)

    def launch(
        self, memory: Memory, grid: Sequence[int], threads: int, shared: int, kernarg: bytes, settings: Settings
    ) -> None:
        """Run every workgroup.

        Raises:
            OutOfBounds, OutOfRange: a kernel did what it must not.
            NotImplementedError: it uses what is not known here.
        """
        if tuple(grid[1:]) != (1, 1):
            raise NotImplementedError("a grid of more than one dimension")
        if len(kernarg) != self.code.kernarg_size:
            raise ValueError(f"{len(kernarg)} bytes of arguments, the kernel takes {self.code.kernarg_size}")
        groups = range(grid[0])
        with np.errstate(all="ignore"):
            for group in reversed(groups) if settings.backwards else groups:
                lds = Lds(self.code.lds + shared)
                waves = [self._wave(memory, lds, kernarg, group, n, settings) for n in range(threads // LANES)]
                self._run(waves[::-1] if settings.backwards else waves)

    def _wave(self, memory: Memory, lds: Lds, kernarg: bytes, group: int, number: int, settings: Settings) -> Wave:
        w = Wave(memory, lds, kernarg, self.code.mode, settings)
        w.put_pair(0, settings.kernarg_address)
        if settings.preload:
            for n in range(self.code.preload):
                w.put(2 + n, int.from_bytes(kernarg[4 * n : 4 * n + 4], "little"))
            w.at = self._index[PRELOAD_ENTRY]
        w.put(self.code.user_sgprs, group)
        w.v[0] = np.arange(number * LANES, (number + 1) * LANES, dtype=np.uint32)
        return w

    def _run(self, waves: list[Wave]) -> None:
        """Each wave up to a barrier, then each up to the next, until all have ended, together."""
        while waves:
            stops = {self._until_stop(w) for w in waves}
            if len(stops) > 1:
                raise AssertionError("some waves wait at a barrier and others have ended")
            if stops == {END}:
                return

    def _until_stop(self, w: Wave) -> int:
        at, steps = w.at, self._steps
        while True:
            result = steps[at](w)
            if result is None:
                at += 1
            elif result >= 0:
                at = result
            else:
                w.at = at + 1
                return result
            if w.mode not in self._modes:
                raise NotImplementedError(f"MODE {w.mode:#x}")
