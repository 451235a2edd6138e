"""What a miss does in each mode, over a stand-in driver, with the JIT only recorded."""

from __future__ import annotations

import importlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from loader_kit import manifest_of, objects_of, stand_in, with_abi, write_bundle
from torch_kit import FP8, NAMES, call, expected, without

from fp8_aot import loader

pytest_plugins = ("loader_fixtures", "torch_fixtures")


def test_strict_raises_before_the_jit(gpu, by_jit, bundles, tmp_path):
    loader.configure(mode="strict", bundle_path=without(bundles, tmp_path, gpu.target, "bf16"))
    before = loader.stats()
    for _ in range(2):
        with pytest.raises(
            loader.MissError, match=r"no prebuilt kernel for act_quant_lhs \(in=bf16\) for .*: has act_q"
        ):
            call("act_quant_lhs", gpu.operands("act_quant_lhs", 4, 0, 128))
    after = loader.stats()
    assert (after.misses - before.misses, after.fallbacks - before.fallbacks) == (2, 0)
    assert by_jit == []
    assert gpu.fake.loads == []


def test_warn_warns_once_for_each_cell_and_takes_the_jit(gpu, by_jit, bundles, tmp_path):
    loader.configure(mode="warn", bundle_path=without(bundles, tmp_path, gpu.target, "bf16"))
    before = loader.stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (4, 4, 700):
            inputs = gpu.operands("act_quant_lhs", rows, 0, 128)
            y, scale = loader.act_quant_lhs(*inputs)
            asked = by_jit[-1]
            assert (asked.kernel, asked.sizes, asked.like) == ("act_quant_lhs", {"M": rows, "K": 128}, None)
            assert asked.fp8 == NAMES[FP8[gpu.target]]
            assert asked.tensors == {"x": inputs[0], "y": y, "scale": scale}
    (warning,) = caught
    assert warning.category is loader.MissWarning
    assert str(warning.message).startswith("no prebuilt kernel for act_quant_lhs (in=bf16) for ")
    assert "FP8_AOT_MODE=strict raises instead" in str(warning.message)
    assert warning.filename == __file__, "the warning points at the caller"
    # Another cell, which is there, still comes from the bundle.
    call("act_quant_rhs", gpu.operands("act_quant_rhs", 4, 0, 128))
    after = loader.stats()
    assert (after.misses - before.misses, after.fallbacks - before.fallbacks) == (3, 3)
    assert (after.launches - before.launches, len(by_jit)) == (1, 3)


def test_warn_without_any_bundle_says_where_it_looked(gpu_of, by_jit, tmp_path):
    gpu = gpu_of("sm90")
    stand_in("sm90")
    loader.configure(bundle_path=tmp_path / "none.zip")
    with pytest.warns(loader.MissWarning, match=r"act_quant_lhs on cuda 90: no bundle .*looked at: .*none.zip.*exist"):
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 4, 0, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 4, 0, 128))
    assert len(by_jit) == 2


def test_one_of_many_threads_warns(gpu, by_jit, bundles, tmp_path):
    loader.configure(mode="warn", bundle_path=without(bundles, tmp_path, gpu.target, "bf16"))
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 4, 0, 128))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    assert len(caught) == 1
    assert len(by_jit) == 8


def test_jit_always_takes_the_jit_with_the_bundles_tiles(gpu, by_jit, bundles):
    loader.configure(mode="jit")
    before = loader.stats()
    for _ in range(2):
        inputs = gpu.operands("gemm_1x128_128x128", 16, 256, 256)
        outputs = call("gemm_1x128_128x128", inputs)
        variant, _ = expected(gpu, bundles, "gemm_1x128_128x128", (*inputs, *outputs), {"out": "bf16"})
        assert by_jit[-1].like.id == variant["id"]
        choice = loader.explain("gemm_1x128_128x128", *inputs)
        assert choice.variant is None
        assert str(choice.steps[-1]) == f"mode jit: taken: the JIT compiles the tile of {variant['id']}"
    after = loader.stats()
    assert (after.fallbacks - before.fallbacks, after.misses - before.misses) == (2, 0)
    assert gpu.fake.loads == gpu.fake.launches == []


