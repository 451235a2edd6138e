"""A linear layer's step from a bundle on real layer shapes: accuracy, time, start-up and launch cost.

    python benchmarks/layers.py --bundle artifacts [--json results.json]

Needs a GPU, torch and a bundle; Triton and torchao are measured beside ours where they are installed.
Prints the tables of ``docs/results.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import cpu_us, gpu_us

import fp8_aot.loader as fp8

# (N, K) of weights: DeepSeek-V3's dense MLP up and down, its experts' up, Llama 3's MLP up.
WEIGHTS = ((7168, 18432), (18432, 7168), (7168, 2048), (4096, 14336))
TOKENS = (4096, 16384)

START = """
import sys, time
spawned, begin = float(sys.argv[1]), time.perf_counter()
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
ready = time.perf_counter()
import fp8_aot.loader as fp8
imported = time.perf_counter()
y, scale = fp8.act_quant_lhs(x)
torch.cuda.synchronize()
done = time.perf_counter()
print(time.time() - spawned, imported - ready, done - imported)
"""


def sqnr(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    return float(20 * torch.log10(exact.norm() / (exact - found.float()).norm()))


def layer(n: int, k: int, tokens: int) -> list[dict[str, object]]:
    """fprop, dgrad and wgrad of one layer: dB against the fp32 product, microseconds of each operation."""
    generator = torch.Generator(device="cuda").manual_seed(n + k + tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    x, w, dy = normal(tokens, k), normal(n, k) / k**0.5, normal(tokens, n)
    rows = []

    def measure(
        name: str,
        left: tuple[str, torch.Tensor],
        right: tuple[str, torch.Tensor],
        gemm: str,
        product: Callable[[], torch.Tensor],
        in_bf16: Callable[[], torch.Tensor],
    ) -> None:
        (left_op, a_in), (right_op, b_in) = left, right
        (a, a_s), (b, b_s) = getattr(fp8, left_op)(a_in), getattr(fp8, right_op)(b_in)
        op = getattr(fp8, gemm)
        flops = 2 * n * k * tokens
        gemm_us = gpu_us(lambda: op(a, b, a_s, b_s))
        bf16_us = gpu_us(in_bf16)
        rows.append(
            {
                "pass": name,
                "N": n,
                "K": k,
                "tokens": tokens,
                "sqnr_db": round(sqnr(product(), op(a, b, a_s, b_s)), 2),
                "left_us": round(gpu_us(lambda: getattr(fp8, left_op)(a_in)), 1),
                "right_us": round(gpu_us(lambda: getattr(fp8, right_op)(b_in)), 1),
                "gemm_us": round(gemm_us, 1),
                "gemm_tflops": round(flops / gemm_us / 1e6),
                "bf16_us": round(bf16_us, 1),
            }
        )

    full = {name: t.float() for name, t in (("x", x), ("w", w), ("dy", dy))}
    measure(
        "fprop", ("act_quant_lhs", x), ("weight_quant_transposed_rhs", w), "gemm_1x128_128x128",
        lambda: full["x"] @ full["w"].t(), lambda: x @ w.t(),
    )  # fmt: skip
    measure(
        "dgrad", ("act_quant_lhs", dy), ("weight_quant_rhs", w), "gemm_1x128_128x128",
        lambda: full["dy"] @ full["w"], lambda: dy @ w,
    )  # fmt: skip
    measure(
        "wgrad", ("act_quant_transposed_lhs", dy), ("act_quant_rhs", x), "gemm_1x128_128x1",
        lambda: full["dy"].t() @ full["x"], lambda: dy.t() @ x,
    )  # fmt: skip
    return rows


def start_up(bundle: Path, mode: str) -> dict[str, float]:
    """A fresh process: seconds from its start to its first result, and milliseconds of them for importing the
    loader and for the first result, torch being ready; the JIT's cache is empty."""
    runs = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {
                "FP8_AOT_BUNDLE_PATH": str(bundle.resolve()),
                "FP8_AOT_MODE": mode,
                "TRITON_CACHE_DIR": cache,
            }
            command = [sys.executable, "-c", START, str(time.time())]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            runs.append([float(part) for part in done.stdout.split()])
    total, imported, first = min(runs)
    return {"process_to_result_s": total, "import_ms": imported * 1e3, "first_result_ms": first * 1e3}


