"""What a launch needs to know of a tensor, whatever library it belongs to."""

from __future__ import annotations

import ctypes
import operator
from typing import Any

from msgspec import Struct, structs

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3fn": 1, "e4m3fnuz": 1}
"""Our dtype names and their sizes in bytes."""

_TORCH = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "e4m3fn",
    "torch.float8_e4m3fnuz": "e4m3fnuz",
}
_TYPESTR = {"<f2": "fp16", "<f4": "fp32"}
# DLPack: (type code, bits); codes kDLFloat 2, kDLBfloat 4, kDLFloat8_e4m3fn 10, kDLFloat8_e4m3fnuz 11.
_DLPACK = {(2, 16): "fp16", (2, 32): "fp32", (4, 16): "bf16", (10, 8): "e4m3fn", (11, 8): "e4m3fnuz"}
_DLPACK_BACKENDS = {2: "cuda", 10: "hip"}


class TensorView(Struct, frozen=True):
    """A two-dimensional tensor in device memory.

    Attributes:
        ptr: address of the first element.
        dtype: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"e4m3fn"`` or ``"e4m3fnuz"``.
        shape: two extents.
        strides: two strides in elements; None for a contiguous row-major tensor.
        device: the driver's ordinal of the device, None where the library does not say.
        backend: ``"cuda"``, ``"hip"`` or None where the library does not say.
        owner: what keeps the memory alive while the view lives, if anything.

    Raises:
        TypeError: an address, extent or stride is not an integer, or ``dtype`` is not one of these.
        ValueError: ``ptr`` is not a 64-bit address, or there is not one stride for each extent.
    """

    ptr: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    device: int | None = None
    backend: str | None = None
    owner: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise TypeError(f"dtype is {self.dtype!r}, expected one of {', '.join(ITEMSIZE)}")
        structs.force_setattr(self, "ptr", operator.index(self.ptr))
        structs.force_setattr(self, "shape", tuple(map(operator.index, self.shape)))
        if not 0 <= self.ptr < 2**64:
            raise ValueError(f"ptr is {self.ptr}, expected a 64-bit address")
        if self.strides is not None:
            structs.force_setattr(self, "strides", tuple(map(operator.index, self.strides)))
            if len(self.strides) != len(self.shape):
                raise ValueError(f"strides are {self.strides}, expected as many as shape {self.shape} has extents")
        else:
            strides = []
            step = 1
            for extent in reversed(self.shape):
                strides.append(step)
                step *= max(extent, 1)
            structs.force_setattr(self, "strides", tuple(reversed(strides)))


def as_view(name: str, value: Any) -> TensorView:
    """A view of a TensorView, a torch tensor, or anything with ``__cuda_array_interface__`` or DLPack.

    ``name`` is the argument's name in errors.

    Raises:
        TypeError: the object is none of these, or its dtype is not one of ours.
        ValueError: it is not in the memory of a CUDA or HIP device.
    """
    if isinstance(value, TensorView):
        return value
    if hasattr(value, "data_ptr") and hasattr(value, "stride"):
        return _from_torch(name, value)
    if hasattr(value, "__cuda_array_interface__"):
        return _from_cuda_array(name, value)
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(name, value)
    raise TypeError(
        f"{name} is a {type(value).__name__}, expected a TensorView, a torch tensor, or an object with "
        "__cuda_array_interface__ or __dlpack__"
    )


def _from_torch(name: str, value: Any) -> TensorView:
    dtype = _TORCH.get(str(value.dtype))
    if dtype is None:
        raise TypeError(f"{name} has dtype {value.dtype}, expected one of {', '.join(_TORCH)}")
    if value.device.type != "cuda":
        raise ValueError(f"{name} is on {value.device}, expected a GPU")
    return TensorView(
        value.data_ptr(), dtype, tuple(value.shape), tuple(value.stride()), value.device.index, owner=value
    )


def _from_cuda_array(name: str, value: Any) -> TensorView:
    interface = value.__cuda_array_interface__
    dtype = _TYPESTR.get(interface["typestr"])
    if dtype is None:
        raise TypeError(
            f"{name} has typestr {interface['typestr']!r}, expected {' or '.join(_TYPESTR)}; "
            "pass a TensorView for bf16 and fp8"
        )
    strides = interface.get("strides")
    if strides is not None:
        size = ITEMSIZE[dtype]
        if any(stride % size for stride in strides):
            raise ValueError(f"{name} has strides of {strides} bytes, expected multiples of {size}")
        strides = tuple(stride // size for stride in strides)
    return TensorView(interface["data"][0], dtype, tuple(interface["shape"]), strides, backend="cuda", owner=value)


class _DLTensor(ctypes.Structure):
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


def _from_dlpack(name: str, value: Any) -> TensorView:
    # Asked first: a library may refuse the stream below for memory that is no GPU's.
    if hasattr(value, "__dlpack_device__"):
        _dlpack_backend(name, value.__dlpack_device__()[0])
    # stream=-1: no synchronisation; the caller names the stream on which the data is ready.
    capsule = value.__dlpack__(stream=-1)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    dtype = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise TypeError(
            f"{name} has DLPack type code {tensor.code} of {tensor.bits} bits, expected one of {', '.join(ITEMSIZE)}"
        )
    backend = _dlpack_backend(name, tensor.device_type)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    # The capsule owns the memory until the view is gone.
    return TensorView(
        (tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, tensor.device_id, backend, capsule
    )


def _dlpack_backend(name: str, device_type: int) -> str:
    backend = _DLPACK_BACKENDS.get(device_type)
    if backend is None:
        raise ValueError(f"{name} is on DLPack device type {int(device_type)}, expected CUDA (2) or ROCm (10)")
    return backend
