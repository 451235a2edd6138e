"""What the builder knows of GPU targets, beyond what a matrix says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fp8 = Literal["e4m3fn", "e4m3fnuz"]

TRITON_TYPES = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "e4m3fn": "fp8e4nv",
    "e4m3fnuz": "fp8e4b8",
}
"""Our dtype names and Triton's."""

# Shared memory that one CTA can use, in bytes: CUDA C++ Programming Guide, technical specifications per
# compute capability; AMD CDNA3 and CDNA4 ISA documents (LDS per workgroup).
_MAX_SHARED: dict[tuple[str, str], int] = {
    ("cuda", "80"): 166_912,
    ("cuda", "86"): 101_376,
    ("cuda", "89"): 101_376,
    ("cuda", "90"): 232_448,
    ("cuda", "100"): 232_448,
    ("cuda", "103"): 232_448,
    ("cuda", "120"): 101_376,
    ("hip", "gfx90a"): 65_536,
    ("hip", "gfx942"): 65_536,
    ("hip", "gfx950"): 163_840,
}

# The least driver whose CUDA knows the architecture (major * 1000 + minor * 10, as cuDriverGetVersion
# counts): CUDA release notes.
_FIRST_CUDA = {"80": 11_000, "86": 11_010, "89": 11_080, "90": 11_080, "100": 12_080, "103": 12_090, "120": 12_080}

# ROCm 6.0, the first release that loads code object version 5 by default and knows gfx942
# (HIP_VERSION = major * 10,000,000 + minor * 100,000 + patch).
_FIRST_HIP = 60_000_000


@dataclass(frozen=True)
class Target:
    """One target of a matrix; ``arch`` is ``"90"`` or ``"gfx942"``, ``max_shared`` bytes for one CTA."""

    name: str
    backend: Literal["cuda", "hip"]
    arch: str
    warp_size: Literal[32, 64]
    fp8: Fp8
    triton: str
    max_shared: int | None

    @property
    def extension(self) -> str:
        """File extension of the target's objects."""
        return "cubin" if self.backend == "cuda" else "hsaco"

    @property
    def triton_arch(self) -> int | str:
        """The architecture as Triton's ``GPUTarget`` takes it."""
        return int(self.arch) if self.backend == "cuda" else self.arch

    def min_driver(self, assembler_version: str) -> int:
        """The least driver API version that loads objects of this target made by that assembler.

        A CUDA driver loads cubins of any toolkit of its own major version or an older one.
        """
        if self.backend == "hip":
            return _FIRST_HIP
        major = int(assembler_version.split(".")[0])
        return max(major * 1000, _FIRST_CUDA.get(self.arch, 0))


def max_shared(backend: str, arch: str) -> int | None:
    """Shared memory that one CTA can use on an architecture, in bytes; None where unknown."""
    return _MAX_SHARED.get((backend, arch))
