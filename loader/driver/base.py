"""What a GPU driver offers the loader, and the part of it that is the same for every vendor."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from msgspec import Struct, field

from fp8_aot.loader.driver.launch import Foreign, Function, Launcher
from fp8_aot.loader.errors import DriverError

Backend = Literal["cuda", "hip"]


class Device(Struct, frozen=True):
    """A GPU that the driver shows to this process.

    Attributes:
        ordinal: the driver's number for it, after ``CUDA_VISIBLE_DEVICES`` and its like.
        name: the marketing name.
        arch: ``"90"`` for compute capability 9.0, ``"gfx942"`` on AMD.
        features: AMD's target features, such as ``("sramecc+", "xnack-")``; empty on NVIDIA.
        warp_size: threads per warp.
        max_shared: the most dynamic shared memory a block can have, in bytes.
        multiprocessors: number of multiprocessors (compute units).
    """

    ordinal: int
    name: str
    arch: str
    features: tuple[str, ...]
    warp_size: int
    max_shared: int
    multiprocessors: int


class _Image(Struct):
    """A library that the driver holds for this process, and how many loads stand on it."""

    key: tuple[int | None, bytes]
    handle: int
    users: int = 0
    opted_in: dict[int, int] = field(default_factory=dict)  # function handle to bytes of shared memory


def bind(
    library: object,
    signatures: Mapping[str, tuple[Any, ...]],
    needed: str,
    optional: frozenset[str] = frozenset(),
    text: frozenset[str] = frozenset(),
) -> dict[str, Foreign]:
    """The C functions of an opened library, their argument types set.

    Args:
        library: what ``ctypes.CDLL`` returned, or a stand-in with functions as attributes.
        signatures: argument types by function name.
        needed: the oldest driver with all functions that are not optional, for the error message.
        optional: the functions that an old driver may lack; they are then left out.
        text: the functions that return a ``const char *``; all others return an error code.

    Raises:
        DriverError: a function is missing that is not optional.
    """
    functions: dict[str, Foreign] = {}
    for name, argtypes in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            if name in optional:
                continue
            raise DriverError(f"the GPU driver has no {name}: it is too old, {needed} or newer is needed")
        function.argtypes = argtypes
        function.restype = ctypes.c_char_p if name in text else ctypes.c_int
        functions[name] = function
    return functions


class Driver(ABC):
    """One vendor's driver in this process.  Its methods may be called from any thread."""

    backend: ClassVar[Backend]

    def __init__(self, functions: Mapping[str, Foreign], *, images_per_device: bool) -> None:
        """Keep the driver's bound functions; ``images_per_device``: a library serves one device only."""
        self._functions = functions
        self._images_per_device = images_per_device
        self._lock = threading.RLock()
        self._images: dict[tuple[int | None, bytes], _Image] = {}

    @abstractmethod
    def version(self) -> int:
        """The driver's own version number: 13000 is CUDA 13.0, 60241134 is HIP 6.2.41134.

        Raises:
            DriverError: the driver refused.
        """

    @abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """The devices that the driver shows to this process; empty if there are none.

        Raises:
            DriverError: the driver refused.
        """

    @abstractmethod
    def current_device(self) -> int | None:
        """Ordinal of the calling thread's current device.

        None if the thread has no context (CUDA) or there is no device (HIP, where a thread otherwise
        starts on device 0).

        Raises:
            DriverError: the driver refused.
        """

    @abstractmethod
    def on_device(self, ordinal: int) -> AbstractContextManager[None]:
        """Make a device (CUDA: its primary context) current for a ``with`` block, then what was before.

        Raises:
            DriverError: there is no such device, or the driver refused.
        """

    @abstractmethod
    def is_capturing(self, stream: int | None) -> bool:
        """Whether a stream of the current device takes part in the capture of a graph.

        True also for the null stream (0 or None) while a capture of another stream makes it unusable.
        Asking never invalidates a capture.

        Raises:
            DriverError: the driver refused; on CUDA ``code`` is 201 if the thread has no context.
        """

    @abstractmethod
    def launcher(self, function: Function, threads: int, shared: int, params_size: int, num_ctas: int = 1) -> Launcher:
        """Prepare launches of a loaded function; see :class:`Launcher` for the arguments.

        Raises:
            DriverError: the driver cannot launch clusters, and ``num_ctas`` is not 1.
            ValueError: a number is out of range.
        """

    @abstractmethod
    def _describe(self, code: int) -> str:
        """Name and text of an error code."""

    @abstractmethod
    def _open(self, image: bytes, symbol: str) -> int:
        """Load an image on the current device; ``symbol`` is for the error message."""

    @abstractmethod
    def _find(self, library: int, symbol: str) -> int:
        """The handle of a kernel on the current device."""

    @abstractmethod
    def _opt_in(self, handle: int, shared: int, symbol: str) -> None:
        """Allow a kernel ``shared`` bytes of dynamic shared memory, if that takes a call."""

    @abstractmethod
    def _close(self, library: int) -> int:
        """Unload a library; returns the error code."""

    def load(self, ordinal: int, image: bytes, symbol: str, shared: int) -> Function:
        """Load a kernel on a device, ready to launch with ``shared`` bytes of dynamic shared memory.

        One image is given to the driver once per process (once per device where the driver wants that),
        however often it is loaded.  Each load is undone by one :meth:`unload`.

        Raises:
            DriverError: the device cannot give that much shared memory, or the driver refused the
                device, the image or the symbol; the message names the symbol.
        """
        devices = self.devices()
        if not 0 <= ordinal < len(devices):
            raise DriverError(
                f"{symbol} cannot be loaded on device {ordinal}: the driver shows {len(devices)} device(s)"
            )
        device = devices[ordinal]
        if shared > device.max_shared:
            raise DriverError(
                f"{symbol} needs {shared} bytes of dynamic shared memory, device {ordinal} ({device.name}) "
                f"has at most {device.max_shared} per block"
            )
        key = (ordinal if self._images_per_device else None, hashlib.sha256(image).digest())
        with self._lock, self.on_device(ordinal):
            entry = self._images.get(key) or _Image(key, self._open(image, symbol))
            try:
                handle = self._find(entry.handle, symbol)
                # A smaller opt-in would take the larger one back from whoever loaded the kernel before.
                if shared > entry.opted_in.get(handle, 0):
                    self._opt_in(handle, shared, symbol)
                    entry.opted_in[handle] = shared
            except DriverError:
                if not entry.users:
                    self._close(entry.handle)
                raise
            entry.users += 1
            self._images[key] = entry
            return Function(handle, entry.handle, ordinal, symbol)

    def unload(self, function: Function) -> None:
        """Undo one :meth:`load`; the last one unloads the image.  No launch of it may be under way.

        Raises:
            DriverError: the driver refused.
            ValueError: the function is not loaded.
        """
        with self._lock:
            for entry in self._images.values():
                if entry.handle == function.library:
                    break
            else:
                raise ValueError(f"function {function.symbol} is not loaded")
            entry.users -= 1
            if entry.users:
                return
            del self._images[entry.key]
            with self.on_device(function.ordinal):
                if code := self._close(entry.handle):
                    raise self.failure(f"unload of {function.symbol}", code)

    def failure(self, what: str, code: int) -> DriverError:
        """The error for a call that returned ``code``; ``what`` says what was tried."""
        return DriverError(f"{what} failed: {self._describe(code)}", code)

    def _call(self, name: str, *arguments: object, context: str = "") -> None:
        if code := self._functions[name](*arguments):
            raise self.failure(f"{name}{context}", code)
