"""A decided launch: everything but the addresses and the stream is settled, so launching again is cheap."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from fp8_aot.loader.driver import Driver, Function, LaunchBuffer
from fp8_aot.loader.schema import Kernel, Pointer, Size, Variant


class _Slot:
    """A parameter buffer and how often it was launched with."""

    __slots__ = ("buffer", "launches")

    def __init__(self, buffer: LaunchBuffer) -> None:
        self.buffer = buffer
        self.launches = 0


class Plan:
    """One variant on one device, for one grid and one set of sizes and strides.

    Thread-safe: each launch uses a parameter buffer of its own, taken from a pool.

    Attributes:
        variant: the binary that is launched.
        scratch_bytes: global scratch memory that every launch must be given.
    """

    __slots__ = (
        "_grid",
        "_launcher",
        "_offset",
        "_pack",
        "_pool",
        "_scratch_offset",
        "_size",
        "_slots",
        "_template",
        "scratch_bytes",
        "variant",
    )

    def __init__(
        self,
        driver: Driver,
        function: Function,
        kernel: Kernel,
        variant: Variant,
        values: Mapping[str, int],
        grid: tuple[int, int, int],
    ) -> None:
        self.variant = variant
        self._grid = grid
        self._size = max(p.offset + p.size for p in variant.params)
        self._launcher = driver.launcher(function, variant.threads, variant.shared, self._size, variant.num_ctas)
        template = bytearray(self._size)
        pointers = []
        for arg, param in zip(kernel.args, variant.params, strict=False):
            if isinstance(arg, Pointer):
                pointers.append(param.offset)
            else:
                struct.pack_into("<i" if isinstance(arg, Size) else "<q", template, param.offset, values[arg.name])
        self._template = bytes(template)
        # Kernels take their pointers first and together, so that one pack fills in all of them.
        self._offset = pointers[0]
        if pointers != [pointers[0] + 8 * i for i in range(len(pointers))]:
            raise ValueError(f"{variant.id}: pointer arguments are not next to each other: {pointers}")
        self._pack = struct.Struct(f"<{len(pointers)}Q").pack_into
        blocks = grid[0] * grid[1] * grid[2] * variant.num_ctas
        self.scratch_bytes = variant.global_scratch.size * blocks
        self._scratch_offset = variant.params[len(kernel.args)].offset
        self._pool: list[_Slot] = []
        self._slots: list[_Slot] = []

    def launch(self, pointers: tuple[int, ...], stream: int, scratch: int = 0) -> None:
        """Launch on a stream of the device's current context; ``pointers`` in argument order.

        Raises:
            DriverError: the driver refused the launch.
        """
        pool = self._pool
        try:
            slot = pool.pop()
        except IndexError:
            slot = self._new_slot()
        buffer = slot.buffer
        self._pack(buffer.data, self._offset, *pointers)
        if scratch:
            struct.pack_into("<Q", buffer.data, self._scratch_offset, scratch)
        x, y, z = self._grid
        self._launcher(x, y, z, stream, buffer)
        slot.launches += 1
        pool.append(slot)

    @property
    def launches(self) -> int:
        """How many launches there were.  Each slot counts its own: only one thread uses it at a time."""
        return sum(slot.launches for slot in list(self._slots))

    def _new_slot(self) -> _Slot:
        slot = _Slot(self._launcher.buffer())
        struct.pack_into(f"<{self._size}s", slot.buffer.data, 0, self._template)
        self._slots.append(slot)
        return slot
