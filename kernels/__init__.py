"""The Triton kernels of fp8-aot and their specs.

Importing this package imports Triton, and nothing of torch, the builder or the loader.
"""

from fp8_aot.kernels.gemm import gemm_1x128_128x1, gemm_1x128_128x128
from fp8_aot.kernels.quant import (
    act_quant_lhs,
    act_quant_rhs,
    act_quant_transposed_lhs,
    weight_quant_rhs,
    weight_quant_transposed_rhs,
)
from fp8_aot.kernels.spec import KernelSpec

SPECS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        act_quant_lhs,
        act_quant_transposed_lhs,
        act_quant_rhs,
        weight_quant_rhs,
        weight_quant_transposed_rhs,
        gemm_1x128_128x128,
        gemm_1x128_128x1,
    )
}
"""Every kernel of this package, by name."""

__all__ = ["SPECS", "KernelSpec", *SPECS]
