"""Inputs and outputs for each operation, on the CPU, and how to call it."""

from __future__ import annotations

import torch

from fp8_aot import loader
from fp8_aot.loader import contract, torch_call

HIGH = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZERS = [name for name in contract.OPS if "quant" in name]
GEMMS = [name for name in contract.OPS if "gemm" in name]
SHAPES = [(1, 1, 1), (3, 5, 7), (128, 256, 128), (130, 200, 257), (0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)]


def made(shape, unit, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape if unit else shape[::-1]
    value = torch.randn(rows, cols, generator=generator).to(dtype)
    return value if unit else value.t()


def operands(name, m, n, k, dtype=torch.bfloat16, fp8=torch.float8_e4m3fn):
    sizes = {"M": m, "N": n, "K": k}
    dtypes = {"high": dtype, "fp8": fp8, "fp32": torch.float32}
    return tuple(
        made([d.extent(sizes) for d in t.shape], t.unit_dim, dtypes[t.dtype], seed)
        for seed, t in enumerate(contract.OPS[name].inputs)
    )


def outputs(name, m, n, k, dtype=torch.bfloat16, fp8=torch.float8_e4m3fn):
    sizes = {"M": m, "N": n, "K": k}
    dtypes = {"out": dtype, "fp8": fp8, "fp32": torch.float32}
    return tuple(
        made([d.extent(sizes) for d in t.shape], t.unit_dim, torch.float32, 9).to(dtypes[t.dtype])
        for t in contract.OPS[name].outputs
    )


def call(name, inputs, dtype=torch.bfloat16, out=None, functions=loader):
    function = getattr(functions, name)
    if name in GEMMS:
        return (function(*inputs, dtype) if out is None else function(*inputs, dtype, out=out[0]),)
    return function(*inputs) if out is None else function(*inputs, out=out)


def layout(tensor):
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device


def same(got, want):
    """Bit for bit, layout included."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert layout(one) == layout(other)
        assert torch.equal(torch_call._bits(one), torch_call._bits(other))
