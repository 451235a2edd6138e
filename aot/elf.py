"""Reading GPU objects, CUDA cubins and AMD code objects, without a GPU or a vendor's tool.

What is read is what a launch depends on: the target, and per kernel its parameters and its resources.
AMD documents its format (LLVM's "User Guide for AMDGPU Backend").  NVIDIA does not: what is known here of
cubins holds for the output of ptxas 12.8, 12.9 and 13.4, and a test compares it with ``cuobjdump``.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from elftools.common.exceptions import ELFParseError
from elftools.common.utils import struct_parse
from elftools.elf.structs import ELFStructs


class ElfError(ValueError):
    """The bytes are not a GPU object that this module can read."""


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of an object.

    ``params``: (offset, size) in bytes of each parameter in order, from the start of the parameter buffer;
    on AMD without the hidden ones, which the runtime fills in.
    ``registers``: per thread; on AMD the vector registers, accumulation registers included.
    ``spills``: bytes of local memory per thread, of any use.  On AMD, a kernel that has none but spills
    registers to lanes of others counts 4 bytes for each.
    ``static_shared``: bytes of shared memory (LDS) that the object itself declares.
    ``max_threads``: the largest block that the kernel was compiled for; None if any.
    """

    symbol: str
    params: tuple[tuple[int, int], ...]
    registers: int
    spills: int
    static_shared: int
    max_threads: int | None


Feature = Literal["unsupported", "any", "off", "on"]


@dataclass(frozen=True)
class ObjectInfo:
    """An object: its target and its kernels, sorted by symbol.

    ``arch`` is ``"90a"`` or ``"gfx942"``: the suffix of an architecture-specific CUDA target is part of it
    (a family-specific one, ``100f``, leaves no trace in a cubin and reads as ``"100"``).
    ``xnack`` and ``sramecc`` say what the object needs of these two settings of an AMD GPU; None on CUDA.
    """

    backend: Literal["cuda", "hip"]
    arch: str
    kernels: tuple[KernelInfo, ...]
    xnack: Feature | None = None
    sramecc: Feature | None = None


def read_object(data: bytes) -> ObjectInfo:
    """Read a cubin or an AMD code object.

    The time taken is linear in the size of ``data``, whatever it holds.

    Raises:
        ElfError: it is not one, it is damaged, or it is of a format version that is not known.
    """
    try:
        elf = _Elf(data)
        if elf.machine == "EM_CUDA":
            return _read_cuda(elf)
        if elf.machine == "EM_AMDGPU":
            return _read_amd(elf)
    except (ELFParseError, struct.error, UnicodeDecodeError) as error:
        raise ElfError(f"damaged object: {error}") from error
    raise ElfError(f"not a GPU object: ELF machine {elf.machine}, expected EM_CUDA or EM_AMDGPU")


# ------------------------------------------------------------------------------------------------- ELF

_MAX_NAME = 4096
"""Bytes that a name may have; without a limit, overlapping names could make reading quadratic."""


