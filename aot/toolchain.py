"""Which Triton and which assembler are installed, and whether they are the ones the matrix asks for."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from fp8_aot.aot.errors import UsageError
from fp8_aot.aot.targets import Target
from fp8_aot.loader.schema import Assembler, Toolchain

# What Triton, its LLVM and ptxas read from the environment: triton/knobs.py, and the names in libtriton.
_PREFIXES = ("TRITON_", "LLVM_", "MLIR_", "AMDGCN_", "NVPTX_", "PTXAS_")
_OTHER = frozenset({"DISABLE_PTXAS_OPT", "DISABLE_LLVM_OPT", "USE_IR_LOC", "ALLOW_LHS_TMEM_LAYOUT_CONVERSION"})
_KEEP = frozenset({"TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_HOME"})


def clean_environment(scratch: Path) -> dict[str, str]:
    """Changes to a compiling process's environment: what could alter a binary goes, line info too.

    Values are the new ones, ``""`` stands for removal.  Line info would make a binary depend on the path
    of its source.  Caches and temporary files go to ``scratch``.
    """
    changes = {name: "" for name in os.environ if (name.startswith(_PREFIXES) and name not in _KEEP) or name in _OTHER}
    return changes | {
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TMPDIR": str(scratch),
    }


@functools.cache
def triton_version() -> str:
    """The installed Triton's version.

    Raises:
        UsageError: Triton is not installed.
    """
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("Triton is not installed: pip install 'fp8-aot[build]'") from None


def check_versions(targets: Iterable[Target], allow_mismatch: bool) -> None:
    """Check that the installed Triton is the one that the matrix names for each target.

    Raises:
        UsageError: it is another one, and a mismatch is not allowed.
    """
    installed = triton_version()
    for target in targets:
        if not _same(installed, target.triton) and not allow_mismatch:
            raise UsageError(
                f"the matrix builds {target.name} with Triton {target.triton}, installed is {installed}: "
                f"pip install triton=={target.triton}, or pass --allow-toolchain-mismatch"
            )


def _same(installed: str, wanted: str) -> bool:
    try:
        # A local build of a release (3.9.0+git...) is not that release.
        return Version(installed) == Version(wanted)
    except InvalidVersion:
        return installed == wanted


@functools.cache
def toolchain(target: Target) -> Toolchain:
    """The toolchain that compiles for a target on this machine."""
    assembler = _ptxas(target) if target.backend == "cuda" else _llvm()
    return Toolchain(triton_version(), assembler, target.min_driver(assembler.version))


def _ptxas(target: Target) -> Assembler:
    from triton.backends.nvidia import compiler

    try:
        tool = compiler.get_ptxas(int(target.arch))
        output = subprocess.run([tool.path, "--version"], capture_output=True, text=True, check=True).stdout
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"ptxas for {target.name} cannot be run: {error}") from None
    match = re.search(r"release [\d.]+, V([\d.]+)", output)
    if match is None:
        raise UsageError(f"{tool.path} --version says {output.strip()!r}, expected a ptxas release")
    return Assembler("ptxas", match.group(1), hashlib.sha256(Path(tool.path).read_bytes()).hexdigest())


def _llvm() -> Assembler:
    # Triton links LLVM and lld into its own library: there is no program to name or digest.
    return Assembler("LLVM in Triton", triton_version(), None)
