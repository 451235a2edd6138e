"""Raw launches: what the driver sees, against a packing written here from the manifest's JSON."""

from __future__ import annotations

import importlib
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loader_kit import (
    BASE,
    argument_values,
    expected_variant,
    kernel_of,
    manifest_of,
    objects_of,
    packed,
    views_of,
    with_abi,
    write_bundle,
)

from fp8_aot import loader
from fp8_aot.loader import TensorView, config
from fp8_aot.loader.contract import MAX_SIZE
from fp8_aot.loader.driver import DriverError
from fp8_aot.loader.runtime import runtime

pytest_plugins = "loader_fixtures"

STREAM = 0x5555_1234_5670


def grid(manifest, variant, sizes):
    grid = [1, 1, 1]
    for axis, factors in enumerate(kernel_of(manifest, variant["kernel"])["grid"]):
        for factor in factors:
            tile = factor["tile"] if isinstance(factor["tile"], int) else variant["constexprs"][factor["tile"]]
            grid[axis] *= (sizes[factor["symbol"]] + tile - 1) // tile
    return tuple(grid)


SIZE = st.one_of(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([16, 128, 512, 1024, 2048, 4096, 2**20]))


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_driver_sees_what_the_manifest_says(target, on, bundles, data):
    manifest = manifest_of(bundles / f"{target}.zip")
    fake = on(target)
    runtime.unload()
    entry = data.draw(st.sampled_from(manifest["dispatch"]))
    kernel, dtypes = entry["kernel"], entry["dtypes"]
    tensors = [tensor["name"] for tensor in kernel_of(manifest, kernel)["tensors"]]
    sizes = {s: data.draw(SIZE, s) for s in ("M", "N", "K")}
    symbols = {d["symbol"] for t in kernel_of(manifest, kernel)["tensors"] for d in t["shape"]}
    sizes = {s: value for s, value in sizes.items() if s in symbols}
    pad = {name: data.draw(st.sampled_from([0, 0, 16, 1, 2**33]), f"pad {name}") for name in tensors}
    shift = {name: data.draw(st.sampled_from([0, 0, 0, 2**16, 4, 1]), f"shift {name}") for name in tensors}
    stream = data.draw(st.sampled_from([0, STREAM, 2**64 - 1]))
    views = views_of(manifest, kernel, dtypes, sizes, pad=pad, shift=shift)
    values = argument_values(manifest, kernel, sizes, views)
    variant = expected_variant(manifest, kernel, dtypes, sizes, values)

    loader.launch(kernel, views, stream=stream)

    (load,), (seen,) = fake.loads, fake.launches
    assert load.digest == variant["object"]
    assert seen.symbol == variant["symbol"]
    assert seen.params == packed(manifest, variant, values)
    assert seen.grid == grid(manifest, variant, sizes)
    assert seen.block == (variant["threads"], 1, 1)
    assert seen.shared == variant["shared"]
    assert seen.stream == stream
    assert seen.device == 0


GEMM = "gemm_1x128_128x1"
SIZES = {"M": 48, "N": 256, "K": 384}


@pytest.fixture(params=["sm90", "gfx942"])
def launching(request, on, bundles):
    """A stand-in, and the tensors of a launch that fits, to be spoilt."""
    manifest = manifest_of(bundles / f"{request.param}.zip")
    return on(request.param), views_of(manifest, GEMM, {"out": "bf16"}, SIZES), manifest


def changed(view, **fields):
    old = {name: getattr(view, name) for name in ("ptr", "dtype", "shape", "strides", "device", "backend")}
    return TensorView(**old | fields)