@pytest.mark.parametrize("mode", ["strict", "warn"])
def test_a_missing_driver_is_a_miss(gpu_of, by_jit, monkeypatch, mode):
    gpu = gpu_of("sm90")
    monkeypatch.setattr("fp8_aot.loader.driver.cuda.LIBRARY", "libnosuch.so.1")
    loader.configure(mode=mode)
    inputs = gpu.operands("act_quant_lhs", 4, 0, 128)
    if mode == "strict":
        with pytest.raises(loader.MissError, match="no prebuilt kernel for act_quant_lhs on cuda:0: libnosuch"):
            call("act_quant_lhs", inputs)
    else:
        with pytest.warns(loader.MissWarning, match="no prebuilt kernel for act_quant_lhs on cuda:0: libnosuch"):
            call("act_quant_lhs", inputs)
    assert len(by_jit) == (mode == "warn")


def test_damage_is_no_miss(gpu, by_jit, bundles, tmp_path):
    """A damaged object must not silently become a compilation."""
    manifest, objects = manifest_of(bundles / f"{gpu.target}.zip"), objects_of(bundles / f"{gpu.target}.zip")
    broken = {name: data[:-1] + b"\xa5" for name, data in objects.items()}
    loader.configure(mode="warn", bundle_path=write_bundle(tmp_path / "b.zip", manifest, broken))
    with pytest.raises(loader.IntegrityError, match="is damaged"):
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 4, 0, 128))
    assert by_jit == []


@pytest.mark.parametrize("mode", ["warn", "jit"])
def test_jit_without_triton_says_what_is_missing(gpu, by_jit, monkeypatch, bundles, tmp_path, mode):
    """Why nothing prebuilt fits, why the JIT cannot help, what to do; and no warning of a compilation."""
    loader.configure(mode=mode, bundle_path=without(bundles, tmp_path, gpu.target, "bf16"))
    monkeypatch.setattr(importlib.import_module("fp8_aot.loader.jit"), "available", lambda: "No module named 'triton'")
    why = {
        "warn": r"no prebuilt kernel for act_quant_lhs \(in=bf16\) for .*: has act_quant_lhs for .* only",
        "jit": "mode is jit",
    }
    with (
        warnings.catch_warnings(),
        pytest.raises(
            loader.MissError,
            match=f"^{why[mode]}; and the JIT cannot be used: No module named 'triton': "
            "install a bundle .* pip install 'fp8-aot",
        ),
    ):
        warnings.simplefilter("error")
        call("act_quant_lhs", gpu.operands("act_quant_lhs", 4, 0, 128))
    assert by_jit == [] and gpu.fake.launches == []


@pytest.mark.parametrize("change", ["name", "unit_dim", "group"])
def test_a_kernel_of_another_interface_is_a_miss(gpu, by_jit, bundles, tmp_path, change):
    """A bundle whose own parts agree, but whose kernel is not the operation that this package calls so."""
    manifest = manifest_of(bundles / f"{gpu.target}.zip")
    (kernel,) = (k for k in manifest["kernels"] if k["name"] == "act_quant_lhs")
    scale = kernel["tensors"][2]
    if change == "name":
        scale["name"] = "s"
        for arg in kernel["args"]:
            arg["tensor"] = "s" if arg.get("tensor") == "scale" else arg.get("tensor")
            if arg["tensor"] is None:
                del arg["tensor"]
    elif change == "unit_dim":
        scale["unit_dim"] = 1
    else:
        scale["shape"][1]["group"] = 64
    kernel.update(with_abi(kernel))
    path = write_bundle(tmp_path / "foreign.zip", manifest, objects_of(bundles / f"{gpu.target}.zip"))
    loader.configure(mode="strict", bundle_path=path)
    inputs = gpu.operands("act_quant_lhs", 64, 0, 256)
    reason = "its act_quant_lhs takes other tensors than this fp8-aot's: rebuild the bundle with this version"
    with pytest.raises(loader.MissError, match=reason):
        call("act_quant_lhs", inputs)
    assert loader.explain("act_quant_lhs", *inputs).reason == reason
    assert gpu.fake.launches == gpu.fake.loads == [] and by_jit == []
    call("act_quant_rhs", gpu.operands("act_quant_rhs", 64, 0, 256))
    assert len(gpu.fake.launches) == 1


def test_an_abi_that_is_not_the_kernels_is_no_bundle(bundles, tmp_path):
    manifest = manifest_of(bundles / "sm90.zip")
    manifest["kernels"][0]["abi"] = "0" * 64
    with pytest.raises(loader.BundleError, match="kernel act_quant_lhs: its abi is not that of its tensors"):
        write_bundle(tmp_path / "wrong.zip", manifest)
