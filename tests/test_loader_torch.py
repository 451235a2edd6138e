"""The torch face over a stand-in driver: from tensors to launches."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loader_kit import manifest_of, objects_of, stand_in, write_bundle
from torch_kit import FP8, STREAM, GpuTensor, call, expected

from fp8_aot import loader
from fp8_aot.loader import contract, ops, torch_call
from fp8_aot.loader.driver import DriverError

pytest_plugins = ("loader_fixtures", "torch_fixtures")


@pytest.mark.parametrize("name", contract.OPS)
def test_an_operation_becomes_one_launch(gpu, bundles, name):
    gemm = name.startswith("gemm")
    axis = {"out": "fp32"} if gemm else {"in": "bf16"}
    for shape in ((64, 256, 128), (64, 256, 128), (33, 70, 5)):
        inputs = gpu.operands(name, *shape)
        before = len(gpu.fake.launches)
        outputs = call(name, inputs, out_dtype=torch.float32)
        assert list(outputs) == gpu.allocated[-len(outputs) :]
        (seen,) = gpu.fake.launches[before:]
        variant, params = expected(gpu, bundles, name, (*inputs, *outputs), axis)
        assert variant["object"] in {load.digest for load in gpu.fake.loads}
        assert seen.params == params
        assert (seen.symbol, seen.stream, seen.device) == (variant["symbol"], STREAM, 0)
        assert seen.block == (variant["threads"], 1, 1)
        wanted = gpu.outputs(name, *shape, out_dtype=torch.float32)
        for output, like in zip(outputs, wanted, strict=True):
            assert (output.shape, output.stride(), output.dtype, output.device) == (
                like.shape,
                like.stride(),
                like.dtype,
                like.device,
            )


@pytest.mark.parametrize("name", contract.OPS)
def test_inputs_are_planned_once_for_each_layout_and_alignment(gpu, bundles, name, monkeypatch):
    """Each input in turn misaligned, and with a pitch; again and again, from the shortest way to launch."""
    axis = {"out": "bf16"} if name.startswith("gemm") else {"in": "bf16"}
    generic = []
    run = torch_call.Call.run
    monkeypatch.setattr(torch_call.Call, "run", lambda *a: generic.append(1) or run(*a))
    op, shape = contract.OPS[name], (128, 256, 384)
    for again in range(3):
        generic.clear()
        for odd in range(len(op.inputs)):
            for shift, pitch in ((0, 0), (1, 0), (16, 0), (0, 1)):
                inputs = gpu.operands(name, *shape)
                old, unit = inputs[odd], op.inputs[odd].unit_dim
                line = old.shape[unit] + pitch
                strides = (line, 1) if unit else (1, line)
                inputs[odd] = gpu.tensor(old.shape, old.dtype, strides=strides, shift=shift)
                outputs = call(name, inputs)
                variant, params = expected(gpu, bundles, name, (*inputs, *outputs), axis)
                seen = gpu.fake.launches[-1]
                assert seen.params == params
                assert (seen.symbol, seen.block[0]) == (variant["symbol"], variant["threads"])
                assert seen.shared == variant["shared"]
        assert (generic == []) == (again > 0)


@pytest.mark.parametrize("name", ["weight_quant_rhs", "gemm_1x128_128x128"])
def test_given_outputs_are_planned_once_for_each_layout_and_alignment(gpu, bundles, name, monkeypatch):
    gemm = name.startswith("gemm")
    axis = {"out": "bf16"} if gemm else {"in": "bf16"}
    slow = []
    prepare = torch_call.Call._prepare
    monkeypatch.setattr(torch_call.Call, "_prepare", lambda *a: slow.append(1) or prepare(*a))
    shape = (128, 256, 384)
    # 512: a pitch that is longer than a line; 1: an address that no wide store may use.
    for shift, pitch in ((0, 0), (0, 512), (1, 0), (0, 0), (0, 512), (1, 0), (16, 0)):
        inputs = gpu.operands(name, *shape)
        outputs = gpu.outputs(name, *shape, shift=shift)
        if pitch:
            first = outputs[0]
            strides = (pitch, 1) if gemm else (1, pitch)
            outputs = (gpu.tensor(first.shape, first.dtype, strides=strides), *outputs[1:])
        planned = len(slow)
        returned = call(name, inputs, outputs)
        assert all(got is given for got, given in zip(returned, outputs, strict=True))
        variant, params = expected(gpu, bundles, name, (*inputs, *outputs), axis)
        assert variant["specialization"] == ("general" if shift == 1 else "aligned")
        seen = gpu.fake.launches[-1]
        assert seen.params == params
        assert variant["object"] in {load.digest for load in gpu.fake.loads}
        assert seen.block == (variant["threads"], 1, 1)
        assert len(slow) - planned == (1 if planned < 3 else 0)
    assert gpu.allocated == []
    # A call without out= is not served by what was planned for given outputs.
    call(name, gpu.operands(name, *shape))
    assert len(slow) == 4
    assert len(gpu.allocated) == len(outputs)


@pytest.mark.parametrize("name", ["act_quant_lhs", "gemm_1x128_128x128"])
def test_the_shortest_way_is_for_eager_calls_without_gradients(gpu, monkeypatch, name):
    """What ``Call._eager`` sends to the dispatcher must not slip past it once a launch is prepared."""
    asked = []
    general = torch_call.Call.__call__
    monkeypatch.setattr(torch_call.Call, "__call__", lambda *a, **k: asked.append(1) or general(*a, **k))
    inputs = gpu.operands(name, 64, 128, 256)
    call(name, inputs)
    asked.clear()
    call(name, inputs)
    assert asked == [], "a prepared launch takes the shortest way"
    for tensor in inputs:
        tensor.requires_grad_(True)
        call(name, inputs)
        tensor.requires_grad_(False)
    assert len(asked) == len(inputs)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        call(name, inputs)
    assert len(asked) == len(inputs) + 1


def test_given_outputs_that_do_not_fit_are_named(gpu):
    inputs = gpu.operands("act_quant_lhs", 4, 0, 256)
    y, scale = gpu.outputs("act_quant_lhs", 4, 0, 256)
    call("act_quant_lhs", inputs, (y, scale))
    call("act_quant_lhs", inputs)
    launches = len(gpu.fake.launches)
    on_other = gpu.tensor((4, 256), y.dtype, index=1)
    wrong_fp8 = next(dtype for dtype in set(FP8.values()) if dtype != y.dtype)
    for out, error, says in (
        ((y,), ValueError, "argument out has 1 tensors, expected 2: y, scale"),
        ((), ValueError, "argument out has 0 tensors, expected 2: y, scale"),
        (y, TypeError, r"argument out is a GpuTensor, expected a tuple \(y, scale\)"),
        (7, TypeError, r"argument out is a int, expected a tuple \(y, scale\)"),
        ((y, None), TypeError, r"argument out \(scale\) is a NoneType, expected a torch.Tensor"),
        ((on_other, scale), ValueError, r"argument out \(y\) is on cuda:1, expected cuda:0"),
        ((gpu.tensor((4, 256), wrong_fp8), scale), TypeError, r"argument out \(y\) has dtype"),
        ((gpu.tensor((5, 256), y.dtype), scale), ValueError, r"argument y has shape \(5, 256\), expected \(4, 256\)"),
        ((y, gpu.tensor((4, 2), scale.dtype)), ValueError, "argument scale must have first stride 1"),
    ):
        with pytest.raises(error, match=says):
            call("act_quant_lhs", inputs, out)
    assert len(gpu.fake.launches) == launches


def test_wrong_inputs_are_named_before_any_driver_call(gpu):
    calls = len(gpu.fake.calls)
    a, b, a_s, b_s = gpu.operands("gemm_1x128_128x1", 4, 8, 256)
    other = gpu.tensor((256, 8), a.dtype, 0, index=1)
    wrong_fp8 = next(dtype for dtype in set(FP8.values()) if dtype != a.dtype)
    for inputs, error, says in (
        ((a, other, a_s, b_s), ValueError, "argument b is on cuda:1, expected cuda:0 like a"),
        ((gpu.tensor((4, 256), wrong_fp8), b, a_s, b_s), TypeError, "argument a has dtype .*, expected"),
        ((a, b, a_s, None), TypeError, "argument b_s is a NoneType, expected a torch.Tensor"),
        ((a, gpu.tensor((255, 8), a.dtype, 0), a_s, b_s), ValueError, r"argument b has shape \(255, 8\)"),
    ):
        with pytest.raises(error, match=says):
            call("gemm_1x128_128x1", inputs)
    with pytest.raises(TypeError, match=r"argument out_dtype is torch.float64, expected torch.bfloat16 or"):
        call("gemm_1x128_128x1", (a, b, a_s, b_s), out_dtype=torch.float64)
    assert len(gpu.fake.calls) == calls
    assert gpu.allocated == []


def test_nothing_is_launched_for_an_empty_output(gpu):
    before = loader.stats()
    for _ in range(2):
        y, scale = call("act_quant_lhs", gpu.operands("act_quant_lhs", 0, 0, 256))
        assert (y.shape, scale.shape) == ((0, 256), (0, 2))
        out = gpu.outputs("act_quant_lhs", 0, 0, 256)
        assert call("act_quant_lhs", gpu.operands("act_quant_lhs", 0, 0, 256), out)[0] is out[0]
    assert gpu.fake.launches == gpu.fake.loads == []
    assert loader.stats() == before


def test_the_tensors_device_and_its_stream_are_used(gpu):
    for _ in range(2):
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 8, 0, 128, index=1))
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 8, 0, 128, index=0))
    assert [(seen.device, seen.stream) for seen in gpu.fake.launches] == [(1, STREAM + 1), (0, STREAM)] * 2
    # None was tried on the wrong device first.
    name = "cuLaunchKernelEx" if gpu.target == "sm90" else "hipModuleLaunchKernel"
    assert gpu.fake.calls.count(name) == 4


def test_a_thread_without_a_context_is_given_one(gpu_of, on):
    """On CUDA a new thread has no context until something makes one: the driver says 201."""
    gpu, fake = gpu_of("sm90"), on("sm90")
    call("act_quant_lhs", gpu.operands("act_quant_lhs", 8, 0, 128))
    assert fake.context_depth() == 0
    launched = fake.calls.count("cuLaunchKernelEx")
    before = loader.stats().launches
    call("act_quant_lhs", gpu.operands("act_quant_lhs", 8, 0, 128))
    assert fake.calls.count("cuLaunchKernelEx") == launched + 2
    assert loader.stats().launches == before + 1
    assert (len(fake.launches), fake.context_depth()) == (2, 0)
    # An error with the right context is not tried again.
    fake.push(0)
    fake.failing["cuLaunchKernelEx"] = 1
    launched = fake.calls.count("cuLaunchKernelEx")
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 8, 0, 128))
    assert fake.calls.count("cuLaunchKernelEx") == launched + 1


def test_scratch_is_allocated_for_each_launch(gpu_of, on, bundles, tmp_path, monkeypatch):
    manifest = manifest_of(bundles / "sm90.zip")
    for variant in manifest["variants"]:
        variant["global_scratch"] = {"size": 64, "align": 128}
    gpu, fake = gpu_of("sm90"), on("sm90")
    fake.push(0)
    loader.configure(bundle_path=write_bundle(tmp_path / "s.zip", manifest, objects_of(bundles / "sm90.zip")))
    asked = []

    def empty(size, *, dtype, device):
        asked.append((size, dtype, str(device)))
        return GpuTensor((size,), (1,), dtype, device, 0xABC000 + len(asked))

    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(2):
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 8, 0, 256))
    assert asked == [(64 * 4, torch.uint8, "cuda:0")] * 2  # 2 x 2 blocks
    place = manifest["variants"][0]["params"][-2]["offset"]
    found = [int.from_bytes(seen.params[place : place + 8], "little") for seen in fake.launches]
    assert found == [0xABC001, 0xABC002]


def test_capture(gpu):
    gpu.fake.capturing.add(STREAM)
    inputs = gpu.operands("act_quant_lhs", 8, 0, 128)
    with pytest.raises(loader.CaptureError, match="preload"):
        call("act_quant_lhs", inputs)
    assert gpu.fake.loads == []
    loader.preload(kernels="act_quant_lhs")
    for _ in range(2):
        call("act_quant_lhs", inputs)
    assert [seen.stream for seen in gpu.fake.launches] == [STREAM, STREAM]


def test_explain_shows_the_steps_that_the_launch_takes(gpu, bundles):
    for name in contract.OPS:
        for shape in ((16, 256, 256), (600, 256, 256), (5000, 4096, 4096), (16, 255, 257)):
            inputs = gpu.operands(name, *shape)
            choice = loader.explain(name, *inputs, out_dtype=torch.bfloat16)
            outputs = call(name, inputs)
            axis = {"out": "bf16"} if name.startswith("gemm") else {"in": "bf16"}
            variant, _ = expected(gpu, bundles, name, (*inputs, *outputs), axis)
            assert choice.variant.id == variant["id"]
            assert choice.steps[-1].taken
            assert variant["object"] in {load.digest for load in gpu.fake.loads}
    with pytest.raises(ValueError, match="argument x is on cpu, expected a GPU: elsewhere nothing is launched"):
        loader.explain("act_quant_lhs", torch.zeros(2, 3))
    with pytest.raises(TypeError, match="gemm_1x128_128x1: got 1 tensors, expected 4: a, b, a_s, b_s"):
        loader.explain("gemm_1x128_128x1", torch.zeros(2, 3))


def test_explain_shows_every_bundle_that_was_looked_at(gpu_of, bundles, tmp_path):
    gpu = gpu_of("sm90")
    stand_in("sm90")
    for name in ("a", "b"):
        shutil.copy(bundles / "sm90.zip", tmp_path / f"{name}.zip")
    loader.configure(bundle_path=os.pathsep.join([str(bundles / "gfx942.zip"), str(tmp_path)]))
    choice = loader.explain("act_quant_lhs", *gpu.operands("act_quant_lhs", 600, 0, 256))
    origin = "(configure(bundle_path=...))"
    assert [(step.subject, step.taken) for step in choice.steps[:3]] == [
        (f"{bundles / 'gfx942.zip'} {origin}", False),
        (f"{tmp_path / 'a.zip'} {origin}", True),
        (f"{tmp_path / 'b.zip'} {origin}", False),
    ]
    assert choice.steps[0].reason == "built for hip gfx942, this device is cuda 90"
    shown = str(choice).splitlines()
    assert shown[0] == choice.cell and shown[-1] == f"  -> {choice.variant.id}"
    assert shown[1:-1] == [f"  {step}" for step in choice.steps]


def test_explain_without_a_bundle(gpu_of, tmp_path):
    gpu = gpu_of("sm90")
    stand_in("sm90")
    choice = loader.explain("act_quant_lhs", *gpu.operands("act_quant_lhs", 4, 0, 128))
    assert choice.variant is None
    assert choice.cell == "act_quant_lhs on cuda 90"
    assert [str(step) for step in choice.steps] == [
        "artifacts (./artifacts): passed over: does not exist",
        "bundles: passed over: no bundle for cuda 90",
    ]


def test_prepared_calls_are_bounded_and_dropped_on_configure(gpu, monkeypatch):
    monkeypatch.setattr(torch_call, "_MAX_READY", 4)
    ready = ops._act_quant_lhs._ready
    for rows in range(1, 12):
        call("act_quant_lhs", gpu.operands("act_quant_lhs", rows, 0, 128))
        assert 1 <= len(ready) <= 4
    assert len(gpu.fake.launches) == 11
    loader.configure(mode="strict")
    assert ready == {}
    call("act_quant_lhs", gpu.operands("act_quant_lhs", 11, 0, 128))
    assert len(gpu.fake.launches) == 12


def test_threads(gpu):
    """Eight threads call one operation with tensors of their own."""
    inputs = [gpu.operands("act_quant_lhs", 8, 0, 128) for _ in range(8)]
    outs = [gpu.outputs("act_quant_lhs", 8, 0, 128) for _ in range(8)]
    start = threading.Barrier(8)
    before = loader.stats().launches

    def work(number):
        start.wait()
        for _ in range(40):
            call("act_quant_lhs", inputs[number], outs[number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    pointers = [b"".join(t.address.to_bytes(8, "little") for t in (*inputs[n], *outs[n])) for n in range(8)]
    seen = [launch.params[:24] for launch in gpu.fake.launches]
    assert sorted(seen) == sorted(pointers * 40)
    assert loader.stats().launches - before == 320
    assert len(gpu.fake.loads) == 1
