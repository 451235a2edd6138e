"""Reading GPU objects, CUDA cubins and AMD code objects, without a GPU or a vendor's tool.

What is read is what a launch depends on: the target, and per kernel its parameters and its resources.
AMD documents its format (LLVM's "User Guide for AMDGPU Backend").  NVIDIA does not: what is known here of
cubins holds for the output of ptxas 12.8, 12.9 and 13.4, and a test compares it with ``cuobjdump``.
"""

from __future__ import annotations

import struct

from elftools.common.exceptions import ELFParseError

from fp8_aot.aot.elf.amd import read_amd
from fp8_aot.aot.elf.container import Elf, ElfError, KernelInfo, ObjectInfo
from fp8_aot.aot.elf.cuda import read_cuda

__all__ = ["ElfError", "KernelInfo", "ObjectInfo", "read_object"]


def read_object(data: bytes) -> ObjectInfo:
    """Read a cubin or an AMD code object.

    The time taken is linear in the size of ``data``, whatever it holds.

    Raises:
        ElfError: it is not one, it is damaged, or it is of a format version that is not known.
    """
    try:
        elf = Elf(data)
        if elf.machine == "EM_CUDA":
            return read_cuda(elf)
        if elf.machine == "EM_AMDGPU":
            return read_amd(elf)
    except (ELFParseError, struct.error, UnicodeDecodeError) as error:
        raise ElfError(f"damaged object: {error}") from error
    raise ElfError(f"not a GPU object: ELF machine {elf.machine}, expected EM_CUDA or EM_AMDGPU")
