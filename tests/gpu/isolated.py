"""All seven operations from a bundle, in a process without Triton and without a compiler.

Run by the tests in a clean environment: ``isolated.py all`` or ``isolated.py sanitizer``.  Prints one line a
check and exits non-zero at the first that fails.
"""

from __future__ import annotations

import gc
import importlib.machinery
import shutil
import sys
import time


class WithoutTriton:
    """Stands before the finder of installed packages, and finds neither Triton nor our kernels."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "triton" or fullname.startswith("fp8_aot.kernels"):
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutTriton()
for tool in ("cc", "gcc", "clang", "nvcc", "ptxas", "ldconfig"):
    assert shutil.which(tool) is None, f"{tool} is on PATH"

import torch  # noqa: E402
from cases import GEMMS, HIGH, QUANTIZERS, check_gemm, make, operands, same, shapes, special  # noqa: E402

import fp8_aot.loader as loader  # noqa: E402
from fp8_aot.loader import reference  # noqa: E402


def quantizers() -> None:
    """Bit for bit against the reference: every dtype, tails, strided rows, unaligned views, special values."""
    for name in QUANTIZERS:
        op, expected = getattr(loader, name), getattr(reference, name)
        for dtype in HIGH:
            for i, shape in enumerate(shapes(2)):
                for pad, offset in ((0, 0), (8 * (1 + i % 3), 0), (5, 1 + i % 7)):
                    x = make(shape, dtype, seed=i, pad=pad, offset=offset)
                    for found, want in zip(op(x), expected(x), strict=True):
                        same(f"{name} {dtype} {shape} pad {pad} offset {offset}", found, want)
            x = special((517, 1091), dtype)
            for found, want in zip(op(x), expected(x.cpu()), strict=True):
                same(f"{name} {dtype} special values", found, want)
            for shape in ((0, 0), (0, 256), (256, 0)):
                x = torch.empty(shape, dtype=dtype, device="cuda")
                for found, want in zip(op(x), expected(x), strict=True):
                    same(f"{name} {dtype} {shape}", found, want)


def into_given_outputs() -> None:
    """``out=``, with rows further apart than their length: nothing but the outputs is written."""
    for name in QUANTIZERS:
        x = make((300, 260), torch.bfloat16, seed=3)
        want = getattr(loader, name)(x)
        outs, rooms = [], []
        for t in want:
            rows, cols = t.shape if t.stride(1) == 1 else t.shape[::-1]
            room = torch.full(
                (rows, cols + 3), 77, dtype=torch.uint8 if t.element_size() == 1 else torch.int32, device="cuda"
            )
            view = room[:, :cols].view(t.dtype)
            outs.append(view if t.stride(1) == 1 else view.t())
            rooms.append(room[:, cols:])
        getattr(loader, name)(x, out=outs)
        for found, expected, gap in zip(outs, want, rooms, strict=True):
            wrong = found.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
            assert not wrong.any(), f"{name} out="
            assert bool((gap == 77).all()), f"{name}: wrote between the rows of out"


def gemms() -> None:
    """Within the bound of the fp64 product, every output dtype, tails in M, N and K; the same bits twice."""
    for name in GEMMS:
        op = getattr(loader, name)
        for i, (m, n, k) in enumerate(shapes()):
            inputs = operands(name, m, n, k, seed=i)
            for dtype in HIGH:
                c = op(*inputs, out_dtype=dtype)
                assert c.dtype == dtype and c.stride() == (n, 1)
                check_gemm(name, c, *inputs)
                same(f"{name} {(m, n, k)} again", op(*inputs, out_dtype=dtype), c)
        for m, n, k in ((5, 7, 0), (0, 7, 128), (5, 0, 128)):
            c = op(*operands(name, m, n, k))
            assert c.shape == (m, n) and not c.any(), f"{name} {(m, n, k)} is not zeros"


def large() -> None:
    """More than 2^31 elements: the end of the tensor, compared with the same rows alone."""
    rows, cols = 2**31 // 4096 + 384, 4096
    x = torch.empty((rows, cols), dtype=torch.bfloat16, device="cuda")
    x.normal_()
    tail = rows - 256
    for name in QUANTIZERS:
        y, scale = getattr(loader, name)(x)
        want_y, want_scale = getattr(reference, name)(x[tail:])
        transposed = name in ("act_quant_transposed_lhs", "weight_quant_transposed_rhs")
        part = y[:, tail:] if transposed else y[tail:]
        groups = tail if name == "act_quant_lhs" else tail // 128
        scale_part = scale[:, groups:] if transposed else scale[groups:]
        assert torch.equal(part.contiguous().view(torch.uint8), want_y.contiguous().view(torch.uint8)), name
        assert torch.equal(scale_part.contiguous(), want_scale.contiguous()), name
        del y, scale
    a, a_s = loader.act_quant_lhs(x)
    del x
    b, b_s = loader.weight_quant_transposed_rhs(make((256, cols), torch.bfloat16))
    c = loader.gemm_1x128_128x128(a, b, a_s, b_s)
    alone = loader.gemm_1x128_128x128(a[tail:], b, a_s.t()[:, tail:].contiguous().t(), b_s)
    same("gemm of more than 2^31 elements", c[tail:], alone)
    wide = torch.empty((rows, 4224), dtype=torch.bfloat16, device="cuda")
    assert wide.numel() > 2**31
    c2 = torch.as_strided(wide, (rows, 256), (4224, 1))
    loader.gemm_1x128_128x128(a, b, a_s, b_s, out=c2)
    assert torch.equal(c2, c), "gemm into rows more than 2^31 elements apart"


def streams() -> None:
    """On a side stream the launch waits for that stream's work and for no other's."""
    side = torch.cuda.Stream()
    x = make((4096, 4096), torch.bfloat16)
    want = loader.act_quant_lhs(x)
    torch.cuda.synchronize()
    source = torch.zeros_like(x)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        source.copy_(x, non_blocking=True)
        found = loader.act_quant_lhs(source)
    assert not side.query(), "the call waited for the device"
    side.synchronize()
    for a, b in zip(found, want, strict=True):
        same("side stream", a, b)


def graphs() -> None:
    """Captured once, replayed with new contents in the same memory."""
    x = make((512, 1024), torch.bfloat16, seed=1)
    w = make((768, 1024), torch.bfloat16, seed=2)
    loader.preload()

    def step():
        a, a_s = loader.act_quant_lhs(x)
        b, b_s = loader.weight_quant_transposed_rhs(w)
        return loader.gemm_1x128_128x128(a, b, a_s, b_s)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        x.copy_(make((512, 1024), torch.bfloat16, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        same("graph replay", captured, step())
    # A graph that Python frees while another is being captured would end that capture.
    del graph, captured
    gc.collect()


def refused_capture() -> None:
    """A capture that would need a load is refused, and the capture lives on."""
    loader.unload()
    x = make((64, 256), torch.bfloat16)
    y = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        try:
            loader.act_quant_lhs(x)
        except loader.CaptureError as error:
            assert "preload" in str(error)
        else:
            raise AssertionError("a load during capture was not refused")
        y += 1
    graph.replay()
    torch.cuda.synchronize()
    assert bool((y == 1).all())
    loader.preload()


def raw() -> None:
    """The same kernels from raw pointers: TensorViews and DLPack, an explicit stream."""
    x = make((300, 520), torch.bfloat16)
    want_y, want_scale = loader.act_quant_lhs(x)
    y, scale = torch.zeros_like(want_y), torch.zeros(5, 300, device="cuda").t()
    torch.cuda.synchronize()
    view = loader.TensorView
    loader.launch(
        "act_quant_lhs",
        {"x": view(x.data_ptr(), "bf16", (300, 520)), "y": view(y.data_ptr(), "e4m3fn", (300, 520)), "scale": scale},
        stream=torch.cuda.current_stream().cuda_stream,
    )
    same("raw y", y, want_y)
    same("raw scale", scale, want_scale)

    class ByDlpack:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, stream=None):
            return self.tensor.__dlpack__(stream=stream)

    y.zero_()
    loader.launch(
        "act_quant_lhs",
        {"x": ByDlpack(x), "y": y, "scale": ByDlpack(scale)},
        stream=torch.cuda.current_stream().cuda_stream,
    )
    same("DLPack y", y, want_y)


def sanitizer() -> None:
    """Each operation once for each tail class, small: run under compute-sanitizer."""
    for name in QUANTIZERS:
        for i, shape in enumerate(shapes(2)):
            getattr(loader, name)(make(shape, HIGH[i % 3], seed=i))
    for name in GEMMS:
        for i, (m, n, k) in enumerate(shapes()):
            getattr(loader, name)(*operands(name, m, n, k, seed=i), out_dtype=HIGH[i % 3])
    torch.cuda.synchronize()


def main(what: str) -> None:
    try:
        import triton
    except ImportError:
        pass
    else:
        raise AssertionError(f"Triton can be imported: {triton}")
    checks = {
        "all": (quantizers, into_given_outputs, gemms, large, streams, graphs, refused_capture, raw),
        "sanitizer": (sanitizer,),
    }[what]
    for check in checks:
        start = time.perf_counter()
        check()
        torch.cuda.synchronize()
        print(f"{check.__name__}: good, {time.perf_counter() - start:.1f} s", flush=True)
    assert "triton" not in sys.modules
    stats = loader.stats()
    assert stats.launches > 0 and stats.misses == 0 and stats.fallbacks == 0, stats
    print(stats, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
