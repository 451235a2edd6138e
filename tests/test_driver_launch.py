"""Launches over stand-in libraries, and the C layouts that they rely on."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_driver import FakeCuda, FakeDevice, FakeHip, Launch

from fp8_aot.loader.driver import DriverError, cuda, hip

PARAMETERS = struct.Struct("<QQi4xqd?7x")
VALUES = (0x7F12_3456_7890, 2**64 - 1, -5, -(2**63), 1.5, True)
STREAM = 0x5555_1234_5670
OLD = 11040


@pytest.fixture(params=["config", "arguments", "hip"])
def fake(request):
    """A stand-in of each kind that launches in its own way."""
    made = {"config": FakeCuda, "arguments": lambda: FakeCuda(version=OLD), "hip": FakeHip}
    yield (stand_in := made[request.param]())
    assert stand_in.errors == []


def prepared(fake, threads=256, shared=50_000, num_ctas=1, size=PARAMETERS.size):
    driver = fake.driver()
    function = driver.load(0, b"image", "kernel", shared)
    return driver, driver.launcher(function, threads, shared, size, num_ctas)


def test_a_launch_arrives_as_it_was_given(fake):
    driver, launch = prepared(fake)
    buffer = launch.buffer()
    PARAMETERS.pack_into(buffer.data, 0, *VALUES)
    with driver.on_device(0):
        launch(2**31 - 1, 65_535, 3, STREAM, buffer)
    (seen,) = fake.launches
    params = (
        b"\x90\x78\x56\x34\x12\x7f\0\0" + b"\xff" * 8 + b"\xfb\xff\xff\xff\0\0\0\0"
        b"\0\0\0\0\0\0\0\x80" + b"\0\0\0\0\0\0\xf8\x3f" + b"\1" + bytes(7)
    )
    grid = (2**31 - 1, 65_535, 3)
    assert seen == Launch("kernel", 0, grid, (256, 1, 1), 50_000, STREAM, params, seen.address)
    assert seen.address % 64 == 0


def test_a_buffer_serves_one_launch_after_another(fake):
    driver, launch = prepared(fake, size=8)
    buffer = launch.buffer()
    with driver.on_device(0):
        for value in range(3):
            struct.pack_into("<q", buffer.data, 0, value)
            launch(value + 1, 1, 1, value, buffer)
    assert [(seen.grid[0], seen.stream, seen.params[0]) for seen in fake.launches] == [
        (1, 0, 0),
        (2, 1, 1),
        (3, 2, 2),
    ]


@pytest.mark.parametrize("size", [1, 7, 64, 200, 4096])
def test_buffers_are_aligned_and_of_their_size(fake, size):
    driver, launch = prepared(fake, size=size)
    with driver.on_device(0):
        for buffer in [launch.buffer() for _ in range(8)]:
            buffer.data[size - 1] = b"\x5a"
            launch(1, 1, 1, 0, buffer)
    for seen in fake.launches:
        assert seen.address % 64 == 0
        assert seen.params == bytes(size - 1) + b"\x5a"


def test_clusters():
    fake = FakeCuda()
    driver, launch = prepared(fake, num_ctas=4)
    with driver.on_device(0):
        launch(5, 6, 7, STREAM, launch.buffer())
    (seen,) = fake.launches
    assert (seen.grid, seen.cluster) == ((20, 6, 7), (4, 1, 1))
    assert fake.errors == []
    with pytest.raises(DriverError, match=r"kernel needs clusters of 4 blocks: .* CUDA 11.8 or newer"):
        prepared(FakeCuda(version=OLD), num_ctas=4)
    with pytest.raises(DriverError, match="kernel needs clusters of 4 blocks: AMD devices have none"):
        prepared(FakeHip(), num_ctas=4)


LAUNCH_CALLS = {"config": "cuLaunchKernelEx", "arguments": "cuLaunchKernel", "hip": "hipModuleLaunchKernel"}


def test_a_refused_launch_says_everything(fake, request):
    driver, launch = prepared(fake)
    fake.failing[LAUNCH_CALLS[request.node.callspec.params["fake"]]] = 1
    with (
        driver.on_device(0),
        pytest.raises(
            DriverError,
            match=r"^launch of kernel on device 0 with grid \(3, 4, 5\), block \(256, 1, 1\) and 50000 bytes "
            r"of dynamic shared memory failed: \w+ \(1\): text of 1$",
        ) as caught,
    ):
        launch(3, 4, 5, STREAM, launch.buffer())
    assert caught.value.code == 1
    assert fake.launches == []


def test_a_refused_cluster_launch_names_the_clusters():
    fake = FakeCuda()
    driver, launch = prepared(fake, num_ctas=2)
    fake.failing["cuLaunchKernelEx"] = 1
    with driver.on_device(0), pytest.raises(DriverError, match=r"grid \(6, 1, 1\).*clusters of 2"):
        launch(3, 1, 1, 0, launch.buffer())


@pytest.mark.parametrize("version", [13000, OLD])
def test_a_thread_without_a_context(version):
    driver, launch = prepared(FakeCuda(version=version))
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT") as caught:
        launch(1, 1, 1, 0, launch.buffer())
    assert caught.value.code == 201
    with driver.on_device(0):
        launch(1, 1, 1, 0, launch.buffer())


@pytest.mark.parametrize(("kind", "device"), [(FakeCuda, FakeDevice()), (FakeHip, FakeDevice("gfx942", shared=65_536))])
def test_a_function_launches_on_its_own_device_only(kind, device):
    fake = kind([device, device])
    driver, launch = prepared(fake)
    with driver.on_device(1), pytest.raises(DriverError) as caught:
        launch(1, 1, 1, 0, launch.buffer())
    assert caught.value.code == 400


@pytest.mark.parametrize("grid", [(2**32 + 1, 1, 1), (1, 2**32, 1), (1, 1, 2**64), (-1, 1, 1), (1, -1, 1)])
def test_a_grid_out_of_range_is_refused_not_wrapped(fake, grid):
    driver, launch = prepared(fake)
    with (
        driver.on_device(0),
        pytest.raises(ValueError, match=r"grid of kernel is .*, expected integers from 1"),
    ):
        launch(*grid, 0, launch.buffer())
    assert fake.launches == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 0), ("threads", 2**31), ("shared", -1), ("params_size", 0), ("num_ctas", 0)],
)
def test_launcher_arguments_out_of_range(fake, name, value):
    driver = fake.driver()
    function = driver.load(0, b"image", "kernel", 0)
    arguments = {"threads": 128, "shared": 0, "params_size": 8} | {name: value}
    error = DriverError if name == "num_ctas" and "cuLaunchKernelEx" not in vars(fake.library) else ValueError
    with pytest.raises(error, match=f"{name} is {value}, expected" if error is ValueError else "clusters"):
        driver.launcher(function, **arguments)


def test_threads_launch_with_a_buffer_each(fake):
    driver, launch = prepared(fake, size=8)

    def work(number):
        buffer = launch.buffer()
        with driver.on_device(0):
            for _ in range(50):
                struct.pack_into("<q", buffer.data, 0, number)
                launch(number, 1, 1, number, buffer)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 100
    for seen in fake.launches:
        assert seen.grid[0] == seen.stream == seen.params[0]


def headers(backend):
    """The vendor's headers as Triton's wheel has them, and a C compiler."""
    triton = importlib.util.find_spec("triton")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if triton is None or triton.origin is None or compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Triton's headers and a C compiler")
    return Path(triton.origin).parent / "backends" / backend / "include", compiler


def c_values(tmp_path, backend, header, flags, expressions):
    """What C says that integer expressions are."""
    include, compiler = headers(backend)
    prints = "".join(f'printf("%lld\\n", (long long)({expression}));' for expression in expressions)
    source = tmp_path / "values.c"
    source.write_text(f"#include <stdio.h>\n#include <stddef.h>\n#include <{header}>\nint main(void) {{ {prints} }}\n")
    subprocess.run([compiler, "-w", *flags, f"-I{include}", source, "-o", tmp_path / "values"], check=True)
    output = subprocess.run([tmp_path / "values"], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in output.split()]


def test_cuda_layouts_are_those_of_the_header(tmp_path):
    config = (
        "gridDimX",
        "gridDimY",
        "gridDimZ",
        "blockDimX",
        "blockDimY",
        "blockDimZ",
        "sharedMemBytes",
        "hStream",
    )
    config = (*config, "attrs", "numAttrs")
    offsets = c_values(tmp_path, "nvidia", "cuda.h", [], [f"offsetof(CUlaunchConfig, {name})" for name in config])
    packed = cuda._CONFIG.pack(1, 2, 3, 4, 5, 6, 7, 8) + cuda._CONFIG_ATTRIBUTES.pack(9, 10)
    assert [packed[offset] for offset in offsets] == list(range(1, 11))
    attribute = cuda._ATTRIBUTE.pack(cuda._CLUSTER_DIMENSION, 7, 8, 9)
    size, attribute_size, identity, x, y, z, *constants = c_values(
        tmp_path,
        "nvidia",
        "cuda.h",
        [],
        [
            "sizeof(CUlaunchConfig)",
            "sizeof(CUlaunchAttribute)",
            "offsetof(CUlaunchAttribute, id)",
            *[f"offsetof(CUlaunchAttribute, value.clusterDim.{axis})" for axis in "xyz"],
            "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
            "CU_DEVICE_ATTRIBUTE_WARP_SIZE",
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
            "CUDA_ERROR_NO_DEVICE",
            "CUDA_ERROR_INVALID_CONTEXT",
            "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            "CU_LAUNCH_PARAM_END_AS_INT",
        ],
    )
    assert (size, attribute_size) == (len(packed), len(attribute))
    assert [attribute[offset] for offset in (identity, x, y, z)] == [cuda._CLUSTER_DIMENSION, 7, 8, 9]
    assert constants == [
        cuda._CLUSTER_DIMENSION,
        cuda._MAX_DYNAMIC_SHARED_SIZE_BYTES,
        cuda._WARP_SIZE,
        cuda._MULTIPROCESSOR_COUNT,
        cuda._COMPUTE_CAPABILITY_MAJOR,
        cuda._COMPUTE_CAPABILITY_MINOR,
        cuda._MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        cuda._NO_DEVICE,
        cuda._INVALID_CONTEXT,
        cuda._STREAM_CAPTURE_IMPLICIT,
        cuda._EXTRA_END,
    ]


def test_hip_layouts_are_those_of_the_header(tmp_path):
    names = list(hip.PROPERTIES_OFFSETS)
    size, end, no_device, implicit, *offsets = c_values(
        tmp_path,
        "amd",
        "hip/hip_runtime_api.h",
        ["-D__HIP_PLATFORM_AMD__"],
        [
            "sizeof(hipDeviceProp_tR0600)",
            "HIP_LAUNCH_PARAM_END",
            "hipErrorNoDevice",
            "hipErrorStreamCaptureImplicit",
            *[f"offsetof(hipDeviceProp_tR0600, {name})" for name in names],
        ],
    )
    assert dict(zip(names, offsets, strict=True)) == hip.PROPERTIES_OFFSETS
    assert (size, end, no_device, implicit) == (
        hip.PROPERTIES_SIZE,
        hip._EXTRA_END,
        hip._NO_DEVICE,
        hip._STREAM_CAPTURE_IMPLICIT,
    )


def test_one_buffer_follows_the_stream(fake):
    """What a buffer remembers of its last launch saves packing, and nothing else."""
    driver, launch = prepared(fake)
    fire, buffer = launch.at(3, 2, 1), launch.buffer()
    with driver.on_device(0):
        for stream in (STREAM, STREAM, STREAM + 64, 0, STREAM):
            fire(stream, buffer)
        launch.at(7, 1, 5)(STREAM, launch.buffer())
    assert [(seen.stream, seen.grid) for seen in fake.launches] == [
        (STREAM, (3, 2, 1)),
        (STREAM, (3, 2, 1)),
        (STREAM + 64, (3, 2, 1)),
        (0, (3, 2, 1)),
        (STREAM, (3, 2, 1)),
        (STREAM, (7, 1, 5)),
    ]
