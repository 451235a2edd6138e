"""Launching a prebuilt kernel from raw tensors: no torch, no JIT, any library's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8_aot.loader.contract import MAX_SIZE
from fp8_aot.loader.driver import default_driver, get_driver
from fp8_aot.loader.errors import MissError
from fp8_aot.loader.runtime import DeviceState, runtime
from fp8_aot.loader.schema import Kernel, Pointer, Tensor
from fp8_aot.loader.views import TensorView, as_view


def launch(
    kernel: str,
    tensors: Mapping[str, Any],
    *,
    stream: int = 0,
    device: int | None = None,
    backend: str | None = None,
    scratch: Any = None,
) -> None:
    """Launch a prebuilt kernel on tensors that the caller has allocated, outputs included.

    Args:
        kernel: the kernel's name, as ``fp8-aot inspect`` shows it.
        tensors: by name, all that the kernel reads and writes: TensorViews, torch tensors, or objects with
            ``__cuda_array_interface__`` or DLPack.  They stay alive until the kernel has run: that is the
            caller's duty.
        stream: the driver's stream handle, an integer; 0 is the default stream.
        device: ordinal of the device where no tensor says it; the current device by default.
        backend: ``"cuda"`` or ``"hip"``; by default that of the driver that this machine has.
        scratch: device memory for a kernel that needs global scratch, at least as large as it says.

    Raises:
        TypeError, ValueError: a tensor is missing or unknown, or its dtype, shape or layout is not the
            kernel's; sizes that need too large a grid.
        MissError: no prebuilt kernel fits.
        CaptureError: the kernel is not loaded yet, and the stream is being captured into a graph.
        ForkError: this process was forked from one in which the loader had used the driver.
        IntegrityError, DriverError: the kernel's object is damaged; the driver is missing, or refused.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is a {type(tensors).__name__}, expected a mapping from names to tensors")
    if not isinstance(stream, int):
        raise TypeError(f"stream is {stream!r}, expected the driver's handle, an integer")
    if not 0 <= stream < 2**64:
        raise ValueError(f"stream is {stream}, expected the driver's handle, 0 to 2**64 - 1")
    views = {name: as_view(name, value) for name, value in tensors.items()}
    state = _state(views, device, backend)
    if state.bundle is None:
        runtime.misses.add()
        raise MissError(_no_bundle(kernel, state))
    entry = state.bundle.kernels.get(kernel)
    if entry is None:
        runtime.misses.add()
        raise MissError(f"{state.bundle.path} has no kernel {kernel}, it has {', '.join(state.bundle.kernels)}")
    fp8 = state.bundle.manifest.target.fp8
    sizes = check_tensors(entry, views)
    dtypes = _dtypes(entry, views, fp8)
    if any(0 in views[t.name].shape for t in entry.tensors if t.output):
        return
    plan, choice = runtime.plan(state, kernel, dtypes, sizes, views, stream)
    if plan is None:
        runtime.misses.add()
        raise MissError(f"no prebuilt kernel for {choice.cell}: {choice.reason}")
    memory = as_scratch(plan.scratch_bytes, plan.variant.global_scratch.align, scratch)
    pointers = tuple(views[arg.tensor].ptr for arg in entry.args if isinstance(arg, Pointer))
    if state.driver.current_device() == state.device.ordinal:
        plan.launch(pointers, stream, memory)
    else:
        with state.driver.on_device(state.device.ordinal):
            plan.launch(pointers, stream, memory)


def as_scratch(need: int, align: int, scratch: Any) -> int:
    """The address of scratch memory; 0 where none is needed.

    Raises:
        TypeError: it is needed and of a type whose address is not known.
        ValueError: it is needed and missing, too small, or not aligned.
    """
    if not need:
        return 0
    have = 0 if scratch is None else int(getattr(scratch, "nbytes", 0))
    if have < need:
        raise ValueError(f"scratch has {have} bytes, this launch needs {need}")
    if hasattr(scratch, "data_ptr"):
        address = int(scratch.data_ptr())
    elif hasattr(scratch, "__cuda_array_interface__"):
        address = int(scratch.__cuda_array_interface__["data"][0])
    else:
        raise TypeError(
            f"scratch is a {type(scratch).__name__}, expected a torch tensor, or an object with nbytes and "
            "__cuda_array_interface__"
        )
    if address % max(align, 1):
        raise ValueError(f"scratch is at {address:#x}, this launch needs a multiple of {align}")
    return address


