"""The drivers, over stand-in libraries: devices, contexts, capture, errors, and finding the library."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_driver import FakeCuda, FakeDevice, FakeHip

from fp8_aot.loader import driver as drivers
from fp8_aot.loader.driver import Device, DriverError, hip

IMAGE = b"\x7fELF\0\0 an image with zeros in it \0\1"
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


def test_version():
    assert FakeCuda(version=12080).driver().version() == 12080
    assert FakeHip(version=60241134).driver().version() == 60241134


def test_devices():
    fake = FakeCuda(
        [FakeDevice("103", "NVIDIA B300", 232_448, 32, 148), FakeDevice("89", "NVIDIA L4", 101_376, 32, 58)]
    )
    assert fake.driver().devices() == (
        Device(0, "NVIDIA B300", "103", (), 32, 232_448, 148),
        Device(1, "NVIDIA L4", "89", (), 32, 101_376, 58),
    )
    fake = FakeHip(
        [FakeDevice("gfx942:sramecc+:xnack-", "AMD Instinct MI300X", 65_536, 64, 304), FakeDevice("gfx1100")]
    )
    mi300, plain = fake.driver().devices()
    assert mi300 == Device(0, "AMD Instinct MI300X", "gfx942", ("sramecc+", "xnack-"), 64, 65_536, 304)
    assert (plain.arch, plain.features) == ("gfx1100", ())


def test_no_device_is_no_error():
    for fake in (FakeCuda([]), FakeHip([])):
        assert fake.driver().devices() == ()
        with pytest.raises(DriverError, match=r"kernel cannot be loaded on device 0: the driver shows 0 device"):
            fake.driver().load(0, IMAGE, "kernel", 0)
    assert FakeHip([]).driver().current_device() is None
    with pytest.raises(DriverError, match="NO_DEVICE") as caught:
        FakeCuda([]).driver().current_device()
    assert caught.value.code == 100


OTHER_CALLS = [
    (FakeCuda, "cuInit", lambda d: d.devices()),
    (FakeCuda, "cuDriverGetVersion", lambda d: d.version()),
    (FakeCuda, "cuDeviceGetCount", lambda d: d.devices()),
    (FakeCuda, "cuDeviceGet", lambda d: d.devices()),
    (FakeCuda, "cuDeviceGetName", lambda d: d.devices()),
    (FakeCuda, "cuDeviceGetAttribute", lambda d: d.devices()),
    (FakeCuda, "cuDevicePrimaryCtxRetain", lambda d: d.on_device(0).__enter__()),
    (FakeCuda, "cuCtxPushCurrent_v2", lambda d: d.on_device(0).__enter__()),
    (FakeCuda, "cuCtxGetDevice", lambda d: d.current_device()),
    (FakeCuda, "cuStreamIsCapturing", lambda d: d.is_capturing(0)),
    (FakeHip, "hipRuntimeGetVersion", lambda d: d.version()),
    (FakeHip, "hipGetDeviceCount", lambda d: d.devices()),
    (FakeHip, "hipGetDevicePropertiesR0600", lambda d: d.devices()),
    (FakeHip, "hipGetDevice", lambda d: d.current_device()),
    (FakeHip, "hipSetDevice", lambda d: d.on_device(0).__enter__()),
    (FakeHip, "hipStreamIsCapturing", lambda d: d.is_capturing(0)),
]


@pytest.mark.parametrize(("kind", "name", "action"), OTHER_CALLS, ids=[name for _, name, _ in OTHER_CALLS])
def test_every_other_failing_call_names_itself_and_its_code(kind, name, action):
    fake = kind()
    fake.failing[name] = 400
    with pytest.raises(DriverError, match=rf"^{name}.* failed: \w+ \(400\): text of 400$") as caught:
        action(fake.driver())
    assert caught.value.code == 400


def test_an_error_code_without_a_name():
    fake = FakeCuda()
    fake.failing["cuInit"] = 7777
    with pytest.raises(DriverError, match=r"^cuInit failed: error 7777$"):
        fake.driver().devices()


def test_hip_forgets_the_error_that_it_reports():
    fake = FakeHip()
    fake.capturing = {7}
    driver = fake.driver()
    assert driver.is_capturing(0)
    assert fake.thread.last_error == 0
    fake.failing["hipModuleLoadData"] = 209
    with pytest.raises(DriverError):
        driver.load(0, IMAGE, "kernel", 0)
    assert fake.thread.last_error == 0


def test_on_device_restores_what_was_before():
    fake = two(FakeCuda)
    driver = fake.driver()
    assert driver.current_device() is None
    with driver.on_device(1):
        assert driver.current_device() == 1
        with driver.on_device(0):
            assert driver.current_device() == 0
        assert driver.current_device() == 1
    assert driver.current_device() is None
    assert fake.context_depth() == 0
    fake = two(FakeHip)
    driver = fake.driver()
    fake.thread.device = 1
    with driver.on_device(0):
        assert driver.current_device() == 0
    assert driver.current_device() == 1


def test_on_device_restores_after_an_error(fake):
    driver = fake.driver()
    before = driver.current_device()
    with pytest.raises(KeyError), driver.on_device(1):
        raise KeyError
    assert driver.current_device() == before
    fake.failing.update(cuLibraryLoadData=209, cuModuleLoadData=209, hipModuleLoadData=209)
    with pytest.raises(DriverError):
        driver.load(1, IMAGE, "kernel", 0)
    assert driver.current_device() == before
    with (
        pytest.raises(DriverError, match=r"device 2.*INVALID_DEVICE|device 2.*InvalidDevice"),
        driver.on_device(2),
    ):
        pass
    assert driver.current_device() == before


def test_on_device_reports_that_it_could_not_go_back():
    fake = FakeCuda()
    with pytest.raises(DriverError, match="cuCtxPopCurrent"), fake.driver().on_device(0):
        fake.failing["cuCtxPopCurrent_v2"] = 201
    fake = two(FakeHip)
    with pytest.raises(DriverError, match="hipSetDevice to device 0"), fake.driver().on_device(1):
        fake.failing["hipSetDevice"] = 400
    # An error of the block is not hidden by one of the way back.
    fake = FakeCuda()
    with pytest.raises(KeyError), fake.driver().on_device(0):
        fake.failing["cuCtxPopCurrent_v2"] = 201
        raise KeyError


def test_is_capturing(fake):
    driver = fake.driver()
    with driver.on_device(0):
        assert not driver.is_capturing(0)
        assert not driver.is_capturing(None)
        fake.capturing = {0x7FFF_0000_1230}
        assert driver.is_capturing(0x7FFF_0000_1230)
        assert not driver.is_capturing(0x1230)
        assert driver.is_capturing(0)  # another stream's capture makes the null stream unusable
        assert driver.is_capturing(None)


def test_is_capturing_without_a_context():
    with pytest.raises(DriverError) as caught:
        FakeCuda().driver().is_capturing(0)
    assert caught.value.code == 201


@pytest.mark.parametrize(
    ("kind", "name", "needed"),
    [(FakeCuda, "cuStreamIsCapturing", "CUDA 10.0"), (FakeHip, "hipGetDevicePropertiesR0600", "ROCm 6.0")],
)
def test_a_driver_that_is_too_old(kind, name, needed):
    with pytest.raises(DriverError, match=f"has no {name}: it is too old, {needed} or newer is needed"):
        kind(missing=[name]).driver()


def test_missing_libraries(monkeypatch):
    def missing(path):
        raise OSError(f"{path}: cannot open shared object file: No such file or directory")

    drivers.reset()
    monkeypatch.setattr("ctypes.CDLL", missing)
    nvidia, amd = drivers.available_drivers()
    assert isinstance(nvidia, DriverError)
    assert str(nvidia) == "libcuda.so.1 not found: the NVIDIA driver is not installed on this machine"
    assert isinstance(amd, DriverError)
    assert str(amd).startswith("libamdhip64.so not found: ROCm is not installed")
    with pytest.raises(DriverError, match="libcuda"):
        drivers.get_driver("cuda")


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_library_that_cannot_be_opened(monkeypatch, backend):
    def broken(path):
        raise OSError(f"{path}: wrong ELF class: ELFCLASS32")

    drivers.reset()
    monkeypatch.setattr("ctypes.CDLL", broken)
    with pytest.raises(DriverError, match=r"cannot be opened: .*wrong ELF class"):
        drivers.get_driver(backend)


def test_hip_candidates(monkeypatch):
    monkeypatch.setenv("ROCM_PATH", "/somewhere/rocm")
    found = hip.candidates()
    assert found[:3] == ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"]
    assert found.index("/somewhere/rocm/lib/libamdhip64.so.6") < found.index("/opt/rocm/lib/libamdhip64.so")


def test_get_driver():
    fake = FakeCuda()
    ours = fake.driver()
    drivers.install(ours)
    try:
        assert drivers.get_driver("cuda") is ours
        assert drivers.available_drivers()[0] is ours
    finally:
        drivers.reset()
    with pytest.raises(ValueError, match="backend is 'metal', expected 'cuda' or 'hip'"):
        drivers.get_driver("metal")


PROBE = """
import json, sys
seen = []
WATCHED = {"ctypes.dlopen", "subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "os.system"}
def hook(event, arguments):
    if event in WATCHED and arguments[0] is not None:
        seen.append([event, str(arguments[0])])
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        seen.append([event, str(arguments[0])])
import ctypes
sys.addaudithook(hook)
from fp8_aot.loader import driver
imported = list(seen)
driver.available_drivers()
print(json.dumps([imported, seen, "torch" in sys.modules]))
"""


def test_import_opens_nothing_and_nothing_starts_a_process_or_writes():
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, "-c", PROBE], env=environment, check=True, capture_output=True, text=True)
    imported, seen, torch = json.loads(run.stdout)
    assert imported == []
    assert {event for event, _ in seen} == {"ctypes.dlopen"}
    assert {os.path.basename(library)[:11] for _, library in seen} == {"libcuda.so.", "libamdhip64"}
    assert not torch
