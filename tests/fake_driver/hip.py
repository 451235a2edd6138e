"""A stand-in for ``libamdhip64.so``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CFUNCTYPE, Structure, c_char, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from fake_driver.base import (
    HANDLE,
    INT,
    INVALID_DEVICE,
    INVALID_VALUE,
    LAUNCH,
    NO_DEVICE,
    Fake,
    FakeDevice,
    put,
)
from fp8_aot.loader.driver.hip import HipDriver

_NAMES = {
    1: "hipErrorInvalidValue",
    101: "hipErrorInvalidDevice",
    209: "hipErrorNoBinaryForGpu",
    400: "hipErrorInvalidHandle",
    500: "hipErrorNotFound",
}


class _HipProperties(Structure):
    # hipDeviceProp_tR0600 in bytes, with the fields between those in use left out
    _fields_ = (
        ("name", c_char * 256),
        ("_0", c_char * 40),
        ("shared", c_size_t),
        ("_1", c_char * 4),
        ("warp_size", c_int),
        ("_2", c_char * 76),
        ("multiprocessors", c_int),
        ("_3", c_char * 304),
        ("shared_opt_in", c_size_t),
        ("_4", c_char * 456),
        ("arch", c_char * 256),
        ("_5", c_char * 56),
    )


class FakeHip(Fake):
    """A stand-in for ``libamdhip64.so``; the functions named in ``missing`` are missing."""

    extra_end = 3
    free_shared = None

    def __init__(
        self,
        devices: Sequence[FakeDevice] = (FakeDevice("gfx942:sramecc+:xnack-", shared=65_536, warp_size=64),),
        version: int = 60241134,
        missing: Iterable[str] = (),
    ) -> None:
        super().__init__(devices, version, missing)
        self.get_text("hipGetErrorName", lambda code: _NAMES.get(code, "hipErrorUnknown"))
        self.get_text("hipGetErrorString", lambda code: f"text of {code}")

    def get_text(self, name: str, function: Callable[[int], str]) -> None:
        """Add a function that returns a C string."""
        setattr(self.library, name, CFUNCTYPE(c_void_p, c_int)(lambda code: self._keep_text(function(code))))

    def driver(self) -> HipDriver:
        """A new driver over this stand-in."""
        return HipDriver(self.library)

    def _table(self) -> Mapping[str, tuple[tuple[Any, ...], Callable[..., int]]]:
        return {
            "hipRuntimeGetVersion": ((INT,), lambda out: put(out, self.version)),
            "hipGetLastError": ((), self._last_error),
            "hipGetDeviceCount": ((INT,), self._guard(lambda out: put(out, len(self.devices)))),
            "hipGetDevice": ((INT,), self._guard(lambda out: put(out, self.thread.device))),
            "hipSetDevice": ((c_int,), self._guard(self._set_device)),
            "hipGetDevicePropertiesR0600": ((c_void_p, c_int), self._guard(self._properties)),
            "hipStreamIsCapturing": ((c_void_p, INT), self._guard(self._capture_status)),
            "hipModuleLoadData": ((HANDLE, c_void_p), self._guard(self._module_load)),
            "hipModuleGetFunction": ((HANDLE, c_void_p, c_char_p), self._guard(self._module_function)),
            "hipModuleUnload": ((c_void_p,), self._guard(self._close)),
            "hipModuleLaunchKernel": (LAUNCH, self._guard(self._launch_kernel)),
        }

    def _guard(self, function: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: function(*arguments) if self.devices else NO_DEVICE

    def _last_error(self) -> int:
        # Returned through errors' own path, it would be recorded again.
        self.thread.last_error = 0
        return 0

    def _set_device(self, ordinal: int) -> int:
        if not 0 <= ordinal < len(self.devices):
            return INVALID_DEVICE
        self.thread.device = ordinal
        return 0

    def _properties(self, out: int, ordinal: int) -> int:
        if not 0 <= ordinal < len(self.devices):
            return INVALID_DEVICE
        it = self.devices[ordinal]
        properties = _HipProperties(
            name=it.name.encode(),
            shared=it.shared,
            warp_size=it.warp_size,
            multiprocessors=it.multiprocessors,
            arch=it.arch.encode(),
        )
        ctypes.memmove(out, ctypes.addressof(properties), ctypes.sizeof(properties))
        return 0

    def _module_load(self, out: Any, image: int) -> int:
        return self._open(out, image, self.thread.device)

    def _module_function(self, out: Any, module: int, name: bytes) -> int:
        return self._kernel(out, module, name.decode(), self.thread.device)

    def _launch_kernel(self, function: int, *rest: Any) -> int:
        gx, gy, gz, bx, by, bz, shared, stream, params, extra = rest
        if params:
            return INVALID_VALUE
        device = self.thread.device
        return self._launch(function, (gx, gy, gz), (bx, by, bz), shared, stream, extra, device)