def _no_bundle(kernel: str, state: DeviceState) -> str:
    """One line for a miss because no bundle was accepted."""
    choice = state.no_bundle(kernel)
    looked = "; ".join(str(decision) for decision in state.decisions)
    return f"no prebuilt kernel {kernel}: {choice.reason} (looked at: {looked})"


def _state(views: Mapping[str, TensorView], device: int | None, backend: str | None) -> DeviceState:
    backends = {view.backend for view in views.values() if view.backend} | ({backend} if backend else set())
    if len(backends) > 1:
        raise ValueError(f"tensors are of different backends: {', '.join(sorted(backends))}")
    runtime.check_fork()
    driver = get_driver(backends.pop()) if backends else default_driver()
    ordinals = {view.device for view in views.values() if view.device is not None}
    ordinals |= {device} if device is not None else set()
    if len(ordinals) > 1:
        where = ", ".join(f"{name} on {view.device}" for name, view in views.items() if view.device is not None)
        raise ValueError(f"tensors are on different devices: {where}; device={device}")
    ordinal = ordinals.pop() if ordinals else driver.current_device() or 0
    return runtime.state(driver.backend, ordinal)


def check_tensors(kernel: Kernel, views: Mapping[str, TensorView]) -> dict[str, int]:
    """The sizes of a launch, every tensor's shape and layout checked against the kernel's description.

    Raises:
        ValueError: a tensor is missing or unknown, or its shape or layout does not fit.
    """
    names = [t.name for t in kernel.tensors]
    if set(views) != set(names):
        raise ValueError(f"{kernel.name}: tensors are {', '.join(views)}, expected {', '.join(names)}")
    sizes: dict[str, int] = {}
    for tensor in kernel.tensors:
        view = views[tensor.name]
        if len(view.shape) != 2:
            raise ValueError(f"{kernel.name}: {tensor.name} has shape {view.shape}, expected two dimensions")
        for dim, extent in zip(tensor.shape, view.shape, strict=True):
            if dim.group == 1:
                sizes.setdefault(dim.symbol, extent)
    for tensor in kernel.tensors:
        view = views[tensor.name]
        expected = tuple(-(-sizes[d.symbol] // d.group) for d in tensor.shape)
        if view.shape != expected:
            raise ValueError(f"{kernel.name}: {tensor.name} has shape {view.shape}, expected {expected}")
        _check_strides(kernel, tensor, view)
    for symbol, size in sizes.items():
        if not 0 <= size <= MAX_SIZE:
            raise ValueError(f"{kernel.name}: size {symbol} is {size}, expected at most {MAX_SIZE}")
    return sizes


def _check_strides(kernel: Kernel, tensor: Tensor, view: TensorView) -> None:
    assert view.strides is not None
    if 0 in view.shape:
        return
    unit, free = tensor.unit_dim, 1 - tensor.unit_dim
    least = view.shape[unit] if tensor.output else 0
    wrong_unit = view.shape[unit] > 1 and view.strides[unit] != 1
    if wrong_unit or (view.shape[free] > 1 and view.strides[free] < least):
        raise ValueError(
            f"{kernel.name}: {tensor.name} has strides {view.strides}, expected 1 in dimension {unit} and at "
            f"least {least} in dimension {free}"
        )


def _dtypes(kernel: Kernel, views: Mapping[str, TensorView], fp8: str) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    for tensor in kernel.tensors:
        found = views[tensor.name].dtype
        if tensor.dtype in kernel.dtypes:
            legal: tuple[str, ...] = kernel.dtypes[tensor.dtype]
            if dtypes.setdefault(tensor.dtype, found) != found:
                legal = (dtypes[tensor.dtype],)
        else:
            legal = (fp8,) if tensor.dtype == "fp8" else (tensor.dtype,)
        if found not in legal:
            raise TypeError(f"{kernel.name}: {tensor.name} has dtype {found}, expected {' or '.join(legal)}")
    return dtypes