@pytest.mark.parametrize(
    ("name", "fields", "error", "says"),
    [
        ("a", {"dtype": "bf16"}, TypeError, "a has dtype bf16, expected e4m3fn"),
        ("a_s", {"dtype": "bf16"}, TypeError, "a_s has dtype bf16, expected fp32"),
        ("c", {"dtype": "e4m3fn"}, TypeError, "c has dtype e4m3fn, expected bf16 or fp16 or fp32"),
        ("a", {"shape": (48, 383)}, ValueError, r"b has shape \(384, 256\), expected \(383, 256\)"),
        ("b", {"shape": (385, 256)}, ValueError, r"b has shape \(385, 256\), expected \(384, 256\)"),
        ("a_s", {"shape": (48, 4)}, ValueError, r"a_s has shape \(48, 4\), expected \(48, 3\)"),
        ("c", {"shape": (48,), "strides": (1,)}, ValueError, r"c has shape \(48,\), expected two dimensions"),
        ("a", {"strides": (1, 48)}, ValueError, r"a has strides \(1, 48\), expected 1 in dimension 1"),
        ("b", {"strides": (256, 1)}, ValueError, r"b has strides \(256, 1\), expected 1 in dimension 0"),
        ("a", {"strides": (-384, 1)}, ValueError, r"a has strides \(-384, 1\), expected .* at least 0"),
        ("c", {"strides": (255, 1)}, ValueError, r"c has strides \(255, 1\), expected .* at least 256"),
        ("c", {"strides": (0, 1)}, ValueError, r"c has strides \(0, 1\), expected .* at least 256"),
        ("a", {"device": 1}, ValueError, "tensors are on different devices: a on 1; device=0"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_happens(launching, name, fields, error, says):
    fake, views, _ = launching
    device = 0 if "device" in fields else None
    with pytest.raises(error, match=says):
        loader.launch(GEMM, views | {name: changed(views[name], **fields)}, device=device)
    assert fake.loads == fake.launches == []


def test_a_set_of_tensors_that_does_not_fit(launching):
    fake, views, manifest = launching
    without = {name: view for name, view in views.items() if name != "b_s"}
    with pytest.raises(ValueError, match=r"tensors are a, b, a_s, c, expected a, b, a_s, b_s, c"):
        loader.launch(GEMM, without)
    with pytest.raises(ValueError, match=r"tensors are a, b, a_s, b_s, c, d, expected a, b, a_s, b_s, c"):
        loader.launch(GEMM, views | {"d": views["c"]})
    other = {"cuda": "hip", "hip": "cuda"}[manifest["target"]["backend"]]
    with pytest.raises(ValueError, match="tensors are of different backends: cuda, hip"):
        loader.launch(GEMM, views | {"c": changed(views["c"], backend="cuda")}, backend="hip")
    with pytest.raises(ValueError, match="backend is 'metal', expected 'cuda' or 'hip'"):
        loader.launch(GEMM, views, backend="metal")
    with pytest.raises(DriverError):
        loader.launch(GEMM, views, backend=other)
    with pytest.raises(DriverError, match="device is 7, this machine has 1"):
        loader.launch(GEMM, views, device=7)
    with pytest.raises(TypeError, match="a is a list, expected a TensorView"):
        loader.launch(GEMM, views | {"a": [1, 2]})
    for stream, kind in (("0", TypeError), (None, TypeError), (1.0, TypeError), (-1, ValueError), (2**64, ValueError)):
        with pytest.raises(kind, match=f"stream is {stream!r}, expected the driver's handle"):
            loader.launch(GEMM, views, stream=stream)
    with pytest.raises(TypeError, match="tensors is a list, expected a mapping from names to tensors"):
        loader.launch(GEMM, list(views.values()))
    assert fake.loads == fake.launches == []


def test_mixed_dtypes_of_one_axis_are_refused(on, bundles):
    """Two tensors of one axis must agree."""
    manifest = manifest_of(bundles / "sm90.zip")
    kernel = kernel_of(manifest, "act_quant_lhs")
    kernel["tensors"][1]["dtype"] = "in"
    kernels = manifest["kernels"]
    manifest["kernels"] = [with_abi(kernel) if k["name"] == "act_quant_lhs" else k for k in kernels]
    fake = on("sm90")
    config.update(None, write_bundle(bundles.parent / "mixed.zip", manifest))
    views = views_of(manifest, "act_quant_lhs", {"in": "fp16"}, {"M": 3, "K": 5})
    with pytest.raises(TypeError, match="act_quant_lhs: y has dtype fp32, expected fp16"):
        loader.launch("act_quant_lhs", views | {"y": changed(views["y"], dtype="fp32")})
    assert fake.loads == []


def test_sizes_beyond_the_limit(launching):
    fake, _, manifest = launching
    for sizes in ({"M": MAX_SIZE + 1, "N": 1, "K": 1}, {"M": 1, "N": 1, "K": 2**40}):
        views = views_of(manifest, GEMM, {"out": "bf16"}, sizes)
        large = next(symbol for symbol in sizes if sizes[symbol] > 1)
        with pytest.raises(ValueError, match=f"size {large} is {sizes[large]}, expected at most {MAX_SIZE}"):
            loader.launch(GEMM, views)
    with pytest.raises(ValueError, match="need a grid of"):
        loader.launch(GEMM, views_of(manifest, GEMM, {"out": "bf16"}, {"M": MAX_SIZE, "N": MAX_SIZE, "K": 1}))
    assert fake.loads == fake.launches == []
    loader.launch(GEMM, views_of(manifest, GEMM, {"out": "bf16"}, {"M": MAX_SIZE, "N": 1, "K": 1}))
    (seen,) = fake.launches
    assert seen.params[40:44] == struct.pack("<i", MAX_SIZE)


def test_nothing_is_launched_for_an_empty_output(launching):
    fake, _, manifest = launching
    before = loader.stats()
    for sizes in (SIZES | {"M": 0}, SIZES | {"N": 0}, dict.fromkeys(SIZES, 0)):
        loader.launch(GEMM, views_of(manifest, GEMM, {"out": "fp32"}, sizes))
    assert fake.loads == fake.launches == []
    assert loader.stats() == before
    # An empty sum is not an empty output.
    loader.launch(GEMM, views_of(manifest, GEMM, {"out": "fp32"}, SIZES | {"K": 0}))
    assert len(fake.launches) == 1


def test_strides_that_nothing_reads_are_free(launching):
    fake, _, manifest = launching
    views = views_of(manifest, GEMM, {"out": "bf16"}, {"M": 1, "N": 1, "K": 1})
    loader.launch(GEMM, {name: changed(view, strides=(7, 9)) for name, view in views.items()})
    assert len(fake.launches) == 1


def test_misses_are_raised_and_counted(launching, bundles):
    fake, views, manifest = launching
    before = loader.stats().misses
    with pytest.raises(loader.MissError, match=r"\.zip has no kernel softmax, it has act_quant_lhs, "):
        loader.launch("softmax", views)
    manifest["dispatch"] = [d for d in manifest["dispatch"] if d["dtypes"] != {"out": "bf16"}]
    config.update(None, write_bundle(bundles.parent / f"fewer-{manifest['target']['name']}.zip", manifest))
    runtime.unload()
    with pytest.raises(loader.MissError, match=rf"no prebuilt kernel for {GEMM} \(out=bf16\) for .*: has {GEMM} for "):
        loader.launch(GEMM, views)
    config.update(None, bundles.parent / "nowhere.zip")
    runtime.unload()
    with pytest.raises(loader.MissError, match=rf"no prebuilt kernel {GEMM}: no bundle for .*nowhere.zip.*not exist"):
        loader.launch(GEMM, views)
    assert loader.stats().misses - before == 3
    assert fake.loads == []


def test_launching_on_another_device_than_the_current_one(on, bundles):
    manifest = manifest_of(bundles / "sm90.zip")
    fake = on("sm90", count=2)
    views = views_of(manifest, GEMM, {"out": "bf16"}, SIZES)
    loader.launch(GEMM, {name: changed(view, device=1) for name, view in views.items()})
    assert fake.context_depth() == 0
    fake.push(0)
    loader.launch(GEMM, views)
    loader.launch(GEMM, views, device=1)
    assert [seen.device for seen in fake.launches] == [1, 0, 1]
    assert fake.context_depth() == 1


def scratch_bundle(bundles, tmp_path, size, align=128):
    manifest = manifest_of(bundles / "sm90.zip")
    for variant in manifest["variants"]:
        variant["global_scratch"] = {"size": size, "align": align}
    return manifest, write_bundle(tmp_path / "scratch.zip", manifest, objects_of(bundles / "sm90.zip"))


class Memory:
    def __init__(self, ptr, nbytes):
        self.nbytes = nbytes
        self.__cuda_array_interface__ = {"data": (ptr, False)}


def test_global_scratch(on, bundles, tmp_path):
    manifest, path = scratch_bundle(bundles, tmp_path, size=96)
    fake = on("sm90")
    config.update(None, path)
    views = views_of(manifest, GEMM, {"out": "bf16"}, SIZES)
    need = 96 * 4  # a grid of 4 blocks of 64 x 64
    for scratch, have in ((None, 0), (Memory(BASE, need - 1), need - 1)):
        with pytest.raises(ValueError, match=f"scratch has {have} bytes, this launch needs {need}"):
            loader.launch(GEMM, views, scratch=scratch)
    with pytest.raises(ValueError, match=r"scratch is at 0x7f0000000001, this launch needs a multiple of 128"):
        loader.launch(GEMM, views, scratch=Memory(BASE + 1, need))
    with pytest.raises(TypeError, match="scratch is a memoryview, expected a torch tensor"):
        loader.launch(GEMM, views, scratch=memoryview(bytearray(need)))
    assert fake.launches == []
    loader.launch(GEMM, views, scratch=Memory(BASE + 128, need))
    loader.launch(GEMM, views, scratch=Memory(BASE + 256, need))
    values = argument_values(manifest, GEMM, SIZES, views)
    variant = expected_variant(manifest, GEMM, {"out": "bf16"}, SIZES, values)
    place = variant["params"][-2]["offset"]
    for seen, address in zip(fake.launches, (BASE + 128, BASE + 256), strict=True):
        expected = bytearray(packed(manifest, variant, values))
        struct.pack_into("<Q", expected, place, address)
        assert seen.params == bytes(expected)
        assert seen.grid == (4, 1, 1)


def test_threads_never_mix_up_their_parameters(on, bundles):
    """Eight threads launch one plan, each with its own addresses and stream."""
    manifest = manifest_of(bundles / "gfx942.zip")
    fake = on("gfx942")
    before, rounds = loader.stats().launches, 60
    start = threading.Barrier(8)

    def work(number):
        views = views_of(manifest, GEMM, {"out": "bf16"}, SIZES)
        mine = {name: changed(view, ptr=view.ptr + 4096 * number) for name, view in views.items()}
        start.wait()
        for _ in range(rounds):
            loader.launch(GEMM, mine, stream=number)
        return argument_values(manifest, GEMM, SIZES, mine)

    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(work, range(8)))
    variant = expected_variant(manifest, GEMM, {"out": "bf16"}, SIZES, values[0])
    wanted = [packed(manifest, variant, mine) for mine in values]
    assert len({bytes(params) for params in wanted}) == 8
    assert len(fake.launches) == 8 * rounds
    assert all(seen.params == wanted[seen.stream] for seen in fake.launches)
    assert [sum(seen.stream == number for seen in fake.launches) for number in range(8)] == [rounds] * 8
    assert loader.stats().launches - before == 8 * rounds
    assert len(fake.loads) == 1


def test_a_refused_launch_leaves_the_plan_usable(on, bundles):
    manifest = manifest_of(bundles / "sm90.zip")
    fake = on("sm90")
    views = views_of(manifest, GEMM, {"out": "bf16"}, SIZES)
    loader.launch(GEMM, views)
    (plan,) = runtime.state("cuda", 0).plans.values()
    before = loader.stats().launches
    fake.failing["cuLaunchKernelEx"] = 1
    for _ in range(5):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            loader.launch(GEMM, views)
    del fake.failing["cuLaunchKernelEx"]
    with pytest.raises(struct.error):
        plan.launch((2**64,) * 5, 0)
    loader.launch(GEMM, views, stream=9)
    assert loader.stats().launches - before == 1
    assert len(plan._pool) == 1
    first, last = fake.launches
    assert (last.params, last.grid, last.address) == (first.params, first.grid, first.address)


def test_plans_are_reused_and_bounded(on, bundles, monkeypatch):
    manifest = manifest_of(bundles / "sm90.zip")
    fake = on("sm90")
    monkeypatch.setattr(importlib.import_module("fp8_aot.loader.runtime"), "_MAX_PLANS", 8)
    before = loader.stats().launches
    state = runtime.state("cuda", 0)
    for rows in [*range(1, 21), *range(1, 21)]:
        sizes = {"M": rows, "K": 256}
        views = views_of(manifest, "act_quant_lhs", {"in": "bf16"}, sizes)
        loader.launch("act_quant_lhs", views)
        held = dict(state.plans)
        loader.launch("act_quant_lhs", views)
        assert state.plans == held
        assert len(held) <= 8
        values = argument_values(manifest, "act_quant_lhs", sizes, views)
        variant = expected_variant(manifest, "act_quant_lhs", {"in": "bf16"}, sizes, values)
        for seen in fake.launches[-2:]:
            assert seen.params == packed(manifest, variant, values)
    assert loader.stats().launches - before == 80


def test_strides_alone_make_another_plan(on, bundles):
    manifest = manifest_of(bundles / "sm90.zip")
    fake = on("sm90")
    for pad in (0, 16, 32, 0, 1, 3):
        views = views_of(manifest, GEMM, {"out": "bf16"}, SIZES, pad={"a": pad, "c": pad})
        values = argument_values(manifest, GEMM, SIZES, views)
        variant = expected_variant(manifest, GEMM, {"out": "bf16"}, SIZES, values)
        loader.launch(GEMM, views)
        assert fake.launches[-1].params == packed(manifest, variant, values)
    assert len(runtime.state("cuda", 0).plans) == 5
