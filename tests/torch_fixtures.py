"""Fixtures of the torch face's tests: a test module names this plugin and ``loader_fixtures``."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch_kit import STREAM, Gpu, GpuTensor

from fp8_aot.loader import jit, torch_call, torch_check


@pytest.fixture
def gpu_of(clean_loader, monkeypatch):
    """``gpu_of(target)``: torch's side of a GPU of that target."""

    def make(target):
        gpu = Gpu(target)
        monkeypatch.setattr(torch_call.Call, "_eager", staticmethod(lambda tensors: True))
        monkeypatch.setattr(torch_call, "_Tensor", GpuTensor)
        monkeypatch.setattr(torch_call, "_empty", gpu.empty_strided)
        monkeypatch.setattr(torch_call, "_current_device", lambda: gpu.device)
        monkeypatch.setattr(torch_call, "_current_stream", lambda index: STREAM + index)
        monkeypatch.setattr(torch_call, "_warned", {})
        monkeypatch.setattr(torch.version, "hip", "6.2" if target == "gfx942" else None)
        arch = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: arch)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        torch_check._hip_fp8.cache_clear()
        return gpu

    return make


@pytest.fixture(params=["sm90", "gfx942"])
def gpu(request, gpu_of, on):
    made = gpu_of(request.param)
    made.fake = on(request.param, count=2)
    if request.param == "sm90":
        made.fake.push(0)
    return made


@pytest.fixture
def by_jit(monkeypatch):
    """What the JIT would have been asked to launch."""
    asked = []

    def launch(kernel, tensors, sizes, fp8, like):
        asked.append(SimpleNamespace(kernel=kernel, tensors=tensors, sizes=sizes, fp8=fp8, like=like))

    monkeypatch.setattr(jit, "launch", launch)
    monkeypatch.setattr(jit, "available", lambda: None)
    return asked
