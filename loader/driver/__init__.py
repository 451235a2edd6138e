"""GPU drivers, opened directly: no compiler, no process, no file, no torch.

Importing this package opens nothing; :func:`get_driver` opens a driver's library when first asked.
"""

from __future__ import annotations

import threading

from fp8_aot.loader.driver.base import Backend, Device, Driver
from fp8_aot.loader.driver.cuda import CudaDriver
from fp8_aot.loader.driver.hip import HipDriver
from fp8_aot.loader.driver.launch import Function, LaunchBuffer, Launcher
from fp8_aot.loader.errors import DriverError

__all__ = [
    "Backend",
    "Device",
    "Driver",
    "DriverError",
    "Function",
    "LaunchBuffer",
    "Launcher",
    "available_drivers",
    "default_driver",
    "get_driver",
    "install",
    "reset",
]

_CLASSES: dict[str, type[CudaDriver] | type[HipDriver]] = {"cuda": CudaDriver, "hip": HipDriver}
_drivers: dict[str, Driver] = {}
_lock = threading.Lock()


def get_driver(backend: str) -> Driver:
    """The one driver of a backend in this process, opened on first use.

    Args:
        backend: ``"cuda"`` or ``"hip"``.

    Raises:
        DriverError: the driver's library is not there, cannot be opened, or is too old.
        ValueError: there is no such backend.
    """
    if backend not in _CLASSES:
        raise ValueError(f"backend is {backend!r}, expected 'cuda' or 'hip'")
    with _lock:
        if backend not in _drivers:
            _drivers[backend] = _CLASSES[backend]()
        return _drivers[backend]


def available_drivers() -> list[Driver | DriverError]:
    """For each backend, CUDA first: its driver, or the error that says why there is none.

    A driver can be there without any device: see :meth:`Driver.devices`.
    """
    found: list[Driver | DriverError] = []
    for backend in _CLASSES:
        try:
            found.append(get_driver(backend))
        except DriverError as error:
            found.append(error)
    return found


def default_driver() -> Driver:
    """The driver of this machine: the first that is there, CUDA before HIP.

    Raises:
        DriverError: there is none; the message says why for each backend.
    """
    found = available_drivers()
    for driver in found:
        if not isinstance(driver, DriverError):
            return driver
    raise DriverError("no GPU driver on this machine: " + "; ".join(str(error) for error in found))


def install(driver: Driver) -> None:
    """Make ``driver`` the one of its backend: tests put a stand-in in place."""
    with _lock:
        _drivers[driver.backend] = driver


def reset() -> None:
    """Forget all drivers; what they loaded stays loaded."""
    with _lock:
        _drivers.clear()
