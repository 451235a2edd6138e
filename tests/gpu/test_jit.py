"""Prebuilt kernels and the JIT's give the same bits: needs Triton, of the version that built the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import GEMMS, HIGH, QUANTIZERS, make, operands, same, shapes, special

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def same_triton(bundle_path: Path) -> None:
    from fp8_aot.loader.bundle import Bundle

    built = Bundle(bundle_path).manifest.toolchain.triton
    if built != triton.__version__:
        pytest.skip(f"the bundle was built with Triton {built}, installed is {triton.__version__}")


def both(loader, bundle_path: Path, name: str, calls: list[tuple], **options):
    """Results of calls by prebuilt kernels, and by the JIT."""
    results = []
    for mode in ("strict", "jit"):
        loader.configure(mode=mode, bundle_path=bundle_path)
        before = loader.stats()
        results.append([getattr(loader, name)(*call, **options) for call in calls])
        after = loader.stats()
        assert (after.fallbacks > before.fallbacks) == (mode == "jit")
        assert (after.launches > before.launches) == (mode == "strict")
    return zip(*results, strict=True)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", HIGH, ids=str)
def test_quantizers(strict, bundle_path: Path, name: str, dtype: torch.dtype) -> None:
    calls = [(make(shape, dtype, seed=i),) for i, shape in enumerate(shapes(2))]
    calls += [
        (make((300, 250), dtype, pad=5, offset=1),),
        (make((256, 512), dtype, pad=16),),
        (special((517, 1091), dtype),),
    ]
    for (x,), (prebuilt, jit) in zip(calls, both(strict, bundle_path, name, calls), strict=True):
        for found, want in zip(prebuilt, jit, strict=True):
            same(f"{name} {tuple(x.shape)} {x.stride()}", found, want)


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("dtype", HIGH, ids=str)
def test_gemms(strict, bundle_path: Path, name: str, dtype: torch.dtype) -> None:
    sizes = [*list(shapes())[::3], (16, 256, 512), (512, 384, 1024), (1024, 512, 2048), (1000, 528, 1040)]
    calls = [operands(name, m, n, k, seed=i) for i, (m, n, k) in enumerate(sizes)]
    for size, (prebuilt, jit) in zip(sizes, both(strict, bundle_path, name, calls, out_dtype=dtype), strict=True):
        same(f"{name} {size}", prebuilt, jit)
