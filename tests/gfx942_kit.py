"""Launch the gfx942 code objects of a bundle, by the loader, on an emulated MI300."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fake_driver import FakeHip
from fake_driver.base import Kernel, _image
from gfx942.code import load
from gfx942.machine import DEFAULT, Program, Settings
from gfx942.memory import READ, WRITE, Memory
from loader_kit import manifest_of, objects_of, write_bundle

from fp8_aot import loader
from fp8_aot.kernels import SPECS
from fp8_aot.loader import TensorView
from fp8_aot.loader.runtime import runtime

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fnuz: "e4m3fnuz",
}


@functools.lru_cache(maxsize=256)
def _program(image: bytes, symbol: str) -> Program:
    return Program(load(image, symbol))


class EmulatedHip(FakeHip):
    """A stand-in for ``libamdhip64.so`` whose launches run, on ``memory``, before they return."""

    def __init__(self, memory: Memory, settings: Settings = DEFAULT) -> None:
        super().__init__()
        self.memory, self.settings = memory, settings
        self._images: dict[str, bytes] = {}

    def _open(self, out: Any, image: int, device: int | None) -> int:
        code = super()._open(out, image, device)
        self._images[self.loads[-1].digest] = _image(image)
        return code

    def _launch(self, function: int, *rest: Any, **more: Any) -> int:
        code = super()._launch(function, *rest, **more)
        if code == 0:
            launch, kernel = self.launches[-1], self._get(function, Kernel)
            program = _program(self._images[kernel.module.digest], kernel.symbol)
            kernarg = launch.params.ljust(program.code.kernarg_size, b"\xff")
            program.launch(self.memory, launch.grid, launch.block[0], launch.shared, kernarg, self.settings)
        return code


def emulate(kernel: str, tensors: Mapping[str, torch.Tensor], settings: Settings = DEFAULT) -> EmulatedHip:
    """Launch a kernel on host tensors, which are copied to the device and back, gaps between rows included.

    Raises:
        OutOfBounds, WrongCoverage, OutOfRange: the kernel did what it must not, see there.
    """
    raw = {t: _storage(x) for t, x in tensors.items()}
    memory = Memory(sum(x.numel() + 3 * 4096 for x in raw.values()) + 2**16)
    views, places = {}, {}
    for t in SPECS[kernel].tensors:
        x = tensors[t.name]
        size = x.element_size()
        start = memory.reserve(raw[t.name].numel())
        places[t.name] = start
        memory.bytes_at(start, raw[t.name].numel())[:] = raw[t.name].numpy()
        first = start + x.storage_offset() * size
        line = x.shape[t.unit_dim] * size
        for row in range(x.shape[1 - t.unit_dim] if line else 0):
            at = first + row * x.stride(1 - t.unit_dim) * size
            memory.allow(at, line, WRITE if t.output else READ)
        views[t.name] = TensorView(first, NAMES[x.dtype], tuple(x.shape), x.stride())
    device = EmulatedHip(memory, settings)
    runtime.unload()
    loader.driver.reset()
    loader.driver.install(device.driver())
    try:
        loader.launch(kernel, views)
    except loader.DriverError:
        if device.errors:
            raise device.errors[0] from None
        raise
    memory.check_coverage()
    for name, x in raw.items():
        x.numpy()[:] = memory.bytes_at(places[name], x.numel())
    return device


def _storage(x: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's memory."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


def preferring(variant: Mapping[str, Any], bundle: Path, out: Path) -> Path:
    """A bundle in which a variant serves every launch that it can, and a general one the others."""
    manifest = manifest_of(bundle)
    kernel, dtypes, kind = (variant[name] for name in ("kernel", "dtypes", "specialization"))
    (entry,) = (d for d in manifest["dispatch"] if (d["kernel"], d["dtypes"]) == (kernel, dtypes))
    rules = [{"when": [], "variants": {kind: variant["id"]}}, *([] if kind == "general" else entry["rules"][-1:])]
    ids = {id for rule in rules for id in rule["variants"].values()}
    variants = [v for v in manifest["variants"] if v["id"] in ids]
    objects = {f"objects/{v['object']}.hsaco" for v in variants}
    small = {
        **manifest,
        "kernels": [k for k in manifest["kernels"] if k["name"] == kernel],
        "variants": variants,
        "dispatch": [{**entry, "rules": rules}],
    }
    return write_bundle(out, small, {name: data for name, data in objects_of(bundle).items() if name in objects})
