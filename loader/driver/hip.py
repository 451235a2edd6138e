"""AMD's driver, through ``libamdhip64.so``."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any, ClassVar

from fp8_aot.loader.driver.base import Backend, Device, Driver, bind
from fp8_aot.loader.driver.launch import ArgumentLauncher, Function, Launcher
from fp8_aot.loader.errors import DriverError

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipGetErrorName": (c_int,),
    "hipGetErrorString": (c_int,),
    "hipGetLastError": (),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipGetDevicePropertiesR0600": (c_void_p, c_int),
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "hipModuleLoadData": (POINTER(c_void_p), c_char_p),
    "hipModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "hipModuleUnload": (c_void_p,),
    "hipModuleLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}

_TEXT = frozenset({"hipGetErrorName", "hipGetErrorString"})

# hipDeviceProp_tR0600, the layout that the function's suffix freezes: size, and offsets of its fields
PROPERTIES_SIZE = 1472
PROPERTIES_OFFSETS = {
    "name": 0,  # char[256]
    "sharedMemPerBlock": 296,  # size_t
    "warpSize": 308,  # int
    "multiProcessorCount": 388,  # int
    "sharedMemPerBlockOptin": 696,  # size_t
    "gcnArchName": 1160,  # char[256]
}
_TEXT_SIZE = 256

# hipError_t
_NO_DEVICE = 100
_STREAM_CAPTURE_IMPLICIT = 906

_EXTRA_END = 3


class HipDriver(Driver):
    """AMD's driver.  A thread's current device is what ``hipSetDevice`` last chose, 0 at first."""

    backend: ClassVar[Backend] = "hip"

    def __init__(self, library: object = None) -> None:
        """Bind the driver's functions; nothing is initialised yet.

        Args:
            library: the opened ``libamdhip64.so`` or a stand-in; None opens it.

        Raises:
            DriverError: the library is not there, cannot be opened, or is too old.
        """
        functions = bind(library or _open_library(), _SIGNATURES, "ROCm 6.0", text=_TEXT)
        super().__init__(functions, images_per_device=True)
        self._devices: tuple[Device, ...] | None = None

    def version(self) -> int:
        version = c_int()
        self._call("hipRuntimeGetVersion", byref(version))
        return version.value

    def devices(self) -> tuple[Device, ...]:
        if self._devices is None:
            count = c_int()
            code = self._functions["hipGetDeviceCount"](byref(count))
            if code == _NO_DEVICE:
                self._forget_error()
                return ()
            if code:
                raise self.failure("hipGetDeviceCount", code)
            self._devices = tuple(self._device(ordinal) for ordinal in range(count.value))
        return self._devices

    def current_device(self) -> int | None:
        device = c_int()
        code = self._functions["hipGetDevice"](byref(device))
        if code == _NO_DEVICE:
            self._forget_error()
            return None
        if code:
            raise self.failure("hipGetDevice", code)
        return device.value

    @contextmanager
    def on_device(self, ordinal: int) -> Iterator[None]:
        before = self.current_device()
        self._call("hipSetDevice", ordinal, context=f" to device {ordinal}")
        try:
            yield
        except BaseException:
            # The error of the block matters more than one of the way back.
            self._functions["hipSetDevice"](before)
            raise
        self._call("hipSetDevice", before, context=f" to device {before}")

    def is_capturing(self, stream: int | None) -> bool:
        status = c_int()
        code = self._functions["hipStreamIsCapturing"](stream, byref(status))
        if code == _STREAM_CAPTURE_IMPLICIT:
            self._forget_error()
            return True
        if code:
            raise self.failure("hipStreamIsCapturing", code)
        return status.value != 0

    def launcher(self, function: Function, threads: int, shared: int, params_size: int, num_ctas: int = 1) -> Launcher:
        if num_ctas != 1:
            raise DriverError(f"{function.symbol} needs clusters of {num_ctas} blocks: AMD devices have none")
        launch = self._functions["hipModuleLaunchKernel"]
        return ArgumentLauncher(self, function, threads, shared, params_size, launch=launch, end=_EXTRA_END)

    def _device(self, ordinal: int) -> Device:
        properties = ctypes.create_string_buffer(PROPERTIES_SIZE)
        self._call("hipGetDevicePropertiesR0600", properties, ordinal, context=f" of device {ordinal}")
        raw = properties.raw

        def text(field: str) -> str:
            offset = PROPERTIES_OFFSETS[field]
            return raw[offset : offset + _TEXT_SIZE].partition(b"\0")[0].decode(errors="replace")

        def number(field: str, kind: str) -> int:
            value: int = struct.unpack_from(kind, raw, PROPERTIES_OFFSETS[field])[0]
            return value

        arch, *features = text("gcnArchName").split(":")
        # Some releases leave the second one 0.
        max_shared = max(number("sharedMemPerBlock", "=Q"), number("sharedMemPerBlockOptin", "=Q"))
        warp_size, multiprocessors = number("warpSize", "=i"), number("multiProcessorCount", "=i")
        return Device(ordinal, text("name"), arch, tuple(features), warp_size, max_shared, multiprocessors)

    def failure(self, what: str, code: int) -> DriverError:
        self._forget_error()
        return super().failure(what, code)

    def _forget_error(self) -> None:
        # HIP keeps a thread's last error, and whoever asks for it next, torch say, would take it for theirs.
        self._functions["hipGetLastError"]()

    def _describe(self, code: int) -> str:
        name = self._functions["hipGetErrorName"](code) or b"error"
        text = self._functions["hipGetErrorString"](code) or b"no description"
        return f"{name.decode()} ({code}): {text.decode()}"

    def _open(self, image: bytes, symbol: str) -> int:
        module = c_void_p()
        self._call("hipModuleLoadData", byref(module), image, context=f" of the object of {symbol}")
        return module.value or 0

    def _find(self, library: int, symbol: str) -> int:
        function = c_void_p()
        self._call("hipModuleGetFunction", byref(function), library, symbol.encode(), context=f" of {symbol}")
        return function.value or 0

    def _opt_in(self, handle: int, shared: int, symbol: str) -> None:
        """Nothing: AMD's shared memory needs no opt-in."""

    def _close(self, library: int) -> int:
        code: int = self._functions["hipModuleUnload"](library)
        return code


def candidates() -> list[str]:
    """Where ``libamdhip64.so`` may be, best first.

    First is the copy that this process already uses: torch's wheels bring their own, and the pointers and
    streams of one copy mean nothing to another.
    """
    folders = [os.path.join(root, "lib") for root in (os.environ.get("ROCM_PATH"), "/opt/rocm") if root]
    paths = [os.path.join(folder, name) for folder in folders for name in LIBRARIES]
    return [*_mapped(), *LIBRARIES, *paths]


def _mapped() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            found = re.findall(r"/.*/libamdhip64\.so[.\d]*$", maps.read(), re.MULTILINE)
    except OSError:
        return []
    return list(dict.fromkeys(found))


def _open_library() -> object:
    refusals = []
    for path in candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            if "No such file" not in str(error):
                refusals.append(str(error))
    if refusals:
        raise DriverError(f"libamdhip64.so cannot be opened: {refusals[0]}")
    raise DriverError("libamdhip64.so not found: ROCm is not installed on this machine, or not where ROCM_PATH says")
