"""The operations as ``torch.ops.fp8_aot.*``: faked, checked, compiled, exported, and below modes and subclasses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from op_kit import GEMMS, HIGH, call, layout, made, operands, outputs, same
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_aot.loader.ops  # noqa: F401  registers torch.ops.fp8_aot
from fp8_aot import loader
from fp8_aot.loader import contract, torch_call


@pytest.fixture(params=contract.OPS)
def name(request):
    return request.param


def test_meta_tensors_give_meta_tensors(name):
    inputs = operands(name, 130, 200, 257)
    got = call(name, [t.to("meta") for t in inputs])
    assert [layout(t)[:3] for t in got] == [layout(t)[:3] for t in call(name, inputs)]
    assert {t.device.type for t in got} == {"meta"}


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("shape", [(1, 1, 1), (130, 200, 257), (0, 5, 7), (5, 7, 0)])
def test_fake_tensors_have_the_real_layouts(name, shape, dtype):
    inputs = operands(name, *shape, dtype)
    real = call(name, inputs, dtype)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        inside = call(name, fakes, dtype)
    outside = call(name, fakes, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        mixed = call(name, inputs, dtype)
    for got in (inside, outside, mixed):
        assert [layout(t) for t in got] == [layout(t) for t in real]
        assert all(type(t).__name__ == "FakeTensor" for t in got)


def test_fake_tensors_are_checked_too():
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.zeros(3, 5))
        with pytest.raises(ValueError, match="argument x must have last stride 1"):
            loader.act_quant_lhs(x.t())
        y, scale = loader.act_quant_lhs(x)
        loader.act_quant_lhs(x, out=(y, scale))
        with pytest.raises(ValueError, match=r"argument y has shape \(2, 5\), expected \(3, 5\)"):
            loader.act_quant_lhs(x, out=(y[1:], scale))
        with pytest.raises(ValueError, match="argument out has 1 tensors, expected 2"):
            loader.act_quant_lhs(x, out=(y,))
        with pytest.raises(TypeError, match=r"argument out is a int, expected a tuple"):
            loader.act_quant_lhs(x, out=3)


# test_schema tells whether an operation changed an input by comparing copies within a tolerance, and torch has no
# product of fp8 on a CPU ("mul_cpu_reduced_float"): it is left out where an argument is fp8.  That no input is
# changed is tested bit for bit in test_ops.py.
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("shape", [(130, 200, 257), (5, 7, 0), (0, 5, 7)])
def test_opcheck(name, shape):
    utils = ALL[1:] if name in GEMMS else ALL
    inputs = operands(name, *shape)
    op = getattr(torch.ops.fp8_aot, name)
    torch.library.opcheck(op.default, inputs, test_utils=utils)
    if name in GEMMS:
        torch.library.opcheck(op.default, inputs, {"out_dtype": torch.float32}, test_utils=utils)
    names = [t.name for t in contract.OPS[name].outputs]
    given = dict(zip(names, outputs(name, *shape), strict=True))
    torch.library.opcheck(op.out, inputs, given, test_utils=ALL[1:])


def test_torch_ops_are_the_same_operations(name):
    inputs = operands(name, 130, 200, 257)
    got = getattr(torch.ops.fp8_aot, name)(*inputs)
    same((got,) if name in GEMMS else got, call(name, inputs))
    if name in GEMMS:
        same((getattr(torch.ops.fp8_aot, name)(*inputs, torch.float16),), call(name, inputs, torch.float16))
        same((getattr(torch.ops.fp8_aot, name)(*inputs, out_dtype=torch.float32),), call(name, inputs, torch.float32))


@pytest.mark.parametrize("given", [False, True])
def test_compiled(name, given):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(inputs, out):
        return call(name, inputs, torch.float16, out)

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for shape in ((130, 200, 257), (5, 7, 3)):
        inputs = operands(name, *shape)
        out = outputs(name, *shape, torch.float16) if given else None
        got = compiled(inputs, out)
        if given:
            assert all(one is other for one, other in zip(got, out, strict=True))
        same(got, call(name, inputs, torch.float16, outputs(name, *shape, torch.float16) if given else None))


# Groups of 128 tokens: torch itself makes a graph of its own for an extent of 1, here up to 128 tokens.
@pytest.mark.parametrize(
    ("quantizer", "graphs"), [("act_quant_lhs", 1), ("act_quant_transposed_lhs", 2), ("act_quant_rhs", 2)]
)
def test_a_changing_number_of_tokens_compiles_once(quantizer, graphs):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: call(quantizer, (x,)), fullgraph=True, backend=counter)
    for tokens in (64, 300, 2, 128, 129, 7, 4000):
        x = made((tokens, 257), 1, torch.bfloat16, tokens)
        torch._dynamo.mark_dynamic(x, 0)
        same(compiled(x), call(quantizer, (x,)))
    assert counter.frame_count == graphs


def linear(x, w, w_scale):
    y, scale = loader.act_quant_lhs(x)
    return loader.gemm_1x128_128x128(y, w, scale, w_scale)


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        w, w_scale = loader.weight_quant_transposed_rhs(made((200, 257), 1, torch.bfloat16))
        self.w, self.w_scale = torch.nn.Buffer(w), torch.nn.Buffer(w_scale)

    def forward(self, x):
        return linear(x, self.w, self.w_scale)


def test_a_layer_with_a_changing_number_of_tokens_compiles_once():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = Linear()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (64, 300, 2, 128):
        x = made((tokens, 257), 1, torch.bfloat16, tokens)
        torch._dynamo.mark_dynamic(x, 0)
        same([compiled(x)], [layer(x)])
    assert counter.frame_count == 1


def test_exported():
    layer = Linear()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(layer, (made((64, 257), 1, torch.bfloat16),), dynamic_shapes=({0: tokens},))
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {"fp8_aot.act_quant_lhs.default", "fp8_aot.gemm_1x128_128x128.default"} <= called
    for rows in (64, 2, 333):
        x = made((rows, 257), 1, torch.bfloat16, rows)
        same([exported.module()(x)], [layer(x)])


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operation(name):
    inputs = operands(name, 3, 5, 7)
    with Counting() as counting:
        got = call(name, inputs)
    same(got, call(name, inputs))
    assert counting.seen[0] == f"fp8_aot.{name}.default"
    out = outputs(name, 3, 5, 7)
    with Counting() as counting:
        call(name, inputs, out=out)
    assert counting.seen[0] == f"fp8_aot.{name}.out"


class Wrapped(torch.Tensor):
    """A subclass that keeps its tensor inside, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        unwrapped = [a.inner if isinstance(a, Wrapped) else a for a in args]
        given = {k: v.inner if isinstance(v, Wrapped) else v for k, v in (kwargs or {}).items()}
        return func(*unwrapped, **given)


