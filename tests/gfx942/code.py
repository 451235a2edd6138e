"""Code objects: the kernel descriptor, and the instructions from its entry on."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

from elftools.elf.elffile import ELFFile
from tinygrad.renderer.amd import decode_inst

PRELOAD_ENTRY = 256
"""Firmware that has put arguments in registers starts this many bytes later."""


@dataclass(frozen=True)
class Code:
    """A kernel of a code object.

    Attributes:
        instructions: address, relative to the entry, and tinygrad's instruction, in order.
        kernarg_size: bytes of arguments.
        lds: bytes of LDS besides those of the launch.
        mode: the MODE register's float bits.
        preload: how many dwords of arguments firmware may put in registers.
        user_sgprs: how many registers are set before the workgroup's index.
    """

    instructions: tuple[tuple[int, Any], ...]
    kernarg_size: int
    lds: int
    mode: int
    preload: int
    user_sgprs: int


def load(image: bytes, symbol: str) -> Code:
    """Read a kernel.

    Raises:
        NotImplementedError: its initial registers are not those that our kernels get.
    """
    elf = ELFFile(io.BytesIO(image))
    symbols = {s.name: s for s in elf.get_section_by_name(".dynsym").iter_symbols()}
    descriptor = _contents(elf, symbols[f"{symbol}.kd"]["st_value"], 64)
    lds, scratch, kernarg_size = struct.unpack_from("<III", descriptor, 0)
    (entry,) = struct.unpack_from("<q", descriptor, 16)
    rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIHH", descriptor, 48)
    function = symbols[symbol]
    if symbols[f"{symbol}.kd"]["st_value"] + entry != function["st_value"]:
        raise NotImplementedError("the entry is not the function's first byte")
    # Only the pointer to the arguments, and the first workgroup index; work-item indices in one register.
    if scratch or properties != 1 << 3 or rsrc2 & 0b1_1111_1000_0000 != 1 << 7 or preload >> 7:
        raise NotImplementedError(f"scratch {scratch}, properties {properties:#x}, rsrc2 {rsrc2:#x}")
    data = _contents(elf, function["st_value"], function["st_size"])
    instructions, at = [], 0
    while at < len(data):
        instruction = decode_inst(data[at : at + 16], "cdna")
        instructions.append((at, instruction))
        at += instruction.size()
    return Code(
        instructions=tuple(instructions),
        kernarg_size=kernarg_size,
        lds=lds,
        mode=rsrc1 >> 12 & 0xFF,
        preload=preload,
        user_sgprs=rsrc2 >> 1 & 31,
    )


def _contents(elf: ELFFile, address: int, size: int) -> bytes:
    for section in elf.iter_sections():
        start = section["sh_addr"]
        if section["sh_type"] == "SHT_PROGBITS" and start <= address < start + section["sh_size"]:
            found: bytes = section.data()[address - start :][:size]
            return found
    raise ValueError(f"no section holds {address:#x}")
