"""Inputs, comparisons and shapes that the GPU tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

QUANTIZERS = (
    "act_quant_lhs",
    "act_quant_transposed_lhs",
    "act_quant_rhs",
    "weight_quant_rhs",
    "weight_quant_transposed_rhs",
)
GEMMS = ("gemm_1x128_128x128", "gemm_1x128_128x1")
HIGH = (torch.bfloat16, torch.float16, torch.float32)

# Each class of a dimension: nothing, one, below a tile, a tile, one more, more than a tile, many.
SIZES = (1, 3, 13, 127, 128, 129, 300, 1024)


def shapes(count: int = 3) -> Iterator[tuple[int, ...]]:
    """Every pair of size classes, a third size going along; the same for every run."""
    for i, (m, k) in enumerate(itertools.product(SIZES, SIZES)):
        yield (m, SIZES[(i * 5 + 3) % len(SIZES)], k)[:count] if count == 3 else (m, k)


def make(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0, pad: int = 0, offset: int = 0) -> torch.Tensor:
    """Random values over many magnitudes, in rows ``pad`` elements apart and ``offset`` elements into memory."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows, cols = shape
    room = torch.empty(rows * (cols + pad) + offset + 1, dtype=dtype, device="cuda").fill_(float("nan"))
    x = room.as_strided(shape, (cols + pad, 1), offset)
    scale = torch.exp2(torch.randint(-12, 12, shape, generator=generator, device="cuda").float())
    x.copy_(torch.randn(shape, generator=generator, device="cuda") * (scale if seed % 2 else 1))
    return x


def special(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, subnormals, the largest values, -0.0, NaN and Inf, spread over the scaling groups."""
    x = make(shape, dtype, seed=7)
    info = torch.finfo(dtype)
    flat = torch.arange(x.numel(), device="cuda").view(shape)
    x[:128, :128] = 0
    for step, value in ((997, info.smallest_normal / 4), (1009, -0.0), (1013, info.max), (4099, float("inf"))):
        x[flat % step == step - 1] = value
    x[flat % 8191 == 8190] = float("nan")
    x[flat % 9001 == 9000] = float("-inf")
    return x


def bits(t: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as integers."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless bit-equal, NaN equal to NaN; shapes and strides too."""
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
    assert found.dtype == expected.dtype, f"{name}: {found.dtype}, expected {expected.dtype}"
    if found.numel() and min(found.shape) > 1:
        assert found.stride() == expected.stride(), f"{name}: strides {found.stride()}, expected {expected.stride()}"
    expected = expected.to(found.device)
    both_nan = found.float().isnan() & expected.float().isnan()
    wrong = (bits(found) != bits(expected)) & ~both_nan
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"
    )


def operands(name: str, m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Quantized operands of a GEMM, made by the reference on the CPU, on the GPU."""
    from fp8_aot.loader import reference

    a, a_s = reference.act_quant_lhs(make((m, k), torch.float32, seed).cpu())
    if name == "gemm_1x128_128x128":
        b, b_s = reference.weight_quant_transposed_rhs(make((n, k), torch.float32, seed + 2).cpu())
    else:
        b, b_s = reference.act_quant_rhs(make((k, n), torch.float32, seed + 2).cpu())
    return tuple(to_gpu(t) for t in (a, b, a_s, b_s))


def to_gpu(t: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t)


def dequantized(name: str, b: torch.Tensor, b_s: torch.Tensor) -> torch.Tensor:
    """B of a GEMM in fp64."""
    rows, cols = b.shape
    scale = b_s.double().repeat_interleave(128, 0)[:rows]
    if name == "gemm_1x128_128x128":
        scale = scale.repeat_interleave(128, 1)[:, :cols]
    return b.to(torch.float32).double() * scale


def check_gemm(
    name: str, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_s: torch.Tensor, b_s: torch.Tensor
) -> None:
    """Compare with the fp64 product of the dequantized operands.

    The bound: a Hopper tensor core adds up to 32 products and the running sum at once, each cut off 13 bits
    below the largest of them, which the sum of magnitudes S bounds: 33 * 2^-13 of S for each of the four
    steps of a group.  Scaling and promotion round a few times in fp32 (2^-22 of S for K up to 2^9 groups is
    ample room: each addition 2^-24 of the partial sums), and the output rounds once.
    """
    full_a = a.float().double() * a_s.double().repeat_interleave(128, 1)[:, : a.shape[1]]
    full_b = dequantized(name, b, b_s)
    exact = full_a @ full_b
    magnitude = full_a.abs() @ full_b.abs()
    half_ulp = torch.finfo(c.dtype).eps / 2
    groups = max(1, -(-a.shape[1] // 128))
    bound = magnitude * (4 * 33 * 2.0**-13 + (groups + 4) * 2.0**-23) * (1 + half_ulp) + exact.abs() * half_ulp
    bound += torch.finfo(c.dtype).smallest_normal
    # What passes the output dtype's range rounds to infinity.
    largest = torch.finfo(c.dtype).max
    error = (c.double().clamp(-largest, largest) - exact.clamp(-largest, largest)).abs()
    assert bool((error <= bound).all()), f"{name}: error {float((error - bound).max())} above the bound"
    if exact.numel() and a.shape[1]:
        # Element by element the hardware may be cut off far more than it is: over the whole product its errors,
        # random in sign, stay below 1e-3, and rounding the output adds half an ulp at the most.
        relative = float(error.norm() / exact.clamp(-largest, largest).norm())
        assert relative < half_ulp + 1e-3, f"{name}: relative error {relative} of the whole"