def test_subclasses_go_through_the_dispatcher(name):
    inputs = operands(name, 130, 200, 257)
    Wrapped.seen.clear()
    same(call(name, [Wrapped(inputs[0]), *inputs[1:]]), call(name, inputs))
    assert Wrapped.seen == [f"fp8_aot.{name}.default"]
    out = outputs(name, 130, 200, 257)
    call(name, inputs, out=(Wrapped(out[0]), *out[1:]))
    assert Wrapped.seen[1] == f"fp8_aot.{name}.out"
    for one, other in zip(out, call(name, inputs), strict=True):
        assert torch.equal(torch_call._bits(one), torch_call._bits(other))


def test_fakes_know_the_fp8_dtype_of_each_device():
    """On ROCm the fp8 dtype depends on the device, which a Meta kernel does not see: fakes are registered there."""
    script = """
import torch
torch.version.hip = "6.2"
from types import SimpleNamespace
torch.cuda.get_device_properties = lambda index: SimpleNamespace(gcnArchName="gfx942")
import fp8_aot.loader.ops
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    for device in ("cpu", "cuda:0"):
        x = torch.empty(3, 300, device=device)
        y, scale = torch.ops.fp8_aot.act_quant_lhs(x)
        print(y.dtype, y.device, y.stride(), scale.stride())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "torch.float8_e4m3fn cpu (300, 1) (1, 3)",
        "torch.float8_e4m3fnuz cuda:0 (300, 1) (1, 3)",
    ], done.stderr
