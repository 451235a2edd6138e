"""Reading a bundle file: needs nothing but the schema, so that any install can look into a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8_aot.aot.errors import WorkError
from fp8_aot.loader import schema


@dataclass(frozen=True)
class Opened:
    """A bundle in memory: its bytes, its manifest, and the contents of its objects by sha256."""

    path: Path
    data: bytes
    manifest: schema.Manifest
    objects: dict[str, memoryview]


def open_bundle(path: Path) -> Opened:
    """Read a bundle file; the objects' contents are not checked yet.

    Raises:
        WorkError: the file cannot be read.
        BundleError: it is no whole bundle of this schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WorkError(f"{path}: cannot read the bundle: {error.strerror}") from None
    entries = schema.read(data, str(path))
    manifest = schema.decode(bytes(entries.pop("manifest.json")), str(path))
    objects = {name.removeprefix("objects/").partition(".")[0]: view for name, view in entries.items()}
    return Opened(path, data, manifest, objects)
