"""What both stand-ins share: records, handles, and the making of C functions."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

INVALID_VALUE, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 3, 100, 101
INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND, CAPTURE_IMPLICIT, UNKNOWN = 201, 400, 500, 906, 999

HANDLE, INT, TEXT = POINTER(c_void_p), POINTER(c_int), POINTER(c_void_p)
LAUNCH = (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, POINTER(c_void_p))


@dataclass(frozen=True)
class FakeDevice:
    """A device; ``arch`` is a compute capability without its dot, or a gfx name with its features."""

    arch: str = "90"
    name: str = "Stand-in GPU"
    shared: int = 232_448
    warp_size: int = 32
    multiprocessors: int = 132


@dataclass(frozen=True)
class Launch:
    """One launch, as the driver saw it; ``address`` is that of the parameters."""

    symbol: str
    device: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    params: bytes
    address: int
    cluster: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Load:
    """An image given to the driver; ``device`` is None if it serves all of them."""

    digest: str
    device: int | None


@dataclass
class Module:
    digest: str
    device: int | None
    loaded: bool = True


@dataclass
class Kernel:
    module: Module
    symbol: str
    device: int
    max_shared: int


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.device = 0
        self.last_error = 0


class Fake:
    """What both stand-ins share: records, handles, and the making of C functions."""

    extra_end: int
    free_shared: int | None
    """Dynamic shared memory without an opt-in, in bytes; None: no opt-in exists."""

    def __init__(self, devices: Sequence[FakeDevice], version: int, missing: Iterable[str]) -> None:
        self.devices = list(devices)
        self.version = version
        self.failing: dict[str, int] = {}
        self.capturing: set[int] = set()
        self.unknown_symbols: set[str] = set()
        self.launches: list[Launch] = []
        self.loads: list[Load] = []
        self.unloads: list[Load] = []
        self.opt_ins: list[tuple[str, int]] = []
        self.calls: list[str] = []
        self.errors: list[BaseException] = []
        self.thread = _Thread()
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}
        self._texts: list[Any] = []
        self.library = types.SimpleNamespace()
        for name, (kinds, function) in self._table().items():
            if name not in missing:
                setattr(self.library, name, self._export(name, kinds, function))

    def _table(self) -> Mapping[str, tuple[tuple[Any, ...], Callable[..., int]]]:
        raise NotImplementedError

    def _export(self, name: str, kinds: tuple[Any, ...], function: Callable[..., int]) -> Any:
        def entry(*arguments: Any) -> int:
            self.calls.append(name)
            try:
                code = self.failing.get(name)
                if code is None:
                    code = function(*arguments)
            except BaseException as error:
                self.errors.append(error)
                code = UNKNOWN
            if code:
                self.thread.last_error = code
            return code

        return CFUNCTYPE(c_int, *kinds)(entry)

    def _handle(self, thing: Any) -> int:
        # Beyond 32 bits, so that a handle cut short is an invalid one.
        handle = 0x7F00_0000_0000 + 0x100 * next(self._numbers)
        self._objects[handle] = thing
        return handle

    def _get(self, handle: int | None, kind: type) -> Any:
        thing = self._objects.get(handle or 0)
        return thing if isinstance(thing, kind) else None

    def _open(self, out: Any, image: int, device: int | None) -> int:
        digest = hashlib.sha256(_image(image)).hexdigest()
        self.loads.append(Load(digest, device))
        out[0] = self._handle(Module(digest, device))
        return 0

    def _close(self, handle: int) -> int:
        module = self._get(handle, Module)
        if module is None or not module.loaded:
            return INVALID_HANDLE
        module.loaded = False
        self.unloads.append(Load(module.digest, module.device))
        return 0

    def _kernel(self, out: Any, handle: int, name: str, device: int) -> int:
        module = self._get(handle, Module)
        if module is None or not module.loaded:
            return INVALID_HANDLE
        if name in self.unknown_symbols:
            return NOT_FOUND
        for known, thing in list(self._objects.items()):
            if (
                isinstance(thing, Kernel)
                and (thing.module is module)
                and (thing.symbol, thing.device) == (name, device)
            ):
                out[0] = known
                return 0
        free = self.devices[device].shared if self.free_shared is None else self.free_shared
        out[0] = self._handle(Kernel(module, name, device, free))
        return 0

    def _launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        stream: int | None,
        extra: Any,
        device: int,
        cluster: tuple[int, int, int] | None = None,
    ) -> int:
        kernel = self._get(function, Kernel)
        if kernel is None or not kernel.module.loaded or kernel.device != device:
            return INVALID_HANDLE
        if 0 in grid or shared > kernel.max_shared:
            return INVALID_VALUE
        if not stream and self.capturing:
            return CAPTURE_IMPLICIT
        if (extra[0], extra[2], extra[4] or 0) != (1, 2, self.extra_end):
            return INVALID_VALUE
        size = ctypes.cast(extra[3], POINTER(c_size_t))[0]
        params = ctypes.string_at(extra[1], size)
        address = extra[1]
        self.launches.append(Launch(kernel.symbol, device, grid, block, shared, stream or 0, params, address, cluster))
        return 0

    def _keep_text(self, text: str) -> int:
        # The driver's own texts live as long as the process.
        kept = ctypes.create_string_buffer(text.encode())
        self._texts.append(kept)
        return ctypes.addressof(kept)

    def _capture_status(self, stream: int | None, status: Any) -> int:
        if not stream and self.capturing:
            return CAPTURE_IMPLICIT
        status[0] = int((stream or 0) in self.capturing)
        return 0


def _image(address: int) -> bytes:
    """The image at an address, whose size no driver is told: a real one reads it in the image itself.

    Here it comes from the Python bytes object that holds the image: its type stands 24 bytes before the
    first byte, its length 16.
    """
    if c_void_p.from_address(address - 24).value != id(bytes):
        raise TypeError("an image must come straight from a bytes object")
    return ctypes.string_at(address, ctypes.c_ssize_t.from_address(address - 16).value)


def put(out: Any, value: Any) -> int:
    out[0] = value
    return 0