class _Elf:
    """The header and sections of a 64-bit little-endian ELF file, bounds checked.

    pyelftools' ``ELFFile`` trusts sizes and links in a file, and so can recurse or allocate without limit on
    a damaged one; only its structure definitions are used.
    """

    def __init__(self, data: bytes) -> None:
        if data[:4] != b"\x7fELF":
            raise ElfError(f"not an ELF file: starts with {data[:4]!r}, {len(data)} bytes in all")
        if data[4:7] != b"\x02\x01\x01":
            raise ElfError(f"not a 64-bit little-endian ELF file: identification {data[:7].hex()}")
        self.data = data
        self._unread = len(data)
        self._stream = io.BytesIO(data)
        self._structs = ELFStructs(little_endian=True, elfclass=64)
        self._structs.create_basic_structs()
        self._structs.create_advanced_structs()
        header = self.parse("Elf_Ehdr", 0)
        self.machine: str | int = header["e_machine"]
        self.flags: int = header["e_flags"]
        self.abi_version: int = header["e_ident"]["EI_ABIVERSION"]
        self._check_range("program headers", header["e_phoff"], header["e_phnum"] * header["e_phentsize"])
        self.sections = self._read_sections(header)
        self.by_name = {section["name"]: section for section in self.sections}

    def _read_sections(self, header: Any) -> list[dict[str, Any]]:
        offset, count, size = header["e_shoff"], header["e_shnum"], header["e_shentsize"]
        self._check_range("section headers", offset, count * size)
        if size != self._structs.Elf_Shdr.sizeof() or header["e_shstrndx"] >= count:
            raise ElfError(f"damaged object: {count} section headers of {size} bytes, names in {header['e_shstrndx']}")
        sections = [dict(self.parse("Elf_Shdr", offset + i * size)) for i in range(count)]
        for i, section in enumerate(sections):
            if section["sh_type"] in ("SHT_NULL", "SHT_NOBITS"):
                section["stored"] = 0
            else:
                section["stored"] = section["sh_size"]
                self._check_range(f"section {i}", section["sh_offset"], section["sh_size"])
        for section in sections:
            section["name"] = self.string(sections[header["e_shstrndx"]], section["sh_name"])
        return sections

    def _check_range(self, what: str, offset: int, size: int) -> None:
        if offset + size > len(self.data):
            raise ElfError(
                f"truncated object: {what} should be at bytes {offset} to {offset + size}, there are {len(self.data)}"
            )

    def parse(self, structure: str, offset: int) -> Any:
        """The structure of that name in pyelftools at an offset in the file."""
        return struct_parse(getattr(self._structs, structure), self._stream, offset)

    def contents(self, section: dict[str, Any]) -> bytes:
        """The stored bytes of a section; to be asked for once, so that what is read overlaps nowhere."""
        self._unread -= section["stored"]
        if self._unread < 0:
            raise ElfError("damaged object: sections overlap")
        start: int = section["sh_offset"]
        return self.data[start : start + section["stored"]]

    def string(self, table: dict[str, Any], index: int) -> str:
        """The string at an index of a string table."""
        start = table["sh_offset"] + index
        end = table["sh_offset"] + table["stored"]
        stop = self.data.find(b"\0", start, min(end, start + _MAX_NAME)) if start < end else -1
        if stop < 0:
            raise ElfError(f"damaged object: no string at {index} of a table of {table['stored']} bytes")
        return self.data[start:stop].decode()

    def functions(self) -> Iterator[tuple[int, int, str]]:
        """Index, ``st_other`` and name of each function in the symbol table."""
        table = self.by_name.get(".symtab")
        if table is None or table["sh_link"] >= len(self.sections):
            raise ElfError("damaged object: no symbol table, or one without names")
        strings, size = self.sections[table["sh_link"]], self._structs.Elf_Sym.sizeof()
        for i in range(table["stored"] // size):
            offset = table["sh_offset"] + i * size
            symbol = self.parse("Elf_Sym", offset)
            if symbol["st_info"]["type"] == "STT_FUNC":
                # pyelftools drops the bits of st_other that it does not know; CUDA's are among them.
                yield i, self.data[offset + 5], self.string(strings, symbol["st_name"])


def _check_params(symbol: str, params: tuple[tuple[int, int], ...], total: int) -> None:
    """Raise unless parameters are in order, apart and inside a buffer of ``total`` bytes."""
    end = 0
    for offset, size in params:
        if offset < end or not size:
            raise ElfError(f"damaged object: kernel {symbol} has overlapping or empty parameters {params}")
        end = offset + size
    if end > total:
        raise ElfError(f"damaged object: kernel {symbol} has parameters {params} in {total} bytes")


# ------------------------------------------------------------------------------------------------ CUDA

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


def _read_cuda(elf: _Elf) -> ObjectInfo:
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
    return ObjectInfo("cuda", arch, _sorted(kernels))


def _cuda_arch(elf: _Elf) -> str:
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


def _cuda_kernel(elf: _Elf, name: str, registers: int, frame: int) -> KernelInfo:
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
    _check_params(name, ordered, size)
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


def _cuda_shared(elf: _Elf, name: str) -> int:
    section = elf.by_name.get(f".nv.shared.{name}")
    size: int = section["sh_size"] if section else 0
    # A limit on shared memory per block, in the driver and in CUDA's tables, does not count what is reserved.
    return max(0, size - _RESERVED_SHARED) if ".nv.shared.reserved.0" in elf.by_name else size


def _attributes(elf: _Elf, section: dict[str, Any]) -> Iterator[tuple[int, int | bytes]]:
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


# ------------------------------------------------------------------------------------------------- AMD

_NT_AMDGPU_METADATA = 32

# EF_AMDGPU_MACH of e_flags: GPUs, and families of them, from GCN5 on.
# fmt: off
_AMD_ARCHS = {
    0x2C: "gfx900", 0x2D: "gfx902", 0x2E: "gfx904", 0x2F: "gfx906", 0x30: "gfx908", 0x31: "gfx909",
    0x32: "gfx90c", 0x33: "gfx1010", 0x34: "gfx1011", 0x35: "gfx1012", 0x36: "gfx1030", 0x37: "gfx1031",
    0x38: "gfx1032", 0x39: "gfx1033", 0x3D: "gfx1035", 0x3E: "gfx1034", 0x3F: "gfx90a", 0x41: "gfx1100",
    0x42: "gfx1013", 0x43: "gfx1150", 0x44: "gfx1103", 0x45: "gfx1036", 0x46: "gfx1101", 0x47: "gfx1102",
    0x48: "gfx1200", 0x49: "gfx1250", 0x4A: "gfx1151", 0x4C: "gfx942", 0x4E: "gfx1201", 0x4F: "gfx950",
    0x50: "gfx1310", 0x51: "gfx9-generic", 0x52: "gfx10-1-generic", 0x53: "gfx10-3-generic",
    0x54: "gfx11-generic", 0x55: "gfx1152", 0x58: "gfx1153", 0x59: "gfx12-generic", 0x5A: "gfx1251",
    0x5D: "gfx1170", 0x5F: "gfx9-4-generic",
}
# fmt: on

_FEATURES: tuple[Feature, ...] = ("unsupported", "any", "off", "on")

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _Argument(msgspec.Struct):
    offset: _Count = msgspec.field(name=".offset")
    size: _Count = msgspec.field(name=".size")
    kind: str = msgspec.field(name=".value_kind")


class _Kernel(msgspec.Struct):
    name: str = msgspec.field(name=".name")
    kernarg_size: _Count = msgspec.field(name=".kernarg_segment_size")
    shared: _Count = msgspec.field(name=".group_segment_fixed_size")
    private: _Count = msgspec.field(name=".private_segment_fixed_size")
    vgprs: _Count = msgspec.field(name=".vgpr_count")
    max_threads: _Count = msgspec.field(name=".max_flat_workgroup_size")
    arguments: list[_Argument] = msgspec.field(name=".args", default_factory=list)
    vgpr_spills: _Count = msgspec.field(name=".vgpr_spill_count", default=0)
    sgpr_spills: _Count = msgspec.field(name=".sgpr_spill_count", default=0)


class _Metadata(msgspec.Struct):
    target: str = msgspec.field(name="amdhsa.target")
    kernels: list[_Kernel] = msgspec.field(name="amdhsa.kernels")


def _read_amd(elf: _Elf) -> ObjectInfo:
    # ABI versions 2 to 4 are code object versions 4 to 6, which agree in all that is read here.
    if elf.abi_version not in (2, 3, 4):
        raise ElfError(f"unknown AMD code object version: ABI {elf.abi_version}, expected 2, 3 or 4")
    arch = _AMD_ARCHS.get(elf.flags & 0xFF)
    if arch is None:
        raise ElfError(f"unknown AMD GPU: machine 0x{elf.flags & 0xFF:x} in the ELF flags")
    try:
        metadata = msgspec.msgpack.decode(_amd_note(elf), type=_Metadata)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ElfError(f"damaged object: AMD metadata: {error}") from error
    # "amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-", or "amdgpu9.42-amd-amdhsa-unknown-gfx942".
    named = metadata.target.partition(":")[0]
    if not named.endswith(f"-{arch}"):
        raise ElfError(f"damaged object: ELF flags say {arch}, the metadata {metadata.target!r}")
    kernels: dict[str, KernelInfo] = {}
    for kernel in metadata.kernels:
        if kernel.name in kernels:
            raise ElfError(f"damaged object: two kernels named {kernel.name}")
        kernels[kernel.name] = _amd_kernel(kernel)
    xnack, sramecc = _FEATURES[elf.flags >> 8 & 3], _FEATURES[elf.flags >> 10 & 3]
    return ObjectInfo("hip", arch, _sorted(kernels), xnack, sramecc)


def _amd_note(elf: _Elf) -> bytes:
    for section in elf.sections:
        if section["sh_type"] != "SHT_NOTE":
            continue
        data, at = elf.contents(section), 0
        while at < len(data):
            name_size, size, kind = struct.unpack_from("<III", data, at)
            name = data[at + 12 : at + 12 + name_size]
            at += 12 + _round_up(name_size)
            if at + size > len(data):
                raise ElfError(f"damaged object: a note overruns {section['name']}")
            if name == b"AMDGPU\0" and kind == _NT_AMDGPU_METADATA:
                return data[at : at + size]
            at += _round_up(size)
    raise ElfError("damaged object: no AMDGPU metadata note")


def _round_up(size: int) -> int:
    return -(-size // 4) * 4


def _amd_kernel(kernel: _Kernel) -> KernelInfo:
    params = tuple((a.offset, a.size) for a in kernel.arguments if not a.kind.startswith("hidden_"))
    _check_params(kernel.name, params, kernel.kernarg_size)
    return KernelInfo(
        symbol=kernel.name,
        params=params,
        registers=kernel.vgprs,
        spills=kernel.private or 4 * (kernel.vgpr_spills + kernel.sgpr_spills),
        static_shared=kernel.shared,
        max_threads=kernel.max_threads,
    )


def _sorted(kernels: dict[str, KernelInfo]) -> tuple[KernelInfo, ...]:
    if not kernels:
        raise ElfError("no kernel in the object")
    return tuple(kernels[name] for name in sorted(kernels))
