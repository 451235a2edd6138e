"""Finding the bundle for a device: every candidate is accepted, or rejected with its reason."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from fp8_aot.loader import config
from fp8_aot.loader.bundle import Bundle
from fp8_aot.loader.driver import Device, Driver
from fp8_aot.loader.errors import BundleError


class Accepted(Struct, frozen=True):
    """A bundle that the device can run; ``origin`` says how it was found."""

    path: Path
    origin: str
    bundle: Bundle

    def __str__(self) -> str:
        return f"{self.path} ({self.origin}): accepted"


class Rejected(Struct, frozen=True):
    """A bundle or a place that was looked at in vain, and why."""

    path: Path
    origin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.origin}): rejected: {self.reason}"


Decision = Accepted | Rejected


def find(driver: Driver, device: Device) -> Iterator[Decision]:
    """Decisions on the candidates for a device, in search order and as they are asked for.

    The first accepted bundle is used; those behind it need not be read.
    """
    version = driver.version()
    for path, origin in _candidates():
        yield _decide(path, origin, driver.backend, device.arch, version)


def _candidates() -> Iterator[tuple[Path, str]]:
    places = [(path, "configure(bundle_path=...)") for path in config.settings().bundle_path]
    places += [(path, "FP8_AOT_BUNDLE_PATH") for path in config.environment_path()]
    places += [(path, "installed wheel") for path in _installed()]
    places += [(Path("artifacts"), "./artifacts")]
    for path, origin in places:
        # os.path.isdir, since Path.is_dir raises where a folder above may not be read.
        files = sorted(path.glob("*.zip")) if os.path.isdir(path) else [path]
        for file in files:
            yield file, origin
        if not files:
            yield path, origin


def _installed() -> list[Path]:
    """Folders of the installed artifact wheels: the portions of ``fp8_aot.artifacts``, and what is in them."""
    spec = importlib.util.find_spec("fp8_aot.artifacts")
    if spec is None or spec.submodule_search_locations is None:
        return []
    roots = [Path(location) for location in spec.submodule_search_locations]
    return sorted(child for root in roots if root.is_dir() for child in root.iterdir() if child.is_dir())


def _decide(path: Path, origin: str, backend: str, arch: str, version: int) -> Decision:
    if os.path.isdir(path):
        return Rejected(path, origin, "holds no bundle (*.zip)")
    try:
        bundle = Bundle(path)
    except BundleError as error:
        return Rejected(path, origin, str(error).removeprefix(f"{path}: "))
    target, toolchain = bundle.manifest.target, bundle.manifest.toolchain
    if (target.backend, target.arch) != (backend, arch):
        return Rejected(path, origin, f"built for {target.backend} {target.arch}, this device is {backend} {arch}")
    if version < toolchain.min_driver:
        return Rejected(
            path,
            origin,
            f"made by {toolchain.assembler.name} {toolchain.assembler.version}, needs driver API "
            f"{toolchain.min_driver} or newer, this machine's is {version}: update the driver, or build with "
            "an older assembler",
        )
    return Accepted(path, origin, bundle)
