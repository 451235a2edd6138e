"""Running ``fp8-aot build`` and looking at what it left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from conftest import fp8_aot

from fp8_aot.loader import schema
from fp8_aot.loader.bundle import Bundle


def pythonpath(*folders: Path) -> dict[str, str]:
    """An environment in which modules in ``folders`` can be imported too."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])}


def build_json(matrix: Path, out: Path, cache: Path | None, *options: str, **extra: Any) -> dict[str, Any]:
    """Run ``fp8-aot build --json``; gives its report."""
    where = ["--no-cache"] if cache is None else ["--cache", str(cache)]
    done = fp8_aot("build", "--matrix", matrix, "--out", out, *where, "--json", *options, **extra)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def objects(bundle: Path) -> dict[str, str]:
    """The sha256 of each variant's object."""
    return {v.id: v.object for v in Bundle(bundle).manifest.variants}


def tree(*folders: Path) -> dict[Path, tuple[int, bytes]]:
    """Time of change and contents of all files below the folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def parts(path: Path) -> tuple[schema.Manifest, dict[str, bytes]]:
    """A bundle's manifest, and its objects by entry name."""
    entries = {name: bytes(view) for name, view in schema.read(path.read_bytes(), str(path)).items()}
    return schema.decode(entries.pop("manifest.json"), str(path)), entries
