"""The operations on CPU tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from op_kit import GEMMS, HIGH, QUANTIZERS, SHAPES, call, layout, made, operands, outputs, same

from fp8_aot import loader
from fp8_aot.loader import contract, reference, torch_call


@pytest.fixture(params=contract.OPS)
def name(request):
    return request.param


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpu_tensors_are_computed_by_the_reference(name, shape, dtype):
    inputs = operands(name, *shape, dtype)
    option = {"out_dtype": dtype} if name in GEMMS else {}
    want = getattr(reference, name)(*inputs, **option)
    want = (want,) if name in GEMMS else want
    got = call(name, inputs, dtype)
    same(got, want)
    for tensor, like in zip(got, outputs(name, *shape, dtype), strict=True):
        sizes = dict(zip("MNK", shape, strict=True))
        assert layout(tensor)[0] == layout(like)[0]
        expected = contract.output_layout(contract.OPS[name], sizes)
        assert layout(tensor)[:2] in expected.values()


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("shape", SHAPES)
def test_given_outputs_are_written(name, shape, dtype):
    inputs = operands(name, *shape, dtype)
    out = outputs(name, *shape, dtype)
    before = [torch_call._bits(t).clone() for t in inputs]
    got = call(name, inputs, dtype, out)
    assert all(one is other for one, other in zip(got, out, strict=True))
    want = call(name, inputs, dtype)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(torch_call._bits(one), torch_call._bits(other))
    for tensor, bits in zip(inputs, before, strict=True):
        assert torch.equal(torch_call._bits(tensor), bits)


def test_fresh_outputs_alias_nothing(name):
    inputs = operands(name, 130, 200, 257)
    pointers = [t.untyped_storage().data_ptr() for t in (*inputs, *call(name, inputs), *call(name, inputs))]
    assert len(set(pointers)) == len(pointers)


def test_a_given_output_with_a_pitch_leaves_the_rest_alone():
    x = operands("act_quant_lhs", 5, 0, 130)[0]
    room = torch.full((5, 200), 7, dtype=torch.uint8).view(torch.float8_e4m3fn)
    y, scale = room[:, :130], torch.empty(2, 9).t()[:5]
    loader.act_quant_lhs(x, out=[y, scale])
    want_y, want_scale = loader.act_quant_lhs(x)
    assert torch.equal(y.view(torch.uint8), want_y.view(torch.uint8))
    assert torch.equal(scale, want_scale)
    assert (room[:, 130:].view(torch.uint8) == 7).all()


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_either_fp8_dtype_on_a_cpu(name, fp8):
    shape = (130, 200, 257)
    if name in QUANTIZERS:
        out = outputs(name, *shape, fp8=fp8)
        inputs = operands(name, *shape)
        same(call(name, inputs, out=out), getattr(reference, name)(*inputs, fp8_dtype=fp8))
    else:
        inputs = operands(name, *shape, fp8=fp8)
        same(call(name, inputs), [getattr(reference, name)(*inputs)])


def changes():
    """What can be wrong with a call, as functions of its inputs and outputs, the error and what it names."""
    fn, fnuz = torch.float8_e4m3fn, torch.float8_e4m3fnuz
    quantizer, gemm = "act_quant_lhs", "gemm_1x128_128x128"
    yield quantizer, lambda i, o: ((i[0].double(),), None), TypeError, "argument x has dtype torch.float64"
    yield quantizer, lambda i, o: ((i[0][0],), None), ValueError, r"argument x has shape \(257,\)"
    yield quantizer, lambda i, o: ((i[0].t(),), None), ValueError, "argument x must have last stride 1"
    yield quantizer, lambda i, o: ((i[0].to_sparse(),), None), TypeError, "argument x is a torch.sparse_coo tensor"
    yield quantizer, lambda i, o: (([[1.0]],), None), TypeError, "argument x is a list, expected a torch.Tensor"
    yield quantizer, lambda i, o: (i, o[:1]), ValueError, "argument out has 1 tensors, expected 2: y, scale"
    yield quantizer, lambda i, o: (i, (*o, o[0])), ValueError, "argument out has 3 tensors, expected 2"
    yield quantizer, lambda i, o: (i, ()), ValueError, "argument out has 0 tensors, expected 2"
    yield quantizer, lambda i, o: (i, o[0]), TypeError, r"argument out is a Tensor, expected a tuple \(y, scale\)"
    yield quantizer, lambda i, o: (i, 7), TypeError, r"argument out is a int, expected a tuple \(y, scale\)"
    yield quantizer, lambda i, o: (i, (o[0].float(), o[1])), TypeError, r"argument out \(y\) has dtype torch.float32"
    yield quantizer, lambda i, o: (i, (o[0], o[1].half())), TypeError, r"argument out \(scale\) has dtype torch.float16"
    yield quantizer, lambda i, o: (i, (o[0][1:], o[1])), ValueError, r"argument y has shape \(129, 257\)"
    yield quantizer, lambda i, o: (i, (o[0], o[1].contiguous())), ValueError, "argument scale must have first stride"
    overlapping = torch.zeros(257, dtype=torch.uint8).view(fn).expand(130, 257)
    yield quantizer, lambda i, o: (i, (overlapping, o[1])), ValueError, "argument y must have last|its rows overlap"
    yield quantizer, lambda i, o: (i, (o[0].to("meta"), o[1])), ValueError, r"out \(y\) is on meta, expected cpu"
    yield gemm, lambda i, o: ((i[0].float(), *i[1:]), None), TypeError, "argument a has dtype torch.float32"
    yield gemm, lambda i, o: ((i[0], i[1].float().to(fnuz), *i[2:]), None), TypeError, "argument b has dtype"
    yield gemm, lambda i, o: ((*i[:3], i[3].double()), None), TypeError, "argument b_s has dtype torch.float64"
    yield gemm, lambda i, o: ((i[0], i[1].contiguous(), *i[2:]), None), ValueError, "argument b must have first stride"
    yield gemm, lambda i, o: ((i[0], i[1][1:], *i[2:]), None), ValueError, r"argument b has shape \(256, 200\)"
    yield gemm, lambda i, o: ((i[0], i[1], i[2][:, 1:], i[3]), None), ValueError, r"argument a_s has shape \(130, 2\)"
    yield gemm, lambda i, o: ((*i[:3], i[3].to("meta")), None), ValueError, "argument b_s is on meta, expected cpu"
    yield gemm, lambda i, o: (i, (o[0].float(),)), TypeError, "argument out has dtype torch.float32, expected"
    yield gemm, lambda i, o: (i, (o[0].t().contiguous().t(),)), ValueError, "argument c must have last stride 1"
    yield gemm, lambda i, o: (i, ((o[0],),)), TypeError, "argument out is a tuple, expected a torch.Tensor"


@pytest.mark.parametrize("case", list(changes()), ids=lambda case: f"{case[0]}-{case[3][:40]}")
def test_what_does_not_fit_is_named(case):
    name, change, error, says = case
    shape = (130, 200, 257)
    inputs, out = change(operands(name, *shape), outputs(name, *shape))
    with pytest.raises(error, match=rf"^{name}: .*({says})"):
        call(name, inputs, out=out)


def test_out_dtype_is_checked():
    with pytest.raises(
        TypeError, match=r"argument out_dtype is torch\.float64, expected torch\.bfloat16 or torch\.float16"
    ):
        loader.gemm_1x128_128x1(*operands("gemm_1x128_128x1", 2, 3, 4), torch.float64)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_parameters(quantizer):
    w = torch.nn.Parameter(made((130, 257), 1, torch.bfloat16))
    with torch.no_grad():
        same(call(quantizer, (w,)), call(quantizer, (w.detach(),)))
    assert not any(t.requires_grad for t in call(quantizer, (torch.nn.Parameter(w.detach(), requires_grad=False),)))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_there_is_no_gradient_and_torch_says_so(quantizer):
    """A quantizer is a step of a layer's own forward and backward; on its own it has no gradient."""
    x = made((4, 130), 1, torch.float32).requires_grad_()
    y, scale = call(quantizer, (x,))
    same([t.detach() for t in (y, scale)], call(quantizer, (x.detach(),)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale.sum().backward()
    assert any(f"fp8_aot::{quantizer}: an autograd kernel was not registered" in str(w.message) for w in caught)
    assert x.grad is None


def test_in_an_autograd_function():
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y, scale = loader.act_quant_lhs(x)
            return y.float() * scale.repeat_interleave(128, 1)[:, : x.shape[1]]

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = made((4, 130), 1, torch.float32).requires_grad_()
    Rounded.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("name", GEMMS)
def test_a_broadcast_input(name):
    """An input may repeat its rows: stride 0."""
    a, b, a_s, b_s = operands(name, 8, 16, 200)
    row = a[:1].expand(8, 200)
    got = call(name, (row, b, a_s, b_s))
    same(got, call(name, (row.contiguous(), b, a_s, b_s)))
