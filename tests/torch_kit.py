"""torch tensors that say that they lie on a GPU, and what their launches must look like.

Such a tensor is a wrapper subclass with a made-up address, which a call would otherwise take to torch's
dispatcher.  Everything of the torch face runs but torch's own allocator, devices and streams.
"""

from __future__ import annotations

import itertools

import torch
from loader_kit import BASE, argument_values, expected_variant, manifest_of, objects_of, packed, write_bundle

from fp8_aot import loader
from fp8_aot.loader import TensorView, contract

STREAM = 0x7000
HIGH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8 = {"sm90": torch.float8_e4m3fn, "sm100": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
NAMES = {dtype: name for name, dtype in HIGH.items()} | {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
}


class GpuTensor(torch.Tensor):
    """A tensor that says that it is on a GPU; ``address`` is where."""

    @staticmethod
    def __new__(cls, shape, strides, dtype, device, address):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        made.address = address
        return made

    def data_ptr(self):
        return self.address

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} would run on the device")


class Gpu:
    """What stands in for torch's side of a GPU."""

    def __init__(self, target):
        self.target = target
        self.device = 0
        self.addresses = itertools.count(BASE, 1 << 20)
        self.allocated = []

    def tensor(self, shape, dtype, unit=1, *, strides=None, index=0, shift=0):
        strides = strides or ((max(shape[1], 1), 1) if unit else (1, max(shape[0], 1)))
        return GpuTensor(shape, strides, dtype, f"cuda:{index}", next(self.addresses) + shift)

    def empty_strided(self, shape, strides, *, dtype, device):
        self.allocated.append(GpuTensor(shape, strides, dtype, device, next(self.addresses)))
        return self.allocated[-1]

    def operands(self, name, m, n, k, **options):
        sizes = {"M": m, "N": n, "K": k}
        dtypes = {"high": torch.bfloat16, "fp8": FP8[self.target], "fp32": torch.float32}
        return [
            self.tensor([d.extent(sizes) for d in t.shape], dtypes[t.dtype], t.unit_dim, **options)
            for t in contract.OPS[name].inputs
        ]

    def outputs(self, name, m, n, k, *, out_dtype=torch.bfloat16, **options):
        sizes = {"M": m, "N": n, "K": k}
        dtypes = {"out": out_dtype, "fp8": FP8[self.target], "fp32": torch.float32}
        return tuple(
            self.tensor([d.extent(sizes) for d in t.shape], dtypes[t.dtype], t.unit_dim, **options)
            for t in contract.OPS[name].outputs
        )


def call(name, inputs, out=None, out_dtype=torch.bfloat16):
    function = getattr(loader, name)
    if name.startswith("gemm"):
        return (function(*inputs, out_dtype, out=out[0] if out else None),)
    return function(*inputs, out=out)


def view(tensor):
    return TensorView(tensor.address, NAMES[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))


def expected(gpu, bundles, name, tensors, axis):
    """Variant and parameters of a launch with these tensors."""
    manifest = manifest_of(bundles / f"{gpu.target}.zip")
    op = contract.OPS[name]
    views = dict(zip((t.name for t in op.inputs + op.outputs), map(view, tensors), strict=True))
    sizes = contract.solve(op, {t.name: views[t.name].shape for t in op.inputs})
    values = argument_values(manifest, name, sizes, views)
    variant = expected_variant(manifest, name, axis, sizes, values)
    return variant, packed(manifest, variant, values)


def without(bundles, tmp_path, target, dtype):
    """A bundle that lacks a dtype of act_quant_lhs."""
    manifest = manifest_of(bundles / f"{target}.zip")
    manifest["dispatch"] = [
        d for d in manifest["dispatch"] if (d["kernel"], d["dtypes"]) != ("act_quant_lhs", {"in": dtype})
    ]
    return write_bundle(tmp_path / "less.zip", manifest, objects_of(bundles / f"{target}.zip"))