def launch_cost() -> dict[str, dict[str, float]]:
    """Microseconds of CPU time of one call from Python, on tiny tensors."""
    x = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    y, scale = fp8.act_quant_lhs(x)
    b, b_s = fp8.weight_quant_transposed_rhs(w)
    c = fp8.gemm_1x128_128x128(y, b, scale, b_s)
    quant: dict[str, Callable[[], object]] = {
        "ours": lambda: fp8.act_quant_lhs(x),
        "ours, out=": lambda: fp8.act_quant_lhs(x, out=(y, scale)),
        "ours, torch.ops": lambda: torch.ops.fp8_aot.act_quant_lhs(x),
    }
    gemm: dict[str, Callable[[], object]] = {
        "ours": lambda: fp8.gemm_1x128_128x128(y, b, scale, b_s),
        "ours, out=": lambda: fp8.gemm_1x128_128x128(y, b, scale, b_s, out=c),
        "ours, torch.ops": lambda: torch.ops.fp8_aot.gemm_1x128_128x128(y, b, scale, b_s),
    }
    add_jit(quant, gemm, x, y, scale, b, b_s)
    add_torchao(quant, gemm, x, y, scale, b, b_s)
    one = torch.zeros(1, device="cuda")
    quant["torch add_"] = lambda: one.add_(1)
    return {"act_quant_lhs": cpu_us(quant), "gemm_1x128_128x128": cpu_us(gemm)}


def add_jit(quant: dict, gemm: dict, x, y, scale, b, b_s) -> None:
    """The same operations through Triton's JIT: outputs allocated, kernel launched, nothing checked."""
    try:
        from fp8_aot.kernels import SPECS
        from fp8_aot.kernels.spec import COMPILE_OPTIONS
    except ImportError:
        return
    (m, k), n = x.shape, b.shape[1]
    groups = -(-k // 128)
    quantizer, product = SPECS["act_quant_lhs"], SPECS["gemm_1x128_128x128"]
    quant_options = options_of(quantizer, COMPILE_OPTIONS)
    gemm_options = options_of(product, COMPILE_OPTIONS)

    def jit_quant() -> object:
        y = torch.empty_strided((m, k), (k, 1), dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.empty_strided((m, groups), (1, m), dtype=torch.float32, device="cuda")
        grid = (-(-m // quant_options["BLOCK_R"]) * groups,)
        quantizer.fn[grid](x, y, scale, m, k, x.stride(0), y.stride(0), scale.stride(1), **quant_options)
        return y, scale

    def jit_gemm() -> object:
        c = torch.empty_strided((m, n), (n, 1), dtype=torch.bfloat16, device="cuda")
        grid = (-(-m // gemm_options["BLOCK_M"]) * -(-n // gemm_options["BLOCK_N"]),)
        product.fn[grid](
            y, b, scale, b_s, c, m, n, k,
            y.stride(0), b.stride(1), scale.stride(1), b_s.stride(1), c.stride(0), **gemm_options,
        )  # fmt: skip
        return c

    quant["Triton JIT"], gemm["Triton JIT"] = jit_quant, jit_gemm


def options_of(spec, more: dict[str, bool]) -> dict[str, int]:
    """Keyword arguments of a JIT call with a kernel's default tile."""
    config = spec.default
    return {
        **spec.constexprs(config, "e4m3fn"),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **more,
    }


def add_torchao(quant: dict, gemm: dict, x, y, scale, b, b_s) -> None:
    """torchao's own operations."""
    try:
        from torchao.prototype.blockwise_fp8_training.kernels import (
            triton_fp8_blockwise_act_quant_lhs,
            triton_fp8_gemm_1x128_128x128,
        )
    except ImportError:
        return
    quant["torchao Triton"] = lambda: triton_fp8_blockwise_act_quant_lhs(x)
    gemm["torchao Triton"] = lambda: triton_fp8_gemm_1x128_128x128(y, b, scale, b_s)


def table(rows: list[dict[str, object]]) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += [
        "| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |" for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("artifacts"), help="bundle file or folder")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--only", choices=("layers", "launch", "start"), help="measure only this part")
    options = parser.parse_args()
    fp8.configure(mode="strict", bundle_path=options.bundle)
    torch.backends.cuda.matmul.allow_tf32 = False
    parts: dict[str, Callable[[], list[dict[str, object]]]] = {
        "layers": lambda: [row for tokens in TOKENS for n, k in WEIGHTS for row in layer(n, k, tokens)],
        "launch": lambda: [
            {"operation": op, "call": name, "cpu_us": us}
            for op, costs in launch_cost().items()
            for name, us in costs.items()
        ],
        "start": lambda: [{"mode": mode, **start_up(options.bundle, mode)} for mode in ("strict", "jit")],
    }
    results: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{results['gpu']}, torch {results['torch']}")
    for name, measure in parts.items():
        if options.only in (None, name):
            rows = measure()
            results[name] = rows
            print(f"\n{table(rows)}")
    stats = fp8.stats()
    if stats.misses or stats.fallbacks:
        sys.exit(f"not everything ran from the bundle: {stats}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
