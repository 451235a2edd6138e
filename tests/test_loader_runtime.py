"""Loading, counting, unloading, forking and capturing, over stand-in drivers and real bundles."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loader_kit import BACKENDS, manifest_of, stand_in, views_of

from fp8_aot import loader
from fp8_aot.loader import config
from fp8_aot.loader.counter import Counter
from fp8_aot.loader.driver import DriverError
from fp8_aot.loader.runtime import runtime

pytest_plugins = "loader_fixtures"

KERNEL = "act_quant_rhs"
TESTS = Path(__file__).parent


@pytest.fixture(params=["sm90", "gfx942"])
def target(request):
    return request.param


def small_launch(bundles, target, dtype="bf16", **options):
    manifest = manifest_of(bundles / f"{target}.zip")
    loader.launch(KERNEL, views_of(manifest, KERNEL, {"in": dtype}, {"M": 5, "K": 7}), **options)


def test_a_kernel_is_loaded_once_per_device(target, on, bundles):
    fake = on(target, count=2)
    before = loader.stats()
    for device in (0, 1, 0, 1):
        small_launch(bundles, target, device=device)
    assert [seen.device for seen in fake.launches] == [0, 1, 0, 1]
    # One library serves every CUDA device, a HIP module one.
    assert len(fake.loads) == (1 if target == "sm90" else 2)
    small_launch(bundles, target, "fp32")
    after = loader.stats()
    assert (after.loads - before.loads, after.launches - before.launches) == (3, 5)
    assert (after.misses, after.fallbacks) == (before.misses, before.fallbacks)


def test_a_load_from_many_threads_happens_once(target, on, bundles):
    fake = on(target)
    before = loader.stats()
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        small_launch(bundles, target)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    after = loader.stats()
    assert (after.loads - before.loads, after.launches - before.launches) == (1, 8)
    assert len(fake.loads) == 1
    assert len(fake.launches) == 8


def test_counting_loses_nothing():
    counter = Counter()
    seen = []

    def work(_):
        for _ in range(20_000):
            counter.add()

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            done = pool.map(work, range(6))
            seen.extend(counter.value() for _ in range(50))
            list(done)
    finally:
        sys.setswitchinterval(old)
    assert seen == sorted(seen)
    assert [counter.value(), counter.value()] == [120_000, 120_000]


def test_preload(target, on, bundles):
    fake = on(target)
    manifest = manifest_of(bundles / f"{target}.zip")

    def count(prefix):
        return sum(variant["kernel"].startswith(prefix) for variant in manifest["variants"])

    before = loader.stats().loads
    assert loader.preload(kernels="act_quant_lhs") == count("act_quant_lhs")
    assert loader.preload(kernels=("gemm_*", "act_quant_l*")) == count("gemm_") + count("act_quant_lhs")
    with pytest.raises(ValueError, match=r"kernels: 'softmax\*' matches no kernel of .*, it has act_quant_lhs, "):
        loader.preload(kernels=("gemm_*", "softmax*"))
    assert loader.preload(backend=BACKENDS[target]) == len(manifest["variants"])
    assert {load.digest for load in fake.loads} == {variant["object"] for variant in manifest["variants"]}
    loads = len(fake.loads)
    assert loads == len({variant["object"] for variant in manifest["variants"]})
    assert loader.stats().loads - before == len({(v["object"], v["symbol"]) for v in manifest["variants"]})
    small_launch(bundles, target)
    assert len(fake.loads) == loads
    with pytest.raises(DriverError, match="device is 3, this machine has 1"):
        loader.preload(device=3)


def test_preload_without_a_bundle(clean_loader):
    stand_in("sm90")
    assert loader.preload() == 0
    with pytest.raises(DriverError, match=r"libamdhip64\.so"):
        loader.preload(backend="hip")


def test_unload_and_reload(target, on, bundles):
    fake = on(target)
    small_launch(bundles, target)
    small_launch(bundles, target, "fp32")
    before = loader.stats()
    loader.unload()
    assert sorted(u.digest for u in fake.unloads) == sorted(load.digest for load in fake.loads)
    assert loader.stats() == before
    small_launch(bundles, target)
    assert len(fake.loads) == 3
    assert loader.stats().loads == before.loads + 1
    loader.unload()
    loader.unload()
    assert len(fake.unloads) == 3


def test_one_refused_unload_does_not_keep_the_others(on, bundles):
    fake = on("gfx942")
    small_launch(bundles, "gfx942")
    small_launch(bundles, "gfx942", "fp32")
    refused = []
    close = fake.library.hipModuleUnload

    def refuse_first(module):
        refused.append(module)
        return 1 if len(refused) == 1 else close(module)

    runtime.state("hip", 0).driver._functions["hipModuleUnload"] = refuse_first
    with pytest.raises(DriverError, match=r"unload of .* failed"):
        loader.unload()
    assert (len(refused), len(fake.unloads)) == (2, 1)
    small_launch(bundles, "gfx942")


def test_configure_starts_anew(on, bundles):
    fake = on("sm90")
    small_launch(bundles, "sm90")
    loader.configure(bundle_path=bundles / "sm100.zip")
    assert len(fake.unloads) == 1
    with pytest.raises(loader.MissError, match="built for cuda 100, this device is cuda 90"):
        small_launch(bundles, "sm90")
    loader.configure(bundle_path=bundles)
    small_launch(bundles, "sm90")
    assert [d.path.name for d in runtime.state("cuda", 0).decisions[:3]] == ["gfx942.zip", "sm100.zip", "sm90.zip"]


def test_a_capture_is_not_disturbed_by_a_load(target, on, bundles):
    fake = on(target)
    fake.capturing.add(77)
    for stream in (77, 0):  # the null stream cannot be used while another is captured
        with pytest.raises(loader.CaptureError, match=rf"{KERNEL}/.* is not loaded yet.*call fp8_aot.loader.preload\("):
            small_launch(bundles, target, stream=stream)
    assert fake.loads == fake.launches == []
    small_launch(bundles, target, stream=78)
    small_launch(bundles, target, stream=77)
    assert [seen.stream for seen in fake.launches] == [78, 77]


def test_a_capture_after_preload(target, on, bundles):
    fake = on(target)
    loader.preload(kernels=KERNEL)
    loads = len(fake.loads)
    fake.capturing.add(77)
    small_launch(bundles, target, stream=77)
    assert (len(fake.loads), len(fake.launches)) == (loads, 1)


def test_an_image_that_the_driver_refuses(target, on, bundles):
    fake = on(target)
    name = "cuLibraryLoadData" if target == "sm90" else "hipModuleLoadData"
    fake.failing[name] = 209
    before = loader.stats()
    for _ in range(2):
        with pytest.raises(DriverError, match=r"NO_BINARY_FOR_GPU|NoBinaryForGpu"):
            small_launch(bundles, target)
    assert loader.stats() == before
    del fake.failing[name]
    small_launch(bundles, target)
    assert len(fake.launches) == 1


def test_a_missing_driver(clean_loader, monkeypatch):
    monkeypatch.setattr("fp8_aot.loader.driver.cuda.LIBRARY", "libnosuch.so.1")
    monkeypatch.setattr("fp8_aot.loader.driver.hip.candidates", lambda: ["libnosuch.so"])
    view = loader.TensorView(0x1000, "bf16", (1, 1))
    with pytest.raises(DriverError, match=r"no GPU driver on this machine: .*; .*"):
        loader.launch(KERNEL, {"x": view})
    with pytest.raises(DriverError, match="no GPU driver on this machine"):
        loader.preload()
    with pytest.raises(DriverError, match="libnosuch"):
        loader.launch(KERNEL, {"x": view}, backend="cuda")


FORK = """
import os, sys
sys.path.insert(0, {tests!r})
from loader_kit import stand_in, manifest_of, views_of
from fp8_aot import loader
from fp8_aot.loader.runtime import runtime

