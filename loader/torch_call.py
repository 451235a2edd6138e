"""How an operation on torch tensors becomes one launch, as cheaply as Python allows.

The first call with new shapes, strides, dtypes and alignment (those of ``out=`` included) checks
everything and prepares a :class:`_Ready`; later calls find it by key, allocate the outputs and launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec import structs

from fp8_aot.loader import config, contract, reference, schema
from fp8_aot.loader.dispatch import Choice, Step
from fp8_aot.loader.driver import DriverError
from fp8_aot.loader.errors import MissError
from fp8_aot.loader.plan import Plan
from fp8_aot.loader.runtime import DeviceState, runtime
from fp8_aot.loader.schema import Variant
from fp8_aot.loader.torch_check import FP8, NAMES, Layout, Signature, fp8_dtype
from fp8_aot.loader.views import TensorView

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
_Tensor, _BF16, _FP32 = torch.Tensor, torch.bfloat16, torch.float32


class MissWarning(UserWarning):
    """No prebuilt kernel fits, and the JIT is used."""


class _Ready:
    """A prepared call: how to allocate the outputs, and the plan that fills them (None: nothing to do)."""

    __slots__ = ("device", "index", "outputs", "plan", "state")

    def __init__(self, outputs: tuple[Layout, ...], plan: Plan | None, tensor: torch.Tensor,
                 state: Any) -> None:  # fmt: skip
        self.outputs = outputs
        self.plan = plan
        self.device = tensor.device
        self.index = tensor.get_device()
        self.state = state


def _backend() -> str:
    return "cuda" if torch.version.hip is None else "hip"


class Call:
    """One operation, called with torch tensors."""

    def __init__(self, name: str) -> None:
        self.op = contract.OPS[name]
        self.signature = Signature(self.op)
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
        if self._eager(inputs) and (not isinstance(out, (tuple, list)) or self._eager(out)):
            return self.run(inputs, out, out_dtype)
        return self._dispatched(inputs, out, out_dtype)

    # The two hot paths, inputs of the exact type and fresh outputs, are spelled out: what Python does between the
    # call and the driver is most of what a call costs.  All else, and the first call of each kind, is ``__call__``.

    def quantize(self, x: torch.Tensor, out: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a quantizer."""
        if (
            out is None
            and type(x) is _Tensor
            and not (x.requires_grad or _compiling() or _dispatch_modes() or _function_modes())
        ):
            try:
                x_ptr = x.data_ptr()
                ready = self._ready.get((_BF16, True, (x.shape, x.stride(), x.dtype, x.get_device(), x_ptr & 15)))
            except RuntimeError:
                ready = None  # it is sparse, or wrapped by a functorch transform
            if ready is not None and ready.plan is not None:
                device = ready.device
                (y_shape, y_strides, fp8), (s_shape, s_strides, _) = ready.outputs
                y = _empty(y_shape, y_strides, dtype=fp8, device=device)
                scale = _empty(s_shape, s_strides, dtype=_FP32, device=device)
                self._launch_here(ready, (x_ptr, y.data_ptr(), scale.data_ptr()))
                return y, scale
        y, scale = self(x, out=out)
        return y, scale

    def multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_s: torch.Tensor,
        b_s: torch.Tensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a GEMM."""
        plain = type(a) is type(b) is type(a_s) is type(b_s) is _Tensor and not (
            a.requires_grad or b.requires_grad or a_s.requires_grad or b_s.requires_grad
        )
        if out is None and plain and not (_compiling() or _dispatch_modes() or _function_modes()):
            try:
                a_ptr, b_ptr, a_s_ptr, b_s_ptr = a.data_ptr(), b.data_ptr(), a_s.data_ptr(), b_s.data_ptr()
                ready = self._ready.get(
                    (
                        out_dtype,
                        True,
                        (a.shape, a.stride(), a.dtype, a.get_device(), a_ptr & 15),
                        (b.shape, b.stride(), b.dtype, b.get_device(), b_ptr & 15),
                        (a_s.shape, a_s.stride(), a_s.dtype, a_s.get_device(), a_s_ptr & 15),
                        (b_s.shape, b_s.stride(), b_s.dtype, b_s.get_device(), b_s_ptr & 15),
                    )
                )
            except RuntimeError:
                ready = None
            if ready is not None and ready.plan is not None:
                shape, strides, _ = ready.outputs[0]
                c = _empty(shape, strides, dtype=out_dtype, device=ready.device)
                self._launch_here(ready, (a_ptr, b_ptr, a_s_ptr, b_s_ptr, c.data_ptr()))
                return c
        return self(a, b, a_s, b_s, out=None if out is None else (out,), out_dtype=out_dtype)[0]

    def _launch_here(self, ready: _Ready, pointers: tuple[int, ...]) -> None:
        """Launch on the current device where that is the tensors', else with theirs made current."""
        assert ready.plan is not None
        index = ready.index
        if _current_device() != index or ready.plan.scratch_bytes:
            self._launch(ready, pointers)
            return
        try:
            ready.plan.launch(pointers, _current_stream(index))
        except DriverError as error:
            self._retry(ready, pointers, error)

    def _dispatched(
        self, inputs: tuple[torch.Tensor, ...], out: Sequence[torch.Tensor] | None, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Call through torch's dispatcher, where fake tensors, tracing and subclasses are handled."""
        op = getattr(torch.ops.fp8_aot, self.op.name)
        if out is not None:
            given = self.signature.given(out, out_dtype)
            op.out(*inputs, **{t.name: value for t, value in zip(self.op.outputs, given, strict=True)})
            return given
        if self.signature.gemm:
            return (op.default(*inputs, out_dtype),)
        outputs: tuple[torch.Tensor, ...] = op.default(*inputs)
        return outputs

    @staticmethod
    def _eager(tensors: Iterable[torch.Tensor]) -> bool:
        """Whether nothing but eager execution looks at this call, so that torch's dispatcher (about 6 us)
        can be left out: no compilation, no mode, no functorch transform, no tensor subclass, no gradient
        (for which the dispatcher warns that there is no backward)."""
        # Asked first, since a compiler that traces this can look into none of the others.
        if _compiling() or _dispatch_modes() or _function_modes() or _transforms() is not None:
            return False
        for tensor in tensors:
            kind = type(tensor)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                if tensor.requires_grad and torch.is_grad_enabled():
                    return False
            elif isinstance(tensor, torch.Tensor):
                return False
        return True

    def run(
        self, inputs: tuple[torch.Tensor, ...], out: Sequence[torch.Tensor] | None, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Run eagerly."""
        key: Any = None
        ready: _Ready | None = None
        try:
            tensors = inputs
            if out is not None:
                tensors += out if type(out) is tuple else self.signature.given(out, out_dtype)
            key = (
                out_dtype,
                out is None,
                *[(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in tensors],
            )
            ready = self._ready.get(key)
        except (AttributeError, RuntimeError, TypeError):
            # Not all of them are tensors in memory: the checks say what they are.
            key = None
        if ready is None:
            return self._run_slowly(inputs, out, out_dtype, key)
        device = ready.device
        if out is None:
            outputs = tuple(
                [_empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in ready.outputs]
            )
        else:
            outputs = tuple(out)
        if ready.plan is not None:
            self._launch_here(ready, tuple([t.data_ptr() for t in inputs + outputs]))
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
        self, inputs: tuple[torch.Tensor, ...], out: Sequence[torch.Tensor] | None, out_dtype: torch.dtype, key: Any
    ) -> tuple[torch.Tensor, ...]:
        sizes = self.signature.check(inputs, out_dtype)
        layouts = self.signature.layouts(inputs, sizes, out_dtype)
        first = inputs[0]
        given = None if out is None else self.signature.check_out(out, first.device, layouts, sizes, out_dtype)
        if first.device.type == "cpu":
            return self._on_cpu(inputs, given, out_dtype)
        outputs: tuple[torch.Tensor, ...] = given or tuple(
            _empty(shape, strides, dtype=dtype, device=first.device) for shape, strides, dtype in layouts
        )
        if first.device.type == "meta":
            return outputs
        if any(0 in shape for shape, _, _ in layouts):
            self._remember(key, _Ready(layouts, None, first, None))
            return outputs
        ready = self._prepare(inputs, outputs, layouts, sizes)
        if ready is not None:
            assert ready.plan is not None
            self._launch(ready, tuple(t.data_ptr() for t in inputs + outputs))
            self._remember(key, ready)
        return outputs

    def _remember(self, key: Any, ready: _Ready) -> None:
        # The key of a call without out= says nothing of the outputs: torch aligns fresh ones to 16 bytes.
        if key is None:
            return
        if len(self._ready) >= _MAX_READY:
            self._ready.clear()
        self._ready[key] = ready

    def _on_cpu(
        self, inputs: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...] | None, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        # As on a GPU, there is no gradient.
        with torch.no_grad():
            if self.signature.gemm:
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
        layouts: tuple[Layout, ...],
        sizes: dict[str, int],
    ) -> _Ready | None:
        """A prepared launch of a prebuilt kernel; None where the JIT has run instead."""
        op = self.op
        names = [t.name for t in op.inputs + op.outputs]
        tensors = dict(zip(names, inputs + outputs, strict=True))
        first = inputs[0]
        axis = {"out": NAMES[outputs[0].dtype]} if self.signature.gemm else {"in": NAMES[first.dtype]}
        mode = config.settings().mode
        try:
            state = runtime.state(_backend(), first.get_device())
            views = {name: _view(tensor) for name, tensor in tensors.items()}
            foreign = self._foreign(state)
            if mode == "jit":
                choice = foreign or runtime.choose(state, op.name, axis, sizes, views)[0]
                self._jit(tensors, sizes, choice.variant)
                return None
            plan: Plan | None = None
            if foreign is not None:
                choice = foreign
            else:
                plan, choice = runtime.plan(state, op.name, axis, sizes, views, _current_stream(first.get_device()))
            if plan is not None:
                return _Ready(layouts, plan, first, state)
            reason, cell = choice.reason, choice.cell
            if state.bundle is None:
                looked = "; ".join(str(decision) for decision in state.decisions)
                reason = f"{reason} (looked at: {looked})"
        except DriverError as error:
            # Other errors are no misses: a kernel that fits is there, and the user should know why it cannot run.
            reason, cell = str(error), f"{op.name} on {first.device}"
        runtime.misses.add()
        if mode == "strict":
            raise MissError(f"no prebuilt kernel for {cell}: {reason}")
        self._jit(tensors, sizes, None, (cell, reason))
        return None

    def _jit(
        self,
        tensors: dict[str, torch.Tensor],
        sizes: dict[str, int],
        like: Variant | None,
        miss: tuple[str, str] | None = None,
    ) -> None:
        """Run by the JIT; ``miss`` is the cell that has no prebuilt kernel, and why."""
        from fp8_aot.loader import jit

        if missing := jit.available():
            wanted = "mode is jit" if miss is None else f"no prebuilt kernel for {miss[0]}: {miss[1]}"
            raise MissError(
                f"{wanted}; and the JIT cannot be used: {missing}: install a bundle for this device, or "
                "pip install 'fp8-aot[build]'"
            )
        if miss is not None and config.settings().mode == "warn":
            _warn_once(*miss)
        device = next(iter(tensors.values())).device
        with torch.cuda.device(device):
            jit.launch(self.op.name, tensors, sizes, FP8[fp8_dtype(device)], like)
        runtime.fallbacks.add()

    def _foreign(self, state: DeviceState) -> Choice | None:
        """A choice that fails because the bundle's kernel of this name is not this operation's: a bundle made by
        another version may call the same what takes other tensors, or lays them out otherwise."""
        kernel = state.bundle.kernels.get(self.op.name) if state.bundle else None
        if kernel is None or _interface(kernel.tensors) == _interface(self.op.inputs + self.op.outputs):
            return None
        assert state.bundle is not None
        reason = f"its {self.op.name} takes other tensors than this fp8-aot's: rebuild the bundle with this version"
        cell = f"{self.op.name} for {state.bundle.manifest.target.name}"
        return Choice(cell, None, (Step(str(state.bundle.path), False, reason),))

    def explain(self, inputs: tuple[torch.Tensor, ...], out_dtype: torch.dtype) -> Choice:
        """The choice that a call with these inputs would make, and every step of it.

        Raises:
            TypeError, ValueError: an argument does not fit, or is not on a GPU.
            DriverError: there is no driver for the tensors' device.
        """
        sizes = self.signature.check(inputs, out_dtype)
        if inputs[0].device.type != "cuda":
            raise ValueError(
                f"{self.op.name}: argument {self.op.inputs[0].name} is on {inputs[0].device}, expected a GPU: "
                "elsewhere nothing is launched"
            )
        outputs = tuple(
            TensorView(0, NAMES[dtype], shape, strides)
            for shape, strides, dtype in self.signature.layouts(inputs, sizes, out_dtype)
        )
        names = [t.name for t in self.op.inputs + self.op.outputs]
        views = dict(zip(names, (*map(_view, inputs), *outputs), strict=True))
        axis = {"out": NAMES[out_dtype]} if self.signature.gemm else {"in": NAMES[inputs[0].dtype]}
        state = runtime.state(_backend(), inputs[0].get_device())
        choice = self._foreign(state) or runtime.choose(state, self.op.name, axis, sizes, views)[0]
        steps = choice.steps if state.bundle is None else (*state.steps(), *choice.steps)
        if config.settings().mode != "jit":
            return structs.replace(choice, steps=steps)
        like = "the kernel's default tile" if choice.variant is None else f"the tile of {choice.variant.id}"
        return Choice(choice.cell, None, (*steps, Step("mode jit", True, f"the JIT compiles {like}")))


def _interface(tensors: Sequence[schema.Tensor] | Sequence[contract.Tensor]) -> list[tuple[object, ...]]:
    """What a caller depends on of an operation's or a kernel's tensors."""
    roles = {"high": "in"}
    return [(t.name, roles.get(t.dtype, t.dtype), [(d.symbol, d.group) for d in t.shape], t.unit_dim) for t in tensors]


_warned: dict[str, object] = {}


def _warn_once(cell: str, reason: str) -> None:
    mine = object()
    if _warned.setdefault(cell, mine) is not mine:  # one step, so that one thread alone warns
        return
    warnings.warn(
        f"no prebuilt kernel for {cell}: {reason}; compiling it now with the JIT (FP8_AOT_MODE=strict raises instead)",
        MissWarning,
        stacklevel=9,  # the caller of the operation in loader.ops
    )


def _view(tensor: torch.Tensor) -> TensorView:
    return TensorView(
        tensor.data_ptr(), NAMES[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()), tensor.get_device()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
