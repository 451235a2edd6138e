"""Loading and unloading kernels, over stand-in libraries."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest
from fake_driver import FakeCuda, FakeDevice, FakeHip, Load

from fp8_aot.loader.driver import DriverError

IMAGE = b"\x7fELF\0\0 an image with zeros in it \0\1"
DIGEST = hashlib.sha256(IMAGE).hexdigest()
OLD = 11040  # a driver without libraries and without cuLaunchKernelEx


def two(kind, **options):
    device = FakeDevice("90") if kind is FakeCuda else FakeDevice("gfx942:sramecc+:xnack-", shared=65_536, warp_size=64)
    return kind([device, device], **options)


@pytest.fixture(params=["cuda", "cuda-old", "hip"])
def fake(request):
    """A stand-in with two devices, of each kind that loads in its own way."""
    made = {
        "cuda": lambda: two(FakeCuda),
        "cuda-old": lambda: two(FakeCuda, version=OLD),
        "hip": lambda: two(FakeHip),
    }
    yield (stand_in := made[request.param]())
    assert stand_in.errors == []


def test_cuda_loads_a_library_once_for_all_devices():
    fake = two(FakeCuda)
    driver = fake.driver()
    first, again, second = (driver.load(ordinal, IMAGE, "kernel", 0) for ordinal in (0, 0, 1))
    assert fake.loads == [Load(DIGEST, None)]
    assert first == again
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert first.handle != second.handle
    assert first.library == second.library
    assert "cuModuleLoadData" not in fake.calls
    assert fake.calls.count("cuFuncLoad") == 3
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 2  # once per device, for good


@pytest.mark.parametrize("make", [lambda: two(FakeCuda, version=OLD), lambda: two(FakeHip)], ids=["cuda-old", "hip"])
def test_a_module_is_loaded_once_per_device(make):
    fake = make()
    driver = fake.driver()
    first, again, second = (driver.load(ordinal, IMAGE, "kernel", 0) for ordinal in (0, 0, 1))
    assert fake.loads == [Load(DIGEST, 0), Load(DIGEST, 1)]
    assert first == again
    assert first.library != second.library


def test_unload_comes_with_the_last_user(fake):
    driver = fake.driver()
    first, again = (driver.load(0, IMAGE, "kernel", 0) for _ in range(2))
    other = driver.load(0, b"another image", "kernel", 0)
    driver.unload(first)
    assert fake.unloads == []
    driver.unload(again)
    assert [unload.digest for unload in fake.unloads] == [DIGEST]
    with pytest.raises(ValueError, match="function kernel is not loaded"):
        driver.unload(again)
    driver.unload(other)
    assert len(fake.unloads) == 2
    driver.load(0, IMAGE, "kernel", 0)
    assert len(fake.loads) == 3


def test_library_outlives_the_device_that_leaves_first():
    fake = two(FakeCuda)
    driver = fake.driver()
    functions = [driver.load(ordinal, IMAGE, "kernel", 0) for ordinal in (0, 1)]
    driver.unload(functions[0])
    assert fake.unloads == []
    driver.unload(functions[1])
    assert fake.unloads == [Load(DIGEST, None)]


@pytest.mark.parametrize("version", [13000, OLD])
def test_shared_memory_opt_in_only_above_48_kib(version):
    fake = FakeCuda(version=version)
    driver = fake.driver()
    for shared in (0, 49_152, 49_153, 232_448, 100_000):
        driver.load(0, IMAGE, "kernel", shared)
    # The last load must not take the larger opt-in back.
    assert fake.opt_ins == [("kernel", 49_153), ("kernel", 232_448)]


def test_too_much_shared_memory_is_refused_before_the_driver_sees_it(fake):
    most = fake.driver().devices()[0].max_shared
    with pytest.raises(DriverError, match=rf"kernel needs {most + 1} bytes .* at most {most} per block"):
        fake.driver().load(0, IMAGE, "kernel", most + 1)
    assert fake.loads == []


def test_a_failed_load_leaves_nothing_behind(fake):
    driver = fake.driver()
    fake.unknown_symbols = {"absent"}
    with pytest.raises(DriverError, match=r"absent.*NotFound|absent.*NOT_FOUND") as caught:
        driver.load(0, IMAGE, "absent", 0)
    assert caught.value.code == 500
    assert len(fake.unloads) == 1
    function = driver.load(0, IMAGE, "kernel", 0)
    with pytest.raises(DriverError):
        driver.load(0, IMAGE, "absent", 0)
    assert len(fake.unloads) == 1  # kernel still stands on the second load
    driver.unload(function)
    assert len(fake.unloads) == 2


LOAD_CALLS = [
    *[(FakeCuda, 13000, name) for name in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction")],
    *[(FakeCuda, 13000, name) for name in ("cuFuncLoad", "cuFuncSetAttribute")],
    *[(FakeCuda, OLD, name) for name in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute")],
    *[(FakeHip, 60241134, name) for name in ("hipModuleLoadData", "hipModuleGetFunction")],
]


@pytest.mark.parametrize(("kind", "version", "name"), LOAD_CALLS)
def test_a_failing_call_of_a_load_names_symbol_and_code(kind, version, name):
    fake = kind(version=version)
    fake.failing[name] = 209
    with pytest.raises(
        DriverError, match=rf"^{name} of .*kernel_7.* failed: .*(?i:no_?binary).* \(209\): text of 209$"
    ) as e:
        fake.driver().load(0, IMAGE, "kernel_7", 60_000)
    assert e.value.code == 209
    assert fake.errors == []


@pytest.mark.parametrize(
    ("kind", "version", "name"),
    [
        (FakeCuda, 13000, "cuLibraryUnload"),
        (FakeCuda, OLD, "cuModuleUnload"),
        (FakeHip, 60241134, "hipModuleUnload"),
    ],
)
def test_a_failing_unload_names_the_symbol(kind, version, name):
    fake = kind(version=version)
    driver = fake.driver()
    function = driver.load(0, IMAGE, "kernel", 0)
    fake.failing[name] = 400
    with pytest.raises(DriverError, match=r"unload of kernel failed: \w+ \(400\)"):
        driver.unload(function)


def test_threads_share_one_load(fake, monkeypatch):
    driver = fake.driver()
    opening = driver._open

    def slow(image, symbol):
        time.sleep(0.02)  # long enough for every thread to come here, were there no lock
        return opening(image, symbol)

    monkeypatch.setattr(driver, "_open", slow)
    start = threading.Barrier(4)
    functions, ends = [], []

    def work():
        start.wait()
        functions.append(driver.load(1, IMAGE, "kernel", 0))
        ends.append(driver.current_device())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(functions)) == 1
    assert len(fake.loads) == 1
    assert len(set(ends)) == 1
    for function in functions:
        driver.unload(function)
    assert len(fake.unloads) == 1
