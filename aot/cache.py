"""Compiled cells on disk, by content: an unchanged cell is not compiled again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from fp8_aot.aot.errors import UsageError, WorkError
from fp8_aot.aot.worker import Compiled, Request

_VERSION = b"1:"  # of the entries' format


def default_directory() -> Path:
    """``$XDG_CACHE_HOME/fp8-aot``, or ``~/.cache/fp8-aot``.

    Raises:
        UsageError: the user has no home, as in some containers.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "fp8-aot"
    except RuntimeError:
        raise UsageError("--cache: there is no home folder to keep a cache in: name a folder, or --no-cache") from None


class Cache:
    """A folder of compiled cells.  Safe for any number of processes: entries are moved into place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._decoder = msgspec.msgpack.Decoder(Compiled)

    def _path(self, job: Request) -> Path:
        key = hashlib.sha256(_VERSION + job.key.encode()).hexdigest()
        return self.directory / key[:2] / key

    def get(self, job: Request) -> Compiled | None:
        """The compiled cell, or None where there is none or its entry is damaged."""
        try:
            data = self._path(job).read_bytes()
        except OSError:
            return None
        digest, body = data[:32], data[32:]
        if hashlib.sha256(body).digest() != digest:
            return None
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError:
            return None

    def put(self, job: Request, result: Compiled) -> None:
        """Keep a compiled cell.

        Raises:
            WorkError: the folder cannot be written.
        """
        path = self._path(job)
        body = msgspec.msgpack.encode(msgspec.structs.replace(result, seconds=0.0))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, hashlib.sha256(body).digest() + body)
        except OSError as error:
            raise WorkError(f"--cache {self.directory}: cannot write an entry: {error.strerror}") from None


def check_writable(option: str, directory: Path) -> None:
    """Create a folder if need be, and make sure that files can be created in it.

    Raises:
        UsageError: they cannot; the message starts with ``option``.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"{option} {directory}: cannot be written: {error.strerror}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at every moment the whole old or the whole new one is there.

    Raises:
        OSError: the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
