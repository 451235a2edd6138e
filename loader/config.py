"""What the user chose: the mode, and where to look for bundles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct, structs

Mode = Literal["strict", "warn", "jit"]


class Settings(Struct, frozen=True):
    """``mode``: on a miss raise (``strict``) or warn and use the JIT (``warn``); ``jit`` never looks at
    a bundle's objects.  ``bundle_path``: bundle files or folders of them, searched before all else."""

    mode: Mode
    bundle_path: tuple[Path, ...]


_settings: Settings | None = None


def settings() -> Settings:
    """The settings in force: ``configure``'s, else ``FP8_AOT_MODE``'s, else ``warn``.

    Raises:
        ValueError: ``FP8_AOT_MODE`` is not a mode.
    """
    global _settings
    if _settings is None:
        _settings = Settings(_mode(os.environ.get("FP8_AOT_MODE") or "warn", "FP8_AOT_MODE"), ())
    return _settings


def update(mode: str | None, bundle_path: str | os.PathLike[str] | None) -> None:
    """Change settings; None leaves one as it is.

    Raises:
        TypeError: ``bundle_path`` is no path.
        ValueError: ``mode`` is not a mode.
    """
    global _settings
    changed = (
        settings() if mode is None else structs.replace(_settings or Settings("warn", ()), mode=_mode(mode, "mode"))
    )
    if bundle_path is not None:
        if not isinstance(bundle_path, (str, os.PathLike)):
            raise TypeError(f"bundle_path is a {type(bundle_path).__name__}, expected a path")
        changed = structs.replace(changed, bundle_path=_paths(os.fspath(bundle_path)))
    _settings = changed


def environment_path() -> tuple[Path, ...]:
    """The bundles and folders that ``FP8_AOT_BUNDLE_PATH`` names."""
    return _paths(os.environ.get("FP8_AOT_BUNDLE_PATH", ""))


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part) for part in text.split(os.pathsep) if part)


def _mode(value: str, name: str) -> Mode:
    for mode in get_args(Mode):
        if value == mode:
            return mode  # type: ignore[no-any-return]
    raise ValueError(f"{name} is {value!r}, expected one of {', '.join(get_args(Mode))}")
