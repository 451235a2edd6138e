"""What runs in a compiling process.

Importing this module does not import Triton: the process's environment must be made clean first, since
Triton reads parts of it when it is imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from fp8_aot.aot.toolchain import clean_environment
from fp8_aot.loader.schema import Scratch


class Request(msgspec.Struct, frozen=True):
    """All that decides a cell's binary, as plain data: it crosses to worker processes and is a cache key."""

    source: str
    source_sha256: str
    backend: str
    arch: int | str
    warp_size: int
    signature: dict[str, str]
    constexprs: dict[str, int | float]
    aligned: tuple[str, ...]
    options: dict[str, int | bool]
    triton: str
    assembler: str | None

    @property
    def key(self) -> str:
        """Digest of what decides the binary: the function's content, not the name of a spec that has it."""
        content = msgspec.structs.replace(self, source="")
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


class Compiled(msgspec.Struct, frozen=True):
    """A compiled cell: the object and the fields of Triton's metadata that a launch needs.

    ``seconds`` is how long the compiler took, 0 where the cache answered.
    """

    object: bytes
    symbol: str
    num_warps: int
    shared: int
    global_scratch: Scratch
    profile_scratch: Scratch
    tensordesc: tuple[dict[str, Any], ...]
    seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True):
    """A cell that did not compile: the compiler's message, and the traceback for ``--debug``."""

    message: str
    traceback: str


def prepare(scratch: Path) -> None:
    """Make this process fit to compile: a clean environment, and a folder of its own below ``scratch``.

    The parent removes ``scratch``: this process may be killed at any moment.
    """
    for name, value in clean_environment(Path(tempfile.mkdtemp(dir=scratch))).items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    tempfile.tempdir = None  # it is read from TMPDIR once
    # Compilers print; standard output is the command's own.
    os.dup2(sys.__stderr__.fileno() if sys.__stderr__ else 2, 1)


def compile_request(job: Request) -> Compiled | Failed:
    """Compile, in this process."""
    start = time.perf_counter()
    try:
        result = compiled(triton_compile(job))
        return msgspec.structs.replace(result, seconds=time.perf_counter() - start)
    # Compilers raise errors of any type, some of which cannot be pickled: what they say is kept.
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())


def triton_compile(job: Request) -> Any:
    """Triton's ``CompiledKernel`` of a request."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8_aot.aot.matrix import resolve

    spec = resolve(job.source)
    names = list(job.signature)
    source = ASTSource(
        spec.fn,
        job.signature | dict.fromkeys(job.constexprs, "constexpr"),
        {(len(names) + i,): value for i, value in enumerate(job.constexprs.values())},
        {(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned},
    )
    target = GPUTarget(job.backend, job.arch, job.warp_size)
    return triton.compile(source, target=target, options=job.options)


def compiled(kernel: Any) -> Compiled:
    """What is kept of Triton's ``CompiledKernel``; its metadata holds absolute paths, so not all of it."""
    metadata = kernel.metadata

    def scratch(name: str) -> Scratch:
        return Scratch(getattr(metadata, f"{name}_size", 0), getattr(metadata, f"{name}_align", 1))

    return Compiled(
        object=kernel.asm["cubin" if "cubin" in kernel.asm else "hsaco"],
        symbol=metadata.name,
        num_warps=metadata.num_warps,
        shared=metadata.shared,
        global_scratch=scratch("global_scratch"),
        profile_scratch=scratch("profile_scratch"),
        tensordesc=tuple(getattr(metadata, "tensordesc_meta", None) or ()),
    )
