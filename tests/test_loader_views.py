"""Tensors of any library, as a launch sees them."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8_aot.loader import TensorView
from fp8_aot.loader.views import as_view


def test_defaults():
    view = TensorView(0x1000, "bf16", (3, 5))
    assert (view.strides, view.device, view.backend, view.owner) == ((5, 1), None, None, None)
    assert TensorView(0, "fp32", (0, 5)).strides == (5, 1)
    assert TensorView(0, "fp32", (3, 0)).strides == (1, 1)
    assert as_view("x", view) is view
    # Integers of any kind, as numpy's, become plain ones.
    view = TensorView(np.int64(16), "fp16", (np.int32(2), np.int64(3)), [np.int64(3), 1])
    assert [type(value) for value in (view.ptr, *view.shape, *view.strides)] == [int] * 5


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((0, "float32", (1, 1)), TypeError, "dtype is 'float32', expected one of bf16, fp16, fp32, e4m3fn, e4m3fnuz"),
        ((None, "bf16", (1, 1)), TypeError, "cannot be interpreted as an integer"),
        ((0, "bf16", (1.0, 1)), TypeError, "cannot be interpreted as an integer"),
        ((0, "bf16", (1, 1), (1.5, 1)), TypeError, "cannot be interpreted as an integer"),
        ((-1, "bf16", (1, 1)), ValueError, "ptr is -1, expected a 64-bit address"),
        ((2**64, "bf16", (1, 1)), ValueError, "expected a 64-bit address"),
        ((0, "bf16", (1, 1), (1,)), ValueError, r"strides are \(1,\), expected as many as shape \(1, 1\) has"),
    ],
)
def test_wrong_views(arguments, error, says):
    with pytest.raises(error, match=says):
        TensorView(*arguments)


def interface(typestr="<f4", shape=(4, 6), strides=None, pointer=0x2000):
    described = {"typestr": typestr, "shape": shape, "data": (pointer, False), "version": 3}
    if strides is not False:
        described["strides"] = strides
    return SimpleNamespace(__cuda_array_interface__=described)


def test_cuda_array_interface():
    value = interface()
    assert as_view("x", value) == TensorView(0x2000, "fp32", (4, 6), (6, 1), None, "cuda", value)
    assert as_view("x", interface(strides=False)).strides == (6, 1)
    view = as_view("x", interface("<f2", strides=(2, 8)))
    assert (view.dtype, view.strides) == ("fp16", (1, 4))
    with pytest.raises(TypeError, match="x has typestr '<f8', expected <f2 or <f4; pass a TensorView for bf16 and fp8"):
        as_view("x", interface("<f8"))
    with pytest.raises(ValueError, match=r"x has strides of \(26, 4\) bytes, expected multiples of 4"):
        as_view("x", interface(strides=(26, 4)))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    pass


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Exporter:
    """An array on a device, as another library would export it: a capsule that frees it when it goes."""

    def __init__(self, device=(2, 1), type_=(2, 32, 1), shape=(3, 4), strides=(8, 1), offset=0):
        self.streams = []
        self.alive = 0
        self.device = device
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self.managed = DLManagedTensor(
            tensor=DLTensor(0x7F00_0000_3000, *device, len(shape), *type_, self.shape, self.strides, offset)
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.new = new
        self.destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.free)

    def free(self, capsule):
        self.alive -= 1

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        self.alive += 1
        return self.new(ctypes.addressof(self.managed), b"dltensor", ctypes.cast(self.destructor, ctypes.c_void_p))


@pytest.mark.parametrize(
    ("type_", "dtype"),
    [
        ((2, 16, 1), "fp16"),
        ((2, 32, 1), "fp32"),
        ((4, 16, 1), "bf16"),
        ((10, 8, 1), "e4m3fn"),
        ((11, 8, 1), "e4m3fnuz"),
    ],
)
@pytest.mark.parametrize(("device", "backend"), [((2, 1), "cuda"), ((10, 3), "hip")])
def test_dlpack(type_, dtype, device, backend):
    exporter = Exporter(device, type_, offset=64)
    view = as_view("x", exporter)
    assert (view.ptr, view.dtype, view.shape, view.strides) == (0x7F00_0000_3040, dtype, (3, 4), (8, 1))
    assert (view.device, view.backend) == (device[1], backend)
    # No synchronisation is asked for: the caller names the stream of the launch.
    assert exporter.streams == [-1]


def test_dlpack_memory_lives_as_long_as_the_view():
    exporter = Exporter(strides=None)
    view = as_view("x", exporter)
    assert view.strides == (4, 1)
    gc.collect()
    assert exporter.alive == 1
    del view
    gc.collect()
    assert exporter.alive == 0


def test_dlpack_that_does_not_fit():
    with pytest.raises(TypeError, match="x has DLPack type code 2 of 64 bits, expected one of bf16, "):
        as_view("x", Exporter(type_=(2, 64, 1)))
    with pytest.raises(TypeError, match="x has DLPack type code 2 of 32 bits"):
        as_view("x", Exporter(type_=(2, 32, 4)))
    with pytest.raises(ValueError, match=r"x is on DLPack device type 1, expected CUDA \(2\) or ROCm \(10\)"):
        as_view("x", Exporter(device=(1, 0)))
    # numpy refuses the stream that a GPU array is asked with.
    with pytest.raises(ValueError, match="x is on DLPack device type 1, expected CUDA"):
        as_view("x", np.zeros((2, 2), np.float32))


def torch_like(dtype=torch.bfloat16, device="cuda:2", shape=(4, 8), strides=(16, 1)):
    return SimpleNamespace(
        data_ptr=lambda: 0x4000,
        stride=lambda: strides,
        dtype=dtype,
        device=torch.device(device),
        shape=torch.Size(shape),
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.float32, "fp32"),
        (torch.float8_e4m3fn, "e4m3fn"),
        (torch.float8_e4m3fnuz, "e4m3fnuz"),
    ],
)
def test_torch_tensors(dtype, name):
    value = torch_like(dtype)
    assert as_view("x", value) == TensorView(0x4000, name, (4, 8), (16, 1), 2, None, value)


def test_torch_tensors_that_do_not_fit():
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64, expected one of torch\.bfloat16, "):
        as_view("x", torch_like(torch.float64))
    with pytest.raises(ValueError, match="x is on cpu, expected a GPU"):
        as_view("x", torch.zeros(2, 2))
    with pytest.raises(ValueError, match="x is on meta, expected a GPU"):
        as_view("x", torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("value", [None, 3, [1, 2], "x", b"x"])
def test_what_is_no_tensor(value):
    with pytest.raises(TypeError, match=rf"x is a {type(value).__name__}, expected a TensorView, a torch tensor, or "):
        as_view("x", value)
