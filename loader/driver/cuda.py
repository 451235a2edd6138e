"""NVIDIA's driver, through ``libcuda.so.1``."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any, ClassVar

from fp8_aot.loader.driver.base import Backend, Device, Driver, bind
from fp8_aot.loader.driver.launch import ArgumentLauncher, Fire, Foreign, Function, LaunchBuffer, Launcher
from fp8_aot.loader.errors import DriverError

LIBRARY = "libcuda.so.1"

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    # since CUDA 11.8
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    # since CUDA 12.0
    "cuLibraryLoadData": (POINTER(c_void_p), c_char_p, *[c_void_p, c_void_p, c_uint] * 2),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelGetFunction": (POINTER(c_void_p), c_void_p),
    "cuLibraryUnload": (c_void_p,),
    # since CUDA 12.4
    "cuFuncLoad": (c_void_p,),
}
_LIBRARY_CALLS = frozenset({"cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuLibraryUnload"})
_OPTIONAL = _LIBRARY_CALLS | {"cuLaunchKernelEx", "cuFuncLoad"}

# CUdevice_attribute
_WARP_SIZE = 10
_MULTIPROCESSOR_COUNT = 16
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_SHARED_WITHOUT_OPT_IN = 49_152

# CUresult
_NO_DEVICE = 100
_INVALID_CONTEXT = 201
_STREAM_CAPTURE_IMPLICIT = 906

_EXTRA_END = 0

# CUlaunchConfig: gridDim x, y, z, blockDim x, y, z, sharedMemBytes, hStream; then attrs, numAttrs
_CONFIG = struct.Struct("<7I4xQ")
_CONFIG_ATTRIBUTES = struct.Struct("<QI4x")
# CUlaunchAttribute: id, 64-byte value; that of CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION is x, y, z
_ATTRIBUTE = struct.Struct("<I4x3I52x")
_CLUSTER_DIMENSION = 4


class ConfigLauncher(Launcher):
    """Launches through ``cuLaunchKernelEx``.

    Its configuration is one ``struct.pack_into`` and its call has four arguments, which costs Python half
    of what the eleven arguments of ``cuLaunchKernel`` do.
    """

    __slots__ = ("_cluster", "_launch")

    def __init__(
        self,
        driver: Driver,
        function: Function,
        threads: int,
        shared: int,
        params_size: int,
        num_ctas: int,
        launch: Foreign,
    ) -> None:
        """Prepare launches through ``launch``, which is ``cuLaunchKernelEx``."""
        super().__init__(driver, function, threads, shared, params_size, num_ctas)
        self._launch = launch
        self._cluster = (
            ctypes.create_string_buffer(_ATTRIBUTE.pack(_CLUSTER_DIMENSION, num_ctas, 1, 1), _ATTRIBUTE.size)
            if num_ctas > 1
            else None
        )

    def buffer(self) -> LaunchBuffer:
        address, count = (ctypes.addressof(self._cluster), 1) if self._cluster else (0, 0)
        config = bytes(_CONFIG.size) + _CONFIG_ATTRIBUTES.pack(address, count)
        return LaunchBuffer(self._params_size, _EXTRA_END, config, self._cluster)

    def at(self, gx: int, gy: int, gz: int) -> Fire:
        fixed = (gx * self._num_ctas, gy, gz, self._threads, 1, 1, self._shared)
        try:
            _CONFIG.pack(*fixed, 0)
        except struct.error:
            raise self._bad_grid(gx, gy, gz) from None
        launch, handle, pack_into = self._launch, self._handle, _CONFIG.pack_into

        def fire(stream: int, buffer: LaunchBuffer) -> None:
            if buffer.stream != stream:
                pack_into(buffer.config, 0, *fixed, stream)
                buffer.stream = stream
            if code := launch(buffer.config_pointer, handle, None, buffer.extra_pointer):
                raise self._failure(gx, gy, gz, code)

        return fire


class CudaDriver(Driver):
    """NVIDIA's driver.

    It uses each device's primary context, as the CUDA runtime and torch do, and keeps the one that it
    retains until the process ends.
    """

    backend: ClassVar[Backend] = "cuda"

    def __init__(self, library: object = None) -> None:
        """Bind the driver's functions; nothing is initialised yet.

        Args:
            library: the opened ``libcuda.so.1`` or a stand-in; None opens it.

        Raises:
            DriverError: the library is not there, cannot be opened, or is too old.
        """
        functions = bind(library or _open_library(), _SIGNATURES, "CUDA 10.0", optional=_OPTIONAL)
        self._has_libraries = functions.keys() >= _LIBRARY_CALLS
        super().__init__(functions, images_per_device=not self._has_libraries)
        self._initialised = False
        self._devices: tuple[Device, ...] | None = None
        self._contexts: dict[int, c_void_p] = {}
        self._get_device = functions["cuCtxGetDevice"]

    def version(self) -> int:
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return version.value

    def devices(self) -> tuple[Device, ...]:
        if self._devices is None:
            try:
                self._initialise()
            except DriverError as error:
                if error.code != _NO_DEVICE:
                    raise
                return ()
            count = c_int()
            self._call("cuDeviceGetCount", byref(count))
            self._devices = tuple(self._device(ordinal) for ordinal in range(count.value))
        return self._devices

    def current_device(self) -> int | None:
        if not self._initialised:
            self._initialise()
        # A CUdevice is the ordinal that cuDeviceGet returned it for.
        device = c_int()
        code = self._get_device(byref(device))
        if code == _INVALID_CONTEXT:
            return None
        if code:
            raise self.failure("cuCtxGetDevice", code)
        return device.value

    @contextmanager
    def on_device(self, ordinal: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context(ordinal))
        popped = c_void_p()
        try:
            yield
        except BaseException:
            # The error of the block matters more than one of the pop.
            self._functions["cuCtxPopCurrent_v2"](byref(popped))
            raise
        self._call("cuCtxPopCurrent_v2", byref(popped))

    def is_capturing(self, stream: int | None) -> bool:
        self._initialise()
        status = c_int()
        code = self._functions["cuStreamIsCapturing"](stream, byref(status))
        if code == _STREAM_CAPTURE_IMPLICIT:
            return True
        if code:
            raise self.failure("cuStreamIsCapturing", code)
        return status.value != 0

    def launcher(self, function: Function, threads: int, shared: int, params_size: int, num_ctas: int = 1) -> Launcher:
        if launch := self._functions.get("cuLaunchKernelEx"):
            return ConfigLauncher(self, function, threads, shared, params_size, num_ctas, launch)
        if num_ctas != 1:
            raise DriverError(
                f"{function.symbol} needs clusters of {num_ctas} blocks: the NVIDIA driver is too old, "
                f"CUDA 11.8 or newer is needed"
            )
        launch = self._functions["cuLaunchKernel"]
        return ArgumentLauncher(self, function, threads, shared, params_size, launch=launch, end=_EXTRA_END)

    def _initialise(self) -> None:
        if not self._initialised:
            self._call("cuInit", 0)
            self._initialised = True

    def _device(self, ordinal: int) -> Device:
        device = self._handle(ordinal)
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), device)
        major = self._attribute(_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._attribute(_COMPUTE_CAPABILITY_MINOR, device)
        return Device(
            ordinal=ordinal,
            name=name.value.decode(errors="replace"),
            arch=f"{major}{minor}",
            features=(),
            warp_size=self._attribute(_WARP_SIZE, device),
            max_shared=self._attribute(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device),
            multiprocessors=self._attribute(_MULTIPROCESSOR_COUNT, device),
        )

    def _handle(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal, context=f" of device {ordinal}")
        return device.value

    def _attribute(self, attribute: int, device: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, device)
        return value.value

    def _context(self, ordinal: int) -> c_void_p:
        context = self._contexts.get(ordinal)
        if context is not None:
            return context
        with self._lock:
            if ordinal not in self._contexts:
                self._initialise()
                context = c_void_p()
                device = self._handle(ordinal)
                where = f" of device {ordinal}"
                self._call("cuDevicePrimaryCtxRetain", byref(context), device, context=where)
                self._contexts[ordinal] = context
            return self._contexts[ordinal]

    def _describe(self, code: int) -> str:
        name, text = c_char_p(), c_char_p()
        if self._functions["cuGetErrorName"](code, byref(name)) or not name.value:
            return f"error {code}"
        self._functions["cuGetErrorString"](code, byref(text))
        return f"{name.value.decode()} ({code}): {(text.value or b'no description').decode()}"

    def _open(self, image: bytes, symbol: str) -> int:
        library = c_void_p()
        context = f" of the object of {symbol}"
        if self._has_libraries:
            options = (None, None, 0, None, None, 0)
            self._call("cuLibraryLoadData", byref(library), image, *options, context=context)
        else:
            self._call("cuModuleLoadData", byref(library), image, context=context)
        return library.value or 0

    def _find(self, library: int, symbol: str) -> int:
        function = c_void_p()
        context = f" of {symbol}"
        if self._has_libraries:
            kernel = c_void_p()
            self._call("cuLibraryGetKernel", byref(kernel), library, symbol.encode(), context=context)
            self._call("cuKernelGetFunction", byref(function), kernel, context=context)
        else:
            self._call("cuModuleGetFunction", byref(function), library, symbol.encode(), context=context)
        # Drivers load lazily: without this the first launch would, perhaps while a graph is captured.
        if "cuFuncLoad" in self._functions:
            self._call("cuFuncLoad", function, context=context)
        return function.value or 0

    def _opt_in(self, handle: int, shared: int, symbol: str) -> None:
        if shared > _SHARED_WITHOUT_OPT_IN:
            context = f" of {symbol} to {shared} bytes of dynamic shared memory"
            self._call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared, context=context)

    def _close(self, library: int) -> int:
        code: int = self._functions["cuLibraryUnload" if self._has_libraries else "cuModuleUnload"](library)
        return code


def _open_library() -> object:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        reason = "the NVIDIA driver is not installed on this machine"
        if "No such file" in str(error):
            raise DriverError(f"{LIBRARY} not found: {reason}") from None
        raise DriverError(f"{LIBRARY} cannot be opened: {error}") from None
