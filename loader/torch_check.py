"""What an operation takes and returns, in terms of torch; the rules are those of ``contract``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fp8_aot.loader import contract

HIGH = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}
NAMES = HIGH | FP8

Layout = tuple[tuple[int, int], tuple[int, int], torch.dtype]
"""Shape, strides in elements and dtype of an output."""


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The fp8 dtype that a device computes with: e4m3fnuz on gfx940 to gfx942, e4m3fn elsewhere."""
    if device.type != "cuda" or torch.version.hip is None:
        return torch.float8_e4m3fn
    return _hip_fp8(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _hip_fp8(index: int) -> torch.dtype:
    name = torch.cuda.get_device_properties(index).gcnArchName
    return torch.float8_e4m3fnuz if name.startswith("gfx94") else torch.float8_e4m3fn


class Signature:
    """Checks of the torch tensors that one operation is called with.

    Attributes:
        op: the operation.
        gemm: whether it is one whose output has the caller's dtype.
    """

    def __init__(self, op: contract.Op) -> None:
        self.op = op
        self.gemm = op.outputs[0].dtype == "out"

    def check(self, inputs: tuple[torch.Tensor, ...], out_dtype: torch.dtype) -> dict[str, int]:
        """Check the inputs; the values of the size symbols.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        op = self.op
        if len(inputs) != len(op.inputs):
            names = ", ".join(t.name for t in op.inputs)
            raise TypeError(f"{op.name}: got {len(inputs)} tensors, expected {len(op.inputs)}: {names}")
        for tensor, value in zip(op.inputs, inputs, strict=True):
            self._check_kind(tensor.name, value)
            self._check_dtype(tensor, value, inputs)
            if value.device != inputs[0].device:
                raise ValueError(
                    f"{op.name}: argument {tensor.name} is on {value.device}, expected {inputs[0].device} like "
                    f"{op.inputs[0].name}"
                )
        if self.gemm and out_dtype not in HIGH:
            raise TypeError(f"{op.name}: argument out_dtype is {out_dtype}, expected {_or(HIGH)}")
        if inputs[0].device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(
                f"{op.name}: argument {op.inputs[0].name} is on {inputs[0].device}, expected a GPU or the CPU"
            )
        sizes = contract.solve(op, {t.name: value.shape for t, value in zip(op.inputs, inputs, strict=True)})
        for tensor, value in zip(op.inputs, inputs, strict=True):
            contract.check_layout(op, tensor.name, value.shape, value.stride())
        return sizes

    def _check_kind(self, name: str, value: object) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self.op.name}: argument {name} is a {type(value).__name__}, expected a torch.Tensor")
        if value.layout != torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else value.layout
            raise TypeError(f"{self.op.name}: argument {name} is a {layout} tensor, expected a dense one")

    def _check_dtype(self, tensor: contract.Tensor, value: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
        legal: tuple[torch.dtype, ...]
        if tensor.dtype == "high":
            legal = tuple(HIGH)
        elif tensor.dtype == "fp32":
            legal = (torch.float32,)
        elif value.device.type == "cuda":
            legal = (fp8_dtype(value.device),)
        else:
            # The reference computes with either fp8 dtype, but not with both at once.
            legal = (inputs[0].dtype,) if inputs[0].dtype in FP8 else tuple(FP8)
        if value.dtype not in legal:
            raise TypeError(f"{self.op.name}: argument {tensor.name} has dtype {value.dtype}, expected {_or(legal)}")

    def layouts(
        self, inputs: tuple[torch.Tensor, ...], sizes: dict[str, int], out_dtype: torch.dtype
    ) -> tuple[Layout, ...]:
        """Shape, strides and dtype of each output."""
        dtypes = {"fp8": fp8_dtype(inputs[0].device), "fp32": torch.float32, "out": out_dtype}
        layout = contract.output_layout(self.op, sizes)
        return tuple((*layout[t.name], dtypes[t.dtype]) for t in self.op.outputs)

    def _out_name(self, tensor: contract.Tensor) -> str:
        return "out" if self.gemm else f"out ({tensor.name})"

    def given(self, out: Sequence[torch.Tensor], out_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The given outputs, of which only number and kind are checked: a tracer sees this too."""
        op = self.op
        names = ", ".join(t.name for t in op.outputs)
        if not isinstance(out, (tuple, list)):
            raise TypeError(f"{op.name}: argument out is a {type(out).__name__}, expected a tuple ({names})")
        if len(out) != len(op.outputs):
            raise ValueError(f"{op.name}: argument out has {len(out)} tensors, expected {len(op.outputs)}: {names}")
        for tensor, value in zip(op.outputs, out, strict=True):
            self._check_kind(self._out_name(tensor), value)
        if self.gemm and out[0].dtype != out_dtype:
            raise TypeError(f"{op.name}: argument out has dtype {out[0].dtype}, expected out_dtype, {out_dtype}")
        return tuple(out)

    def check_out(
        self,
        out: Sequence[torch.Tensor],
        device: torch.device,
        layouts: tuple[Layout, ...],
        sizes: dict[str, int],
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:
        """Check outputs that the caller has given, and return them.

        Raises:
            TypeError, ValueError: one does not fit.
        """
        op = self.op
        given = self.given(out, out_dtype)
        for tensor, value, (_, _, dtype) in zip(op.outputs, given, layouts, strict=True):
            name = self._out_name(tensor)
            legal = tuple(FP8) if tensor.dtype == "fp8" and device.type == "cpu" else (dtype,)
            if value.dtype not in legal:
                raise TypeError(f"{op.name}: argument {name} has dtype {value.dtype}, expected {_or(legal)}")
            if value.device != device:
                raise ValueError(f"{op.name}: argument {name} is on {value.device}, expected {device}")
            contract.check_shape(op, tensor.name, value.shape, sizes)
            contract.check_layout(op, tensor.name, value.shape, value.stride())
        return given


def _or(dtypes: Sequence[torch.dtype] | dict[torch.dtype, str]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
