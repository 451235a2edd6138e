"""CUDA cubins: what is known of their format holds for the output of ptxas 12.8, 12.9 and 13.4."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

from fp8_aot.aot.elf.container import Elf, ElfError, KernelInfo, ObjectInfo, by_symbol, check_params

_STO_CUDA_ENTRY = 0x10

# Attributes of .nv.info sections (EIATTR_*), and one of .nv.compat (EICOMPAT_ATTR_*).
_MAX_THREADS, _REQNTID = 0x05, 0x10
_FRAME_SIZE, _REGCOUNT = 0x11, 0x2F
_KPARAM_INFO, _KPARAM_INFO_V2 = 0x17, 0x45
_CBANK_PARAM_SIZE = 0x19
_COMPAT_ACCELERATOR_TARGET = 0x09

# Formats of attributes (EIFMT_*): no value, a byte, two bytes, a block of bytes with its length.
_NVAL, _BVAL, _HVAL, _SVAL = 1, 2, 3, 4

_RESERVED_SHARED = 1024
"""Bytes of shared memory at the start of each block that the system has for itself, from sm_90 on."""


def read_cuda(elf: Elf) -> ObjectInfo:
    arch = _cuda_arch(elf)
    info = elf.by_name.get(".nv.info")
    if info is None:
        raise ElfError("damaged object: no section .nv.info")
    per_symbol: dict[tuple[int, int], int] = {}
    for attribute, value in _attributes(elf, info):
        if attribute in (_REGCOUNT, _FRAME_SIZE) and isinstance(value, bytes):
            index, number = struct.unpack("<II", value)
            per_symbol[attribute, index] = number
    kernels: dict[str, KernelInfo] = {}
    for index, other, name in elf.functions():
        if not other & _STO_CUDA_ENTRY:
            continue
        if name in kernels:
            raise ElfError(f"damaged object: two kernels named {name}")
        try:
            registers, frame = per_symbol[_REGCOUNT, index], per_symbol[_FRAME_SIZE, index]
        except KeyError:
            raise ElfError(f"damaged object: no register count or frame size of kernel {name}") from None
        kernels[name] = _cuda_kernel(elf, name, registers, frame)
    return ObjectInfo("cuda", arch, by_symbol(kernels))


def _cuda_arch(elf: Elf) -> str:
    if elf.abi_version == 7:  # up to ptxas 12.9, below sm_100
        number, specific = elf.flags & 0xFF, bool(elf.flags & 0x800)
    elif elf.abi_version == 8:
        number, specific = elf.flags >> 8 & 0xFF, bool(elf.flags & 0x8)
        # ptxas 13 leaves that flag out and records the same in a section.
        compat = elf.by_name.get(".nv.compat")
        if compat is not None:
            specific |= (_COMPAT_ACCELERATOR_TARGET, 1) in _attributes(elf, compat)
    else:
        raise ElfError(f"unknown version of the cubin format: ABI {elf.abi_version}, expected 7 or 8")
    return f"{number}a" if specific else str(number)


def _cuda_kernel(elf: Elf, name: str, registers: int, frame: int) -> KernelInfo:
    info = elf.by_name.get(f".nv.info.{name}")
    if info is None:
        raise ElfError(f"damaged object: no section .nv.info.{name}")
    params: dict[int, tuple[int, int]] = {}
    size = 0
    threads: dict[int, int] = {}
    for attribute, value in _attributes(elf, info):
        if attribute == _CBANK_PARAM_SIZE and isinstance(value, int):
            size = value
        elif attribute in (_KPARAM_INFO, _KPARAM_INFO_V2) and isinstance(value, bytes):
            _, ordinal, offset, word = struct.unpack("<IHHI", value)
            if ordinal in params:
                raise ElfError(f"damaged object: kernel {name} has two parameters {ordinal}")
            # The older form has the size in the upper 14 bits, below it alignment and address space.
            params[ordinal] = (offset, word >> 18 if attribute == _KPARAM_INFO else word)
        elif attribute in (_MAX_THREADS, _REQNTID) and isinstance(value, bytes):
            threads[attribute] = math.prod(struct.unpack("<III", value))
    if sorted(params) != list(range(len(params))):
        raise ElfError(f"damaged object: kernel {name} has parameters {sorted(params)}, some are missing")
    ordered = tuple(params[i] for i in range(len(params)))
    check_params(name, ordered, size)
    if size != (sum(ordered[-1]) if ordered else 0):
        raise ElfError(f"damaged object: kernel {name} has {size} bytes of parameters, known are {ordered}")
    return KernelInfo(
        symbol=name,
        params=ordered,
        registers=registers,
        spills=frame,
        static_shared=_cuda_shared(elf, name),
        max_threads=threads.get(_REQNTID, threads.get(_MAX_THREADS)),
    )


def _cuda_shared(elf: Elf, name: str) -> int:
    section = elf.by_name.get(f".nv.shared.{name}")
    size: int = section["sh_size"] if section else 0
    # A limit on shared memory per block, in the driver and in CUDA's tables, does not count what is reserved.
    return max(0, size - _RESERVED_SHARED) if ".nv.shared.reserved.0" in elf.by_name else size


def _attributes(elf: Elf, section: dict[str, Any]) -> Iterator[tuple[int, int | bytes]]:
    """Attribute numbers and values of a .nv.info section: an integer, or bytes where it is a block."""
    data, at = elf.contents(section), 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SVAL:
            if at + value > len(data):
                raise ElfError(f"damaged object: attribute {attribute:#x} overruns {section['name']}")
            yield attribute, data[at : at + value]
            at += value
        elif form in (_NVAL, _BVAL, _HVAL):
            yield attribute, value & 0xFF if form == _BVAL else value
        else:
            raise ElfError(f"damaged object: attribute format {form} in {section['name']}, expected 1 to 4")