path = {path!r}
loader.configure(bundle_path=path, mode="strict")
fake = stand_in("sm90")
views = views_of(manifest_of(path), "act_quant_rhs", {{"in": "bf16"}}, {{"M": 5, "K": 7}})

def launch(**options):
    loader.launch("act_quant_rhs", views, **options)

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        print("fine", flush=True)
        os._exit(0)
    os.waitpid(child, 0)

{body}
"""


def forked(bundles, body):
    script = FORK.format(tests=str(TESTS), path=str(bundles / "sm90.zip"), body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_fork_before_the_first_use_is_fine(bundles):
    assert forked(bundles, "in_child(launch); launch(); print(len(fake.launches))") == ["fine", "1"]


@pytest.mark.parametrize(
    "use",
    [
        "launch()",
        "runtime.state('cuda', 0)",  # no kernel is loaded, but the driver is initialised
        "launch(); loader.unload()",
        "launch(); loader.configure(mode='warn')",
    ],
)
def test_a_fork_after_the_first_use_is_refused_in_the_child(bundles, use):
    lines = forked(
        bundles,
        f"{use}\n"
        "calls = len(fake.calls)\n"
        "def child():\n"
        "    for work in (launch, lambda: launch(device=0), loader.preload, lambda: runtime.state('cuda', 0)):\n"
        "        try:\n"
        "            work()\n"
        "        except loader.ForkError as error:\n"
        "            assert 'spawn' in str(error)\n"
        "        else:\n"
        "            raise AssertionError('not refused')\n"
        "    loader.stats(); loader.unload(); loader.configure(mode='strict')\n"
        "    assert len(fake.calls) == calls, 'the child called the driver'\n"
        "    in_child(launch)\n"
        "in_child(child)\n"
        "launch()\n"
        "print(fake.launches[-1].symbol)",
    )
    # Of the grandchild, the child, the parent: which may still launch.
    assert lines[0].startswith("ForkError this process was forked after fp8_aot.loader had used the GPU driver")
    assert lines[1:] == ["fine", "quant_128x1"]


def test_a_fork_while_another_thread_loads_does_not_hang(bundles):
    """The child must not wait for a lock that a thread of the parent held."""
    lines = forked(
        bundles,
        "import threading\n"
        "held, go = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with runtime._lock, runtime._reading:\n"
        "        held.set(); go.wait()\n"
        "thread = threading.Thread(target=hold); thread.start(); held.wait()\n"
        "def child():\n"
        "    loader.stats(); loader.unload(); launch()\n"
        "in_child(child)\n"
        "go.set(); thread.join()",
    )
    assert lines == ["fine"]


def test_settings_do_not_outlive_a_test(clean_loader):
    assert config.settings() == config.Settings("warn", ())
