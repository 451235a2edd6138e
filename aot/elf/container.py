"""The ELF container, and what is read from it: the part that both vendors share."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

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


_MAX_NAME = 4096
"""Bytes that a name may have; without a limit, overlapping names could make reading quadratic."""


class Elf:
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


def check_params(symbol: str, params: tuple[tuple[int, int], ...], total: int) -> None:
    """Raise unless parameters are in order, apart and inside a buffer of ``total`` bytes."""
    end = 0
    for offset, size in params:
        if offset < end or not size:
            raise ElfError(f"damaged object: kernel {symbol} has overlapping or empty parameters {params}")
        end = offset + size
    if end > total:
        raise ElfError(f"damaged object: kernel {symbol} has parameters {params} in {total} bytes")


def by_symbol(kernels: dict[str, KernelInfo]) -> tuple[KernelInfo, ...]:
    """The kernels in order of their symbols; an object without any is an error."""
    if not kernels:
        raise ElfError("no kernel in the object")
    return tuple(kernels[name] for name in sorted(kernels))
