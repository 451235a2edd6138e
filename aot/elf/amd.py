"""AMD code objects, as LLVM's "User Guide for AMDGPU Backend" describes them."""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from fp8_aot.aot.elf.container import Elf, ElfError, Feature, KernelInfo, ObjectInfo, by_symbol, check_params

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


def read_amd(elf: Elf) -> ObjectInfo:
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
    return ObjectInfo("hip", arch, by_symbol(kernels), xnack, sramecc)


def _amd_note(elf: Elf) -> bytes:
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
    check_params(kernel.name, params, kernel.kernarg_size)
    return KernelInfo(
        symbol=kernel.name,
        params=params,
        registers=kernel.vgprs,
        spills=kernel.private or 4 * (kernel.vgpr_spills + kernel.sgpr_spills),
        static_shared=kernel.shared,
        max_threads=kernel.max_threads,
    )
