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
begin = time.perf_counter()
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
ready = time.perf_counter()
import fp8_aot.loader as fp8
imported = time.perf_counter()
y, scale = fp8.act_quant_lhs(x)
torch.cuda.synchronize()
done = time.perf_counter()
print(ready - begin, imported - ready, done - imported, "triton" in sys.modules)
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
    """Seconds of a fresh process: torch ready, loader imported, first result; the JIT's cache is empty."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "FP8_AOT_BUNDLE_PATH": str(bundle.resolve()),
            "FP8_AOT_MODE": mode,
            "TRITON_CACHE_DIR": cache,
        }
        runs = []
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True
            )
            runs.append([float(part) for part in done.stdout.split()[:3]])
            if mode == "jit":
                break
    ready, imported, first = min(runs, key=lambda run: run[1] + run[2])
    return {"torch_s": ready, "import_ms": imported * 1e3, "first_result_ms": first * 1e3}


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

    def jit_op(name: str, tensors: dict[str, torch.Tensor], outputs: dict[str, tuple], sizes: dict[str, int]):
        spec = SPECS[name]
        config = spec.default
        grid = spec.grid_size(sizes, config)
        options = {
            **spec.constexprs(config, "e4m3fn"),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **COMPILE_OPTIONS,
        }

        def call() -> object:
            made = {
                key: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
                for key, (shape, strides, dtype) in outputs.items()
            }
            every = tensors | made
            args = [
                every[arg.tensor]
                if type(arg).__name__ == "Pointer"
                else sizes[arg.symbol]
                if type(arg).__name__ == "Size"
                else every[arg.tensor].stride(arg.dim)
                for arg in spec.args
            ]
            spec.fn[grid](*args, **options)
            return made

        return call

    (m, k), n = x.shape, b.shape[1]
    shapes = {"y": (y.shape, y.stride(), y.dtype), "scale": (scale.shape, scale.stride(), scale.dtype)}
    quant["Triton JIT"] = jit_op("act_quant_lhs", {"x": x}, shapes, {"M": m, "K": k})
    gemm["Triton JIT"] = jit_op(
        "gemm_1x128_128x128",
        {"a": y, "b": b, "a_s": scale, "b_s": b_s},
        {"c": ((m, n), (n, 1), torch.bfloat16)},
        {"M": m, "N": n, "K": k},
    )


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
    options = parser.parse_args()
    fp8.configure(mode="strict", bundle_path=options.bundle)
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": [row for tokens in TOKENS for n, k in WEIGHTS for row in layer(n, k, tokens)],
        "launch_us": launch_cost(),
        "start_up": {mode: start_up(options.bundle, mode) for mode in ("strict", "jit")},
        "stats": str(fp8.stats()),
    }
    print(f"{results['gpu']}, torch {results['torch']}\n\n{table(results['layers'])}\n")  # type: ignore[arg-type]
    for op, costs in results["launch_us"].items():  # type: ignore[attr-defined]
        print(f"{op}\n{table([{'call': name, 'us': us} for name, us in costs.items()])}\n")
    print(table([{"mode": mode, **times} for mode, times in results["start_up"].items()]))  # type: ignore[attr-defined]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
