"""The pieces of a launch: a buffer of packed parameters, and the call that hands it to the driver."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from fp8_aot.loader.errors import DriverError

Foreign = Callable[..., Any]
"""A C function of the driver; all but those that return text return an error code, 0 for success."""

ALIGNMENT = 64
"""Alignment of a parameter buffer in bytes: a 128-byte ``CUtensorMap`` parameter asks for it."""

# Both vendors' CU_/HIP_LAUNCH_PARAM_BUFFER_POINTER and _SIZE; the end mark differs.
_BUFFER_POINTER = 1
_BUFFER_SIZE = 2

# A larger grid is beyond every device, and ctypes would wrap it round in silence.
_GRID_BITS = 31


class Function(Struct, frozen=True):
    """A loaded kernel on one device.

    Attributes:
        handle: the ``CUfunction`` or ``hipFunction_t``.
        library: the ``CUlibrary``, ``CUmodule`` or ``hipModule_t`` that holds it.
        ordinal: the driver's ordinal of the device.
        symbol: the kernel's entry symbol.
    """

    handle: int
    library: int
    ordinal: int
    symbol: str


class LaunchBuffer:
    """Parameters of one launch, packed, and what the driver needs to find them.

    The driver copies the parameters during the call, so one buffer serves launch after launch.  It must
    never serve two threads at once: keep a pool.

    Attributes:
        data: the parameters' bytes, 64-byte aligned, zero at first; write them with ``struct.pack_into``.
        config: the bytes of the launch configuration, if the launcher passes one.
        stream: the stream that ``config`` holds, so that another launch on it packs nothing; None if it holds none.
    """

    __slots__ = ("_keep", "config", "config_pointer", "data", "extra_pointer", "stream")

    def __init__(self, size: int, end: int, config: bytes = b"", keep: object = None) -> None:
        """Make a buffer of ``size`` bytes.

        Args:
            size: size of all parameters in bytes, as the kernel declares it.
            end: the driver's mark for the end of the ``extra`` array.
            config: initial launch configuration.
            keep: an object that must live as long as the buffer.

        Raises:
            ValueError: ``size`` is not positive.
        """
        if size < 1:
            raise ValueError(f"params_size is {size}, expected at least 1 byte")
        room = ctypes.create_string_buffer(size + ALIGNMENT - 1)
        offset = -ctypes.addressof(room) % ALIGNMENT
        length = ctypes.c_size_t(size)
        self.data: ctypes.Array[ctypes.c_char] = (ctypes.c_char * size).from_buffer(room, offset)
        self.config: ctypes.Array[ctypes.c_char] = ctypes.create_string_buffer(config, max(len(config), 1))
        self.stream: int | None = None
        self.config_pointer = ctypes.c_void_p(ctypes.addressof(self.config))
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self.data), _BUFFER_SIZE, ctypes.addressof(length), end
        )
        self.extra_pointer = ctypes.c_void_p(ctypes.addressof(extra))
        self._keep = (length, extra, keep)


Fire = Callable[[int, LaunchBuffer], None]
"""Launches on a stream, with a buffer."""


class Failing(Protocol):
    """What a launcher needs of its driver once a launch has failed."""

    def failure(self, what: str, code: int) -> DriverError:
        """The error for a call that returned ``code``."""
        ...


class Launcher(ABC):
    """Launches one function with a fixed block and fixed shared memory.

    Made by ``Driver.launcher``, once per plan; safe to call from many threads, each with its own
    buffer.  The device of the function must be current.
    """

    __slots__ = ("_driver", "_function", "_handle", "_num_ctas", "_params_size", "_shared", "_threads")

    def __init__(
        self,
        driver: Failing,
        function: Function,
        threads: int,
        shared: int,
        params_size: int,
        num_ctas: int = 1,
    ) -> None:
        """Prepare launches of ``function``.

        Args:
            driver: the driver that loaded the function.
            function: what to launch.
            threads: threads per block, all in x.
            shared: dynamic shared memory per block in bytes.
            params_size: size of all parameters in bytes.
            num_ctas: blocks per cluster, all in x; a grid then counts clusters in x.

        Raises:
            ValueError: a number is out of range.
        """
        for name, value, low in (
            ("threads", threads, 1),
            ("shared", shared, 0),
            ("params_size", params_size, 1),
            ("num_ctas", num_ctas, 1),
        ):
            if not low <= value < 1 << _GRID_BITS:
                raise ValueError(f"{name} is {value}, expected {low} to {(1 << _GRID_BITS) - 1}")
        self._driver = driver
        self._function = function
        self._handle = ctypes.c_void_p(function.handle)
        self._threads = threads
        self._shared = shared
        self._params_size = params_size
        self._num_ctas = num_ctas

    @abstractmethod
    def buffer(self) -> LaunchBuffer:
        """A new buffer for launches by this launcher, and by no launcher of another parameter size."""

    @abstractmethod
    def at(self, gx: int, gy: int, gz: int) -> Fire:
        """What launches a grid of ``gx * num_ctas`` x ``gy`` x ``gz`` blocks, asynchronously, again and again.

        It is called with a stream's handle and a buffer, which no launch of another grid may have used.  It is a
        closure, since reading a closure's variables costs Python less than reading attributes.  Every grid
        dimension is at least 1: drivers refuse an empty grid.

        Raises:
            ValueError: a grid dimension is out of range.

        What is returned raises:
            DriverError: the driver refused; ``code`` is its error code, on CUDA 201 if the thread has no
                context.
        """

    def __call__(self, gx: int, gy: int, gz: int, stream: int, buffer: LaunchBuffer) -> None:
        """Launch once, with any buffer of this launcher.

        Raises:
            DriverError, ValueError: as ``at`` and what it returns.
        """
        buffer.stream = None
        self.at(gx, gy, gz)(stream, buffer)

    def _failure(self, gx: int, gy: int, gz: int, code: int) -> DriverError:
        function = self._function
        cluster = f", clusters of {self._num_ctas}" if self._num_ctas > 1 else ""
        return self._driver.failure(
            f"launch of {function.symbol} on device {function.ordinal} with grid "
            f"({gx * self._num_ctas}, {gy}, {gz}), block ({self._threads}, 1, 1){cluster} "
            f"and {self._shared} bytes of dynamic shared memory",
            code,
        )

    def _bad_grid(self, gx: int, gy: int, gz: int) -> ValueError:
        return ValueError(
            f"grid of {self._function.symbol} is ({gx * self._num_ctas}, {gy}, {gz}), "
            f"expected integers from 1 to {(1 << _GRID_BITS) - 1}"
        )


class ArgumentLauncher(Launcher):
    """Launches through ``cuLaunchKernel`` or ``hipModuleLaunchKernel``: everything is an argument."""

    __slots__ = ("_end", "_launch", "_one", "_shared_argument", "_threads_argument")

    def __init__(
        self,
        driver: Failing,
        function: Function,
        threads: int,
        shared: int,
        params_size: int,
        *,
        launch: Foreign,
        end: int,
    ) -> None:
        """Prepare launches through ``launch``; ``end`` closes its ``extra`` array."""
        super().__init__(driver, function, threads, shared, params_size)
        self._launch = launch
        self._end = end
        # ctypes passes its own objects on faster than it converts integers.
        self._one = ctypes.c_uint(1)
        self._threads_argument = ctypes.c_uint(threads)
        self._shared_argument = ctypes.c_uint(shared)

    def buffer(self) -> LaunchBuffer:
        return LaunchBuffer(self._params_size, self._end)

    def at(self, gx: int, gy: int, gz: int) -> Fire:
        if (gx | gy | gz) >> _GRID_BITS:
            raise self._bad_grid(gx, gy, gz)
        launch, handle, one = self._launch, self._handle, self._one
        threads, shared = self._threads_argument, self._shared_argument

        def fire(stream: int, buffer: LaunchBuffer) -> None:
            if code := launch(handle, gx, gy, gz, threads, one, one, shared, stream, None, buffer.extra_pointer):
                raise self._failure(gx, gy, gz, code)

        return fire
