"""A stand-in for ``libcuda.so.1``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_uint, c_void_p
from typing import Any

from fake_driver.base import (
    HANDLE,
    INT,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    LAUNCH,
    NO_DEVICE,
    NOT_FOUND,
    NOT_INITIALIZED,
    TEXT,
    Fake,
    FakeDevice,
    Kernel,
    Module,
    put,
)
from fp8_aot.loader.driver.cuda import CudaDriver

_NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    400: "CUDA_ERROR_INVALID_HANDLE",
    500: "CUDA_ERROR_NOT_FOUND",
}


class _LaunchAttribute(Structure):
    _fields_ = (("id", c_uint), ("pad", c_char * 4), ("value", c_uint * 16))


class _LaunchConfig(Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_LaunchAttribute)),
        ("count", c_uint),
    )


class FakeCuda(Fake):
    """A stand-in for ``libcuda.so.1``.

    Below CUDA 12.4, 12.0 and 11.8 the functions that came with these are missing, as are those named in
    ``missing``.
    """

    extra_end = 0
    free_shared = 49_152

    def __init__(
        self,
        devices: Sequence[FakeDevice] = (FakeDevice(),),
        version: int = 13000,
        missing: Iterable[str] = (),
    ) -> None:
        absent = set(missing)
        if version < 12040:
            absent |= {"cuFuncLoad"}
        if version < 12000:
            absent |= {"cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuLibraryUnload"}
        if version < 11080:
            absent |= {"cuLaunchKernelEx"}
        self.initialised = False
        super().__init__(devices, version, absent)

    def driver(self) -> CudaDriver:
        """A new driver over this stand-in."""
        return CudaDriver(self.library)

    def context_depth(self) -> int:
        """How many contexts lie on the calling thread's stack."""
        return len(self.thread.contexts)

    def push(self, ordinal: int) -> None:
        """Make a device current in the calling thread, as torch would."""
        self.initialised = True
        self.thread.contexts.append(ordinal)

    def _table(self) -> Mapping[str, tuple[tuple[Any, ...], Callable[..., int]]]:
        return {
            "cuInit": ((c_uint,), self._init),
            "cuDriverGetVersion": ((INT,), lambda out: put(out, self.version)),
            "cuGetErrorName": ((c_int, TEXT), lambda code, out: self._text(out, _NAMES.get(code))),
            "cuGetErrorString": ((c_int, TEXT), lambda code, out: self._text(out, f"text of {code}")),
            "cuDeviceGetCount": ((INT,), self._guard(lambda out: put(out, len(self.devices)))),
            "cuDeviceGet": ((INT, c_int), self._guard(self._device_get)),
            "cuDeviceGetName": ((POINTER(c_char), c_int, c_int), self._guard(self._device_name)),
            "cuDeviceGetAttribute": ((INT, c_int, c_int), self._guard(self._attribute)),
            "cuDevicePrimaryCtxRetain": ((HANDLE, c_int), self._guard(self._retain)),
            "cuCtxGetDevice": ((INT,), self._current(lambda device, out: put(out, device))),
            "cuCtxPushCurrent_v2": ((c_void_p,), self._guard(self._push)),
            "cuCtxPopCurrent_v2": ((HANDLE,), self._current(lambda device, out: self._pop(out))),
            "cuStreamIsCapturing": (
                (c_void_p, INT),
                self._current(lambda device, stream, out: self._capture_status(stream, out)),
            ),
            "cuFuncSetAttribute": ((c_void_p, c_int, c_int), self._current(self._set_attribute)),
            "cuFuncLoad": ((c_void_p,), self._current(self._load_function)),
            "cuModuleLoadData": ((HANDLE, c_void_p), self._current(self._module_load)),
            "cuModuleGetFunction": ((HANDLE, c_void_p, c_char_p), self._current(self._module_function)),
            "cuModuleUnload": ((c_void_p,), self._current(lambda device, module: self._close(module))),
            "cuLibraryLoadData": (
                (HANDLE, c_void_p, *[c_void_p, c_void_p, c_uint] * 2),
                self._guard(self._library_load),
            ),
            "cuLibraryGetKernel": ((HANDLE, c_void_p, c_char_p), self._guard(self._library_kernel)),
            "cuKernelGetFunction": ((HANDLE, c_void_p), self._current(self._kernel_function)),
            "cuLibraryUnload": ((c_void_p,), self._guard(self._close)),
            "cuLaunchKernel": (LAUNCH, self._current(self._launch_kernel)),
            "cuLaunchKernelEx": (
                (POINTER(_LaunchConfig), c_void_p, c_void_p, POINTER(c_void_p)),
                self._current(self._launch_kernel_ex),
            ),
        }

    def _guard(self, function: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: function(*arguments) if self.initialised else NOT_INITIALIZED

    def _current(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            contexts = self.thread.contexts
            return function(contexts[-1], *arguments) if contexts else INVALID_CONTEXT

        return self._guard(call)

    def _init(self, flags: int) -> int:
        if flags:
            return INVALID_VALUE
        if not self.devices:
            return NO_DEVICE
        self.initialised = True
        return 0

    def _text(self, out: Any, text: str | None) -> int:
        if text is None:
            return INVALID_VALUE
        return put(out, self._keep_text(text))

    def _device_get(self, out: Any, ordinal: int) -> int:
        return put(out, ordinal) if 0 <= ordinal < len(self.devices) else INVALID_DEVICE

    def _device_name(self, out: Any, size: int, device: int) -> int:
        name = self.devices[device].name.encode()[: size - 1] + b"\0"
        ctypes.memmove(out, name, len(name))
        return 0

    def _attribute(self, out: Any, attribute: int, device: int) -> int:
        it = self.devices[device]
        values = {
            10: it.warp_size,
            16: it.multiprocessors,
            75: int(it.arch[:-1]),
            76: int(it.arch[-1]),
            97: it.shared,
        }
        return put(out, values[attribute])

    def _retain(self, out: Any, device: int) -> int:
        return put(out, self._handle(("context", device)))

    def _push(self, context: int) -> int:
        held = self._get(context, tuple)
        if held is None:
            return INVALID_CONTEXT
        self.thread.contexts.append(held[1])
        return 0

    def _pop(self, out: Any) -> int:
        self.thread.contexts.pop()
        return 0

    def _set_attribute(self, device: int, function: int, attribute: int, value: int) -> int:
        kernel = self._get(function, Kernel)
        if kernel is None or kernel.device != device:
            return INVALID_HANDLE
        if attribute != 8 or value > self.devices[device].shared:
            return INVALID_VALUE
        kernel.max_shared = value
        self.opt_ins.append((kernel.symbol, value))
        return 0

    def _load_function(self, device: int, function: int) -> int:
        kernel = self._get(function, Kernel)
        return 0 if kernel and kernel.device == device else INVALID_HANDLE

    def _module_load(self, device: int, out: Any, image: int) -> int:
        return self._open(out, image, device)

    def _module_function(self, device: int, out: Any, module: int, name: bytes) -> int:
        held = self._get(module, Module)
        return INVALID_HANDLE if held and held.device != device else self._kernel(out, module, name.decode(), device)

    def _library_load(self, out: Any, image: int, *options: Any) -> int:
        return INVALID_VALUE if any(options) else self._open(out, image, None)

    def _library_kernel(self, out: Any, library: int, name: bytes) -> int:
        if self._get(library, Module) is None:
            return INVALID_HANDLE
        if name.decode() in self.unknown_symbols:
            return NOT_FOUND
        return put(out, self._handle((library, name.decode())))

    def _kernel_function(self, device: int, out: Any, kernel: int) -> int:
        held = self._get(kernel, tuple)
        return INVALID_HANDLE if held is None else self._kernel(out, *held, device)

    def _launch_kernel(self, device: int, function: int, *rest: Any) -> int:
        gx, gy, gz, bx, by, bz, shared, stream, params, extra = rest
        if params:
            return INVALID_VALUE
        return self._launch(function, (gx, gy, gz), (bx, by, bz), shared, stream, extra, device)

    def _launch_kernel_ex(self, device: int, config: Any, function: int, params: int, extra: Any) -> int:
        it = config[0]
        attributes = [it.attributes[index] for index in range(it.count)]
        if params or any(attribute.id != 4 for attribute in attributes):
            return INVALID_VALUE
        cluster = tuple(attributes[0].value[:3]) if attributes else None
        if cluster and any(blocks % size for blocks, size in zip(it.grid, cluster, strict=True)):
            return INVALID_VALUE
        return self._launch(function, tuple(it.grid), tuple(it.block), it.shared, it.stream, extra, device, cluster)
