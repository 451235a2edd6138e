"""Life in a real process: threads, devices, the torch integration, errors that leave nothing behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import make, operands, same


def test_threads_and_streams(strict) -> None:
    """Many threads, each on a stream of its own, mixing shapes: every result is its own."""
    inputs = [make((64 * (1 + i % 5), 512), torch.bfloat16, seed=i) for i in range(16)]
    want = [strict.act_quant_lhs(x) for x in inputs]
    torch.cuda.synchronize()
    before = strict.stats().launches

    def work(thread: int):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [strict.act_quant_lhs(inputs[(thread + i) % 16]) for i in range(200)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(8) as pool:
        for thread, results in enumerate(pool.map(work, range(8))):
            for i, found in enumerate(results):
                for a, b in zip(found, want[(thread + i) % 16], strict=True):
                    same("thread", a, b)
    assert strict.stats().launches - before == 8 * 200


def test_a_thread_without_a_context(strict) -> None:
    """The first GPU call of a fresh thread is a raw launch with outputs given: no context is current yet."""
    x = make((256, 512), torch.bfloat16)
    want = strict.act_quant_lhs(x)
    out = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in want)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            strict.act_quant_lhs(x, out=out)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    torch.cuda.synchronize()
    for a, b in zip(out, want, strict=True):
        same("fresh thread", a, b)


def test_torch_compile_and_ops(strict) -> None:
    a, b, a_s, b_s = operands("gemm_1x128_128x128", 96, 256, 512)

    def step(a, b, a_s, b_s):
        return strict.gemm_1x128_128x128(a, b, a_s, b_s) * 2

    want = step(a, b, a_s, b_s)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b, a_s, b_s)
    same("torch.compile", found, want)
    same("torch.ops", torch.ops.fp8_aot.gemm_1x128_128x128(a, b, a_s, b_s) * 2, want)


def test_opcheck(strict) -> None:
    x = make((96, 300), torch.bfloat16)
    # torch's schema test compares inputs with torch.allclose, which no fp8 tensor supports.
    torch.library.opcheck(torch.ops.fp8_aot.act_quant_lhs.default, (x,))
    inputs = operands("gemm_1x128_128x1", 96, 256, 300)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fp8_aot.gemm_1x128_128x1.default, inputs, test_utils=tests)


def test_wrong_arguments_launch_nothing(strict) -> None:
    x = make((64, 256), torch.bfloat16)
    a, b, a_s, b_s = operands("gemm_1x128_128x128", 96, 256, 512)
    before = strict.stats()
    for call, kind, word in (
        (lambda: strict.act_quant_lhs(x.t()), ValueError, "x"),
        (lambda: strict.act_quant_lhs(x.double()), TypeError, "float64"),
        (lambda: strict.gemm_1x128_128x128(a, b, a_s[:, :1], b_s), ValueError, "a_s"),
        (lambda: strict.gemm_1x128_128x128(a, b.cpu(), a_s, b_s), ValueError, "cpu"),
        (lambda: strict.gemm_1x128_128x128(a, b, a_s, b_s.to(torch.bfloat16)), TypeError, "b_s"),
        (lambda: strict.gemm_1x128_128x128(a, b.t().contiguous().view(b.shape), a_s, b_s), ValueError, "b"),
    ):
        with pytest.raises(kind, match=word):
            call()
    assert strict.stats() == before


def test_explain_names_the_variant(strict) -> None:
    x = make((64, 256), torch.bfloat16)
    choice = strict.explain("act_quant_lhs", x)
    assert choice.variant is not None and choice.variant.specialization == "aligned"
    odd = strict.explain("act_quant_lhs", make((64, 255), torch.bfloat16))
    assert odd.variant is not None and odd.variant.specialization == "general"
    assert "cols = 255" in " ".join(map(str, odd.steps))
