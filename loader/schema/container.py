"""The bundle file: a ZIP archive of which exactly one form is legal for given contents.

Entries are stored, not compressed: ``manifest.json`` first, then ``objects/<sha256>.<extension>`` in
ascending order.  Every header field is fixed or follows from an entry's name, size and CRC, so two
builds of the same contents are the same bytes, and a reader can compare every byte outside of the
contents with the one that must stand there.  Inside the contents the CRC finds any flipped bit.
Ordinary ZIP tools read the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fp8_aot.loader.errors import BundleError, IntegrityError

MANIFEST = "manifest.json"
_OBJECT = re.compile(r"objects/[0-9a-f]{64}\.(cubin|hsaco)")

# version needed 2.0, no flags, stored, 1980-01-01 00:00:00
_COMMON = struct.pack("<HHHHH", 20, 0, 0, 0, 0x21)
_MADE_BY = struct.pack("<H", (3 << 8) | 20)  # Unix, so that external attributes are a file mode
_MODE = 0o100644 << 16
_LOCAL_SIGNATURE = b"PK\3\4"
_CENTRAL_SIGNATURE = b"PK\1\2"
_END_SIGNATURE = b"PK\5\6"
_CENTRAL_SIZE = 46
_END_SIZE = 22
_MAX_ENTRIES = 0xFFFE  # what a ZIP without 64-bit extensions can count
_MAX_BYTES = 0xFFFFFFFE


class _Entry(NamedTuple):
    name: bytes
    size: int
    crc: int
    offset: int

    def local(self) -> bytes:
        sizes = struct.pack("<IIIHH", self.crc, self.size, self.size, len(self.name), 0)
        return _LOCAL_SIGNATURE + _COMMON + sizes + self.name

    def central(self) -> bytes:
        sizes = struct.pack(
            "<IIIHHHHHII", self.crc, self.size, self.size, len(self.name), 0, 0, 0, 0, _MODE, self.offset
        )
        return _CENTRAL_SIGNATURE + _MADE_BY + _COMMON + sizes + self.name


def _end(count: int, size: int, offset: int) -> bytes:
    return _END_SIGNATURE + struct.pack("<HHHHIIH", 0, 0, count, count, size, offset, 0)


def write(manifest: bytes, objects: Mapping[str, bytes]) -> bytes:
    """The bundle file of a manifest and its objects (entry name to contents).

    Raises:
        BundleError: an entry's name is not ``objects/<sha256>.cubin`` or ``.hsaco``, or the bundle
            would pass the 4 GiB or 65,534 entries of a plain ZIP archive.
    """
    parts: list[bytes] = []
    directory: list[bytes] = []
    offset = 0
    contents: Iterable[tuple[str, bytes]] = [(MANIFEST, manifest), *sorted(objects.items())]
    for name, data in contents:
        if name != MANIFEST and not _OBJECT.fullmatch(name):
            raise BundleError(f"entry name {name!r} is not objects/<sha256>.cubin or .hsaco")
        entry = _Entry(name.encode("ascii"), len(data), zlib.crc32(data), offset)
        local = entry.local()
        parts += [local, data]
        directory.append(entry.central())
        offset += len(local) + len(data)
    end = b"".join(directory)
    if len(directory) > _MAX_ENTRIES or offset + len(end) > _MAX_BYTES:
        raise BundleError(f"a bundle of {len(directory)} entries and {offset} bytes is too large")
    return b"".join(parts) + end + _end(len(directory), len(end), offset)


def read(data: bytes | memoryview, where: str) -> dict[str, memoryview]:
    """The entries of a bundle file, contents not yet checked except the manifest's CRC.

    ``where`` names the bundle in errors.  Time and memory are linear in the file's directory.

    Raises:
        IntegrityError: the bytes outside of the objects' contents are not those of a bundle.
    """
    view = memoryview(data)

    def fail(what: str) -> IntegrityError:
        return IntegrityError(f"{where}: not a whole bundle: {what}; build or fetch it again")

    if len(view) < _END_SIZE or view[-_END_SIZE : -_END_SIZE + 4] != _END_SIGNATURE:
        raise fail("the end of the archive is missing or damaged")
    _, _, _, count, size, start, _ = struct.unpack("<HHHHIIH", view[-_END_SIZE + 4 :])
    if view[-_END_SIZE:] != _end(count, size, start) or start + size + _END_SIZE != len(view):
        raise fail("the end of the archive is damaged")
    entries: dict[str, memoryview] = {}
    place, offset, last = start, 0, ""
    for _ in range(count):
        header = view[place : place + _CENTRAL_SIZE]
        if len(header) < _CENTRAL_SIZE:
            raise fail("the directory is cut short")
        crc, length, name_length = struct.unpack_from("<I4xIH", header, 16)
        raw = bytes(view[place + _CENTRAL_SIZE : place + _CENTRAL_SIZE + name_length])
        entry = _Entry(raw, length, crc, offset)
        central, local = entry.central(), entry.local()
        if view[place : place + len(central)] != central:
            raise fail(f"directory entry {len(entries)} is damaged")
        if view[offset : offset + len(local)] != local:
            raise fail(f"the header of entry {len(entries)} is damaged")
        name = raw.decode("ascii", "replace")
        if (entries and not (_OBJECT.fullmatch(name) and name > last)) or (not entries and name != MANIFEST):
            raise fail(f"entry {len(entries)} is called {name!r}")
        place += len(central)
        offset += len(local) + length
        if offset > start:
            raise fail(f"entry {name} passes the end of the contents")
        entries[name] = view[offset - length : offset]
        if name == MANIFEST and zlib.crc32(entries[name]) != crc:
            raise fail("manifest.json is damaged (CRC)")
        last = name
    if not entries:
        raise fail("it has no manifest.json")
    if place != start + size or offset != start:
        raise fail("there are bytes that belong to no entry")
    return entries


def damaged(data: bytes | memoryview, where: str) -> list[str]:
    """Names of the entries whose contents do not have the CRC that the directory states."""
    view = memoryview(data)
    entries = read(view, where)
    start = struct.unpack_from("<I", view, len(view) - 6)[0]
    wrong = []
    place = start
    for name, contents in entries.items():
        (crc,) = struct.unpack_from("<I", view, place + 16)
        if zlib.crc32(contents) != crc:
            wrong.append(name)
        place += _CENTRAL_SIZE + len(name)
    return wrong
