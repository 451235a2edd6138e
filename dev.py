#!/usr/bin/env python3
"""Build or test fp8-aot on a fresh machine that has nothing but Python and pip's package index.

    python3 dev.py build [arguments of `fp8-aot build`]
    python3 dev.py test [arguments of pytest]

Both work in ``.venv`` beside this file, which is made, and made anew when ``pyproject.toml`` changes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"

TORCH = "torch==2.13.0"
TORCHAO = "torchao==0.18.0"


class DevError(Exception):
    """Something that the user has to know, in one line."""


def main(args: list[str]) -> int:
    """Run a command of this file; gives its exit status."""
    if not args or args[0] not in COMMANDS:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 0 if args and args[0] in ("-h", "--help") else 2
    try:
        if sys.version_info < (3, 11):  # noqa: UP036 - older ones run this file, to be told
            raise DevError(f"needs Python 3.11 or newer, this is {sys.version.split()[0]} ({sys.executable})")
        return COMMANDS[args[0]](args[1:])
    except DevError as error:
        print(f"dev.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build(args: list[str]) -> int:
    """Build the bundles."""
    prepare("build", [[triton()], ["-e", ".[build]"]])
    return run(VENV / "bin" / "fp8-aot", "build", *args)


def test(args: list[str]) -> int:
    """Lint, check types, and run every test that needs no GPU; pytest comes last."""
    # Triton comes in a call of its own: the one that a torch for CUDA wants is another.
    prepare("test", [[TORCH, "numpy"], [triton()], ["-e", ".[build,test]"], [TORCHAO, "--no-deps"]])
    checks = [
        run(PYTHON, "-m", "ruff", "check", "."),
        run(PYTHON, "-m", "ruff", "format", "--check", "."),
        run(PYTHON, "-m", "mypy", "--strict", "loader", "aot", PYTHONPATH=str(sources())),
        run(PYTHON, "-m", "pytest", "-n", "auto", "--ignore", "tests/gpu", *args),
    ]
    return next((status for status in reversed(checks) if status), 0)


COMMANDS = {"build": build, "test": test}


def triton() -> str:
    """The requirement for the Triton that the matrix names."""
    import tomllib

    version = tomllib.loads((ROOT / "build_matrix.toml").read_text())["toolchain"]["triton"]
    return f"triton=={version}"


def prepare(name: str, installs: list[list[str]]) -> None:
    """Make ``.venv`` ready for a command, unless it is.

    Raises:
        DevError: the environment cannot be made, or pip failed.
    """
    wanted = hashlib.sha256(
        (ROOT / "pyproject.toml").read_bytes() + repr((sys.version_info[:2], installs)).encode()
    ).hexdigest()
    stamp = VENV / f"fp8-aot-for-{name}"
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    create()
    # Half an installation is none, and what one command installs may change what another did.
    for other in VENV.glob("fp8-aot-for-*"):
        other.unlink()
    for packages in installs:
        print(f"dev.py: pip install {' '.join(packages)}", file=sys.stderr, flush=True)
        if run(PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages, stdout=sys.stderr):
            raise DevError(f"pip could not install {' '.join(packages)}: see its message above")
    stamp.write_text(wanted)


def sources() -> Path:
    """A folder that holds the package as type checkers find it: they do not see editable installs."""
    folder = VENV / "sources"
    for name in ("aot", "kernels", "loader"):
        link = folder / "fp8_aot" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    return folder


def create() -> None:
    """Create ``.venv``, empty, where there is none that works or the project has changed."""
    key = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr(sys.version_info[:2]).encode()).hexdigest()
    stamp = VENV / "fp8-aot-project"
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == key:
        return
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError as error:
        # Debian and its descendants pack these modules apart from Python.
        raise DevError(f"this Python has no {error.name}: install python3-venv") from None
    print(f"dev.py: creating {VENV}", file=sys.stderr, flush=True)
    try:
        venv.create(VENV, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DevError(f"cannot create {VENV}: {error}") from None
    stamp.write_text(key)


def run(*command: str | Path, stdout: Any = None, **variables: str) -> int:
    """Run a program in the checkout, without input, ``variables`` in its environment; gives its exit status."""
    # What a caller set for its own Python must not reach into the environment.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    env |= {"VIRTUAL_ENV": str(VENV), **variables}
    sys.stdout.flush()
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            check=False,
        )
    except OSError as error:
        raise DevError(f"cannot run {command[0]}: {error.strerror}") from None
    return int(done.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
