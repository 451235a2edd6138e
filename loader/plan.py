"""A decided launch: everything but the addresses and the stream is settled, so launching again is cheap."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from fp8_aot.loader.driver import Driver, Function, LaunchBuffer
from fp8_aot.loader.schema import Kernel, Pointer, Size, Variant


class Plan:
    """One variant on one device, for one grid and one set of sizes and strides.

    Thread-safe: each launch uses a parameter buffer of its own, taken from a pool.

    Attributes:
        variant: the binary that is launched.
        scratch_bytes: global scratch memory that every launch must be given.
    """

    __slots__ = (
        "_count",
        "_fire",
        "_launcher",
        "_offset",
        "_pack",
        "_pool",
        "_scratch_offset",
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
        count: Callable[[], object],
    ) -> None:
        """Prepare launches.

        Args:
            driver: the driver of the device.
            function: the loaded variant.
            kernel: what the variant is one of.
            variant: the variant.
            values: values of the kernel's sizes and strides, by argument name.
            grid: the launch grid, no dimension 0.
            count: called after each launch.
        """
        self.variant = variant
        self._count = count
        size = max(p.offset + p.size for p in variant.params)
        self._launcher = driver.launcher(function, variant.threads, variant.shared, size, variant.num_ctas)
        self._fire = self._launcher.at(*grid)
        template = bytearray(size)
        pointers = []
        for arg, param in zip(kernel.args, variant.params, strict=False):
            if isinstance(arg, Pointer):
                pointers.append(param.offset)
            else:
                struct.pack_into("<i" if isinstance(arg, Size) else "<q", template, param.offset, values[arg.name])
        self._template = bytes(template)
        # A manifest's pointers lie next to each other, so that one pack fills in all of them.
        self._offset = pointers[0]
        self._pack = struct.Struct(f"<{len(pointers)}Q").pack_into
        blocks = grid[0] * grid[1] * grid[2] * variant.num_ctas
        self.scratch_bytes = variant.global_scratch.size * blocks
        self._scratch_offset = variant.params[len(kernel.args)].offset
        self._pool: list[LaunchBuffer] = []

    def launch(self, pointers: tuple[int, ...], stream: int, scratch: int = 0) -> None:
        """Launch on a stream of the device's current context; ``pointers`` in argument order.

        Raises:
            DriverError: the driver refused the launch.
        """
        pool = self._pool
        try:
            buffer = pool.pop()
        except IndexError:
            buffer = self._new_buffer()
        try:
            self._pack(buffer.data, self._offset, *pointers)
            if scratch:
                struct.pack_into("<Q", buffer.data, self._scratch_offset, scratch)
            self._fire(stream, buffer)
        finally:
            # The driver has copied the parameters, or refused them.
            pool.append(buffer)
        self._count()

    def _new_buffer(self) -> LaunchBuffer:
        buffer = self._launcher.buffer()
        struct.pack_into(f"<{len(self._template)}s", buffer.data, 0, self._template)
        return buffer
