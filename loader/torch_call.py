"""How an operation on torch tensors becomes one launch, as cheaply as Python allows.

The first call with new shapes, strides, dtypes and alignment checks everything and prepares a
:class:`_Ready`; later calls find it by key, allocate the outputs and launch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fp8_aot.loader import config, contract, reference
from fp8_aot.loader.dispatch import Choice
from fp8_aot.loader.driver import DriverError
from fp8_aot.loader.errors import CaptureError, ForkError, IntegrityError, MissError
from fp8_aot.loader.plan import Plan
from fp8_aot.loader.runtime import runtime
from fp8_aot.loader.schema import Variant
from fp8_aot.loader.views import TensorView

HIGH = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}
NAMES = HIGH | FP8

_MAX_READY = 4096
"""Prepared launches kept per operation; a workload with more shapes than this starts over."""

# Private functions of torch that cost tens of nanoseconds where their public forms cost microseconds.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_compiling = torch.compiler.is_compiling
_empty = torch.empty_strided


class MissWarning(UserWarning):
    """No prebuilt kernel fits, and the JIT is used."""


class _Ready:
    """A prepared call: how to allocate the outputs, and the plan that fills them (None: nothing to do)."""

    __slots__ = ("device", "index", "outputs", "plan", "state")

    def __init__(self, outputs: tuple[tuple[Any, Any, torch.dtype], ...], plan: Plan | None, tensor: torch.Tensor,
                 state: Any) -> None:  # fmt: skip
        self.outputs = outputs
        self.plan = plan
        self.device = tensor.device
        self.index = tensor.get_device()
        self.state = state


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The fp8 dtype that a device computes with: e4m3fnuz on gfx940 to gfx942, e4m3fn elsewhere."""
    if device.type != "cuda" or torch.version.hip is None:
        return torch.float8_e4m3fn
    return _hip_fp8(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _hip_fp8(index: int) -> torch.dtype:
    name = torch.cuda.get_device_properties(index).gcnArchName
    return torch.float8_e4m3fnuz if name.startswith("gfx94") else torch.float8_e4m3fn


def _backend() -> str:
    return "cuda" if torch.version.hip is None else "hip"


class Call:
    """One operation, called with torch tensors."""

    def __init__(self, name: str) -> None:
        self.op = contract.OPS[name]
        self._gemm = self.op.outputs[0].dtype == "out"
        self._reference = getattr(reference, name)
        self._ready: dict[Any, _Ready] = {}
        runtime.on_change.append(self._ready.clear)

    def __call__(
        self,
        *inputs: torch.Tensor,
        out: Sequence[torch.Tensor] | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[torch.Tensor, ...]:
        """Run the operation; the public functions of ``loader.ops`` say what it takes and returns."""
        if self._eager(inputs):
            return self.run(inputs, out, out_dtype)
        return self._dispatched(inputs, out, out_dtype)

    def _dispatched(
        self, inputs: tuple[torch.Tensor, ...], out: Sequence[torch.Tensor] | None, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Call through torch's dispatcher, where fake tensors, tracing and subclasses are handled."""
        op = getattr(torch.ops.fp8_aot, self.op.name)
        if out is not None:
            names = [t.name for t in self.op.outputs]
            op.out(*inputs, **dict(zip(names, out, strict=True)))
            return tuple(out)
        if self._gemm:
            return (op.default(*inputs, out_dtype),)
        outputs: tuple[torch.Tensor, ...] = op.default(*inputs)
        return outputs

    @staticmethod
    def _eager(inputs: tuple[torch.Tensor, ...]) -> bool:
        """Whether nothing but eager execution looks at this call, so that torch's dispatcher (about 6 us)
        can be left out: no tracing, no tensor subclass, no mode, no functorch transform."""
        if _compiling() or _dispatch_modes() or _function_modes() or _transforms() is not None:
            return False
        for tensor in inputs:
            kind = type(tensor)
            if kind is not torch.Tensor and kind is not torch.nn.Parameter and isinstance(tensor, torch.Tensor):
                return False
        return True

    def run(
        self, inputs: tuple[torch.Tensor, ...], out: Sequence[torch.Tensor] | None, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Run eagerly."""
        if out is not None:
            return self._run_slowly(inputs, tuple(out), out_dtype)
        try:
            key = (out_dtype, *[(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in inputs])
            ready = self._ready[key]
        except (KeyError, AttributeError, RuntimeError):
            return self._run_slowly(inputs, None, out_dtype)
        device = ready.device
        outputs = tuple([_empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in ready.outputs])
        plan = ready.plan
        if plan is None:
            return outputs
        pointers = tuple([t.data_ptr() for t in inputs + outputs])
        index = ready.index
        if _current_device() != index or plan.scratch_bytes:
            self._launch(ready, pointers)
            return outputs
        try:
            plan.launch(pointers, _current_stream(index))
        except DriverError as error:
            self._retry(ready, pointers, error)
        return outputs

    def _retry(self, ready: _Ready, pointers: tuple[int, ...], error: DriverError) -> None:
        # A thread that has not used this device yet has no current context, and the driver says so.
        if ready.state.driver.current_device() == ready.index:
            raise error
        self._launch(ready, pointers)

    def _launch(self, ready: _Ready, pointers: tuple[int, ...]) -> None:
        """Launch with the device made current, and with scratch memory where the kernel needs it."""
        assert ready.plan is not None
        stream = _current_stream(ready.index)
        scratch = 0
        if ready.plan.scratch_bytes:
            # Freed to this stream's pool at the end of this call, so reused only after the kernel.
            memory = torch.empty(ready.plan.scratch_bytes, dtype=torch.uint8, device=ready.device)
            scratch = memory.data_ptr()
        with ready.state.driver.on_device(ready.index):
            ready.plan.launch(pointers, stream, scratch)

    def _run_slowly(
        self, inputs: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...] | None, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        sizes = self.check(inputs, out_dtype)
        layouts = self.layouts(inputs, sizes, out_dtype)
        first = inputs[0]
        if out is not None:
            self._check_out(out, first.device, layouts, sizes)
        if first.device.type == "cpu":
            return self._on_cpu(inputs, out, out_dtype)
        outputs = out or tuple(
            _empty(shape, strides, dtype=dtype, device=first.device) for shape, strides, dtype in layouts
        )
        if any(0 in shape for shape, _, _ in layouts):
            self._remember(inputs, out, out_dtype, _Ready(layouts, None, first, None))
            return outputs
        ready = self._prepare(inputs, outputs, layouts, sizes)
        if ready is not None:
            assert ready.plan is not None
            self._launch(ready, tuple(t.data_ptr() for t in inputs + outputs))
            # Fresh outputs are 16-byte aligned; a plan for given ones may not be for those.
            self._remember(inputs, out, out_dtype, ready)
        return outputs

    def _remember(
        self,
        inputs: tuple[torch.Tensor, ...],
        out: tuple[torch.Tensor, ...] | None,
        out_dtype: torch.dtype,
        ready: _Ready,
    ) -> None:
        if out is not None:
            return
        if len(self._ready) >= _MAX_READY:
            self._ready.clear()
        key = (out_dtype, *[(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in inputs])
        self._ready[key] = ready

    def check(self, inputs: tuple[torch.Tensor, ...], out_dtype: torch.dtype) -> dict[str, int]:
        """Check the inputs; the values of the size symbols.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        op = self.op
        for tensor, value in zip(op.inputs, inputs, strict=True):
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"{op.name}: argument {tensor.name} is a {type(value).__name__}, expected a torch.Tensor"
                )
            self._check_dtype(tensor, value, inputs)
            if value.device != inputs[0].device:
                raise ValueError(
                    f"{op.name}: argument {tensor.name} is on {value.device}, expected {inputs[0].device} like "
                    f"{op.inputs[0].name}"
                )
        if self._gemm and out_dtype not in HIGH:
            raise TypeError(f"{op.name}: argument out_dtype is {out_dtype}, expected {_or(HIGH)}")
        if inputs[0].device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(
                f"{op.name}: argument {op.inputs[0].name} is on {inputs[0].device}, expected a GPU or the CPU"
            )
        sizes = contract.solve(op, {t.name: value.shape for t, value in zip(op.inputs, inputs, strict=True)})
        for tensor, value in zip(op.inputs, inputs, strict=True):
            contract.check_layout(op, tensor.name, value.shape, value.stride())
        return sizes

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
    ) -> tuple[tuple[tuple[int, int], tuple[int, int], torch.dtype], ...]:
        """Shape, strides and dtype of each output."""
        dtypes = {"fp8": fp8_dtype(inputs[0].device), "fp32": torch.float32, "out": out_dtype}
        layout = contract.output_layout(self.op, sizes)
        return tuple((*layout[t.name], dtypes[t.dtype]) for t in self.op.outputs)

    def _check_out(
        self,
        out: tuple[torch.Tensor, ...],
        device: torch.device,
        layouts: tuple[tuple[Any, Any, torch.dtype], ...],
        sizes: dict[str, int],
    ) -> None:
        op = self.op
        if len(out) != len(op.outputs):
            names = ", ".join(t.name for t in op.outputs)
            raise ValueError(f"{op.name}: argument out has {len(out)} tensors, expected {len(op.outputs)}: {names}")
        for tensor, value, (_, _, dtype) in zip(op.outputs, out, layouts, strict=True):
            name = "out" if self._gemm else f"out ({tensor.name})"
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{op.name}: argument {name} is a {type(value).__name__}, expected a torch.Tensor")
            legal = tuple(FP8) if tensor.dtype == "fp8" and device.type == "cpu" else (dtype,)
            if value.dtype not in legal:
                raise TypeError(f"{op.name}: argument {name} has dtype {value.dtype}, expected {_or(legal)}")
            if value.device != device:
                raise ValueError(f"{op.name}: argument {name} is on {value.device}, expected {device}")
            contract.check_shape(op, tensor.name, value.shape, sizes)
            contract.check_layout(op, tensor.name, value.shape, value.stride())

    def _on_cpu(
        self, inputs: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...] | None, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        if self._gemm:
            results = (self._reference(*inputs, out_dtype=out_dtype),)
        elif out is not None:
            results = self._reference(*inputs, fp8_dtype=out[0].dtype)
        else:
            results = self._reference(*inputs)
        if out is None:
            return tuple(results)
        for target, result in zip(out, results, strict=True):
            # Bytes, since not every torch build copies between strided fp8 tensors.
            _bits(target).copy_(_bits(result))
        return out

    def _prepare(
        self,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        layouts: tuple[tuple[Any, Any, torch.dtype], ...],
        sizes: dict[str, int],
    ) -> _Ready | None:
        """A prepared launch of a prebuilt kernel; None where the JIT has run instead."""
        op = self.op
        names = [t.name for t in op.inputs + op.outputs]
        tensors = dict(zip(names, inputs + outputs, strict=True))
        first = inputs[0]
        axis = {"out": NAMES[outputs[0].dtype]} if self._gemm else {"in": NAMES[first.dtype]}
        mode = config.settings().mode
        try:
            state = runtime.state(_backend(), first.get_device())
            views = {name: _view(tensor) for name, tensor in tensors.items()}
            if mode == "jit":
                choice, _ = runtime.choose(state, op.name, axis, sizes, views)
                self._jit(tensors, sizes, choice.variant)
                return None
            plan, choice = runtime.plan(state, op.name, axis, sizes, views, _current_stream(first.get_device()))
            if plan is not None:
                return _Ready(layouts, plan, first, state)
            reason, cell = choice.reason, choice.cell
            if state.bundle is None:
                looked = "; ".join(str(decision) for decision in state.decisions)
                reason = f"{reason} (looked at: {looked})"
        except (CaptureError, ForkError, IntegrityError):
            # Not a miss: a faster or fitting kernel is there, and the user should know why it cannot run.
            raise
        except DriverError as error:
            reason, cell = str(error), f"{op.name} on {first.device}"
        runtime.misses += 1
        if mode == "strict":
            raise MissError(f"no prebuilt kernel for {cell}: {reason}")
        if mode == "warn":
            _warn_once(cell, reason)
        self._jit(tensors, sizes, None)
        return None

    def _jit(self, tensors: dict[str, torch.Tensor], sizes: dict[str, int], like: Variant | None) -> None:
        from fp8_aot.loader import jit

        device = next(iter(tensors.values())).device
        with torch.cuda.device(device):
            jit.launch(self.op.name, tensors, sizes, FP8[fp8_dtype(device)], like)
        runtime.fallbacks += 1

    def explain(self, inputs: tuple[torch.Tensor, ...], out_dtype: torch.dtype) -> Choice:
        """The choice that a call with these inputs would make, and every step of it.

        Raises:
            TypeError, ValueError: an argument does not fit.
            DriverError: there is no driver for the tensors' device.
        """
        sizes = self.check(inputs, out_dtype)
        outputs = tuple(
            TensorView(0, NAMES[dtype], shape, strides)
            for shape, strides, dtype in self.layouts(inputs, sizes, out_dtype)
        )
        names = [t.name for t in self.op.inputs + self.op.outputs]
        views = dict(zip(names, (*map(_view, inputs), *outputs), strict=True))
        axis = {"out": NAMES[out_dtype]} if self._gemm else {"in": NAMES[inputs[0].dtype]}
        state = runtime.state(_backend(), inputs[0].get_device())
        return runtime.choose(state, self.op.name, axis, sizes, views)[0]


_warned: set[str] = set()


def _warn_once(cell: str, reason: str) -> None:
    if cell in _warned:
        return
    _warned.add(cell)
    warnings.warn(
        f"no prebuilt kernel for {cell}: {reason}; compiling it now with the JIT (FP8_AOT_MODE=strict raises instead)",
        MissWarning,
        stacklevel=6,
    )


def _view(tensor: torch.Tensor) -> TensorView:
    return TensorView(
        tensor.data_ptr(), NAMES[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()), tensor.get_device()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _or(dtypes: Sequence[torch.dtype] | dict[torch.dtype, str]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
