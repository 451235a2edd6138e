"""Inputs for quantizers and GEMMs, and what their outputs are held against."""

from __future__ import annotations

import numpy as np
import oracle
import torch
from interp import TORCH, allocate

from fp8_aot.kernels import SPECS


def awkward(rows: int, cols: int, dtype: str, seed: int) -> torch.Tensor:
    """Values over the whole range of a dtype, each 128x128 block and some rows and columns of their own kind.

    Ordinary, over all exponents, subnormal, +-0, near the largest, near 1e-12 (the least amax), and a few NaN
    and Inf.
    """
    rng = np.random.default_rng(seed)
    info = torch.finfo(TORCH[dtype])
    kinds = 7

    def values(kind: int, shape: tuple[int, int]) -> np.ndarray:
        normal = rng.standard_normal(shape)
        wide = np.exp2(rng.uniform(np.log2(info.smallest_normal) - 8, np.log2(info.max), shape))
        return {
            0: normal,
            1: np.sign(normal) * wide,
            2: normal * info.smallest_normal / 4,
            3: normal * 0.0,
            4: np.clip(normal * info.max, info.min, info.max),
            5: normal * 1e-12 * np.exp2(rng.integers(-4, 4, shape)),
            6: normal * np.exp2(rng.integers(-12, 12, (shape[0], 1))),
        }[kind]

    x = np.zeros((rows, cols))
    for r in range(0, rows, 128):
        for c in range(0, cols, 128):
            here = x[r : r + 128, c : c + 128]
            here[...] = values(int(rng.integers(kinds)), here.shape)
    for _ in range(3 if x.size else 0):
        row, col = rng.integers(rows), rng.integers(cols)
        x[row] = values(int(rng.integers(kinds)), (1, cols))
        x[:, col] = values(int(rng.integers(kinds)), (rows, 1))[:, 0]
    for special in (np.nan, np.inf, -np.inf, -0.0) if x.size and seed % 2 else ():
        x[rng.integers(rows), rng.integers(cols)] = special
    return torch.from_numpy(x).to(TORCH[dtype])


def assert_same(got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], fp8: str) -> None:
    """The same bytes and scale bits, where any NaN is as good as another."""
    values = oracle.fp8_values(fp8)
    got_y, expected_y = (np.where(np.isnan(values[y]), 0x80, y) for y, _ in (got, expected))
    if fp8 == "e4m3fn":  # 0x80 is -0 there
        assert np.array_equal(np.isnan(values[got[0]]), np.isnan(values[expected[0]]))
    np.testing.assert_array_equal(got_y, expected_y)
    got_s, expected_s = (np.where(np.isnan(s), np.float32(np.nan), s) for _, s in (got, expected))
    np.testing.assert_array_equal(got_s.view(np.uint32), expected_s.view(np.uint32))


def gemm_operands(
    name: str, m: int, n: int, k: int, fp8: str, out: str, seed: int, pad: int = 0
) -> dict[str, torch.Tensor]:
    """Tensors of a launch: fp8 values and scales such that no fp16 result overflows, all scales different.

    Odd seeds take any finite fp8 byte, even ones normal numbers; NaN lies between rows.
    """
    rng = np.random.default_rng(seed)
    spec = SPECS[name]
    tensors = allocate(spec, {"M": m, "N": n, "K": k}, {"out": out}, fp8, pad=pad, offset=pad)
    finite = np.flatnonzero(np.isfinite(oracle.fp8_values(fp8))).astype(np.uint8)
    most = {0: 5.0, 1: oracle.FP8_MAX[fp8]}[seed % 2]
    for t in tensors["a"], tensors["b"]:
        codes = rng.choice(finite, t.shape) if seed % 2 else oracle.to_fp8(rng.standard_normal(t.shape), fp8)
        t.view(torch.uint8).copy_(torch.from_numpy(codes))
    for t in tensors["a_s"], tensors["b_s"]:
        scale = rng.uniform(1, 2, t.shape) * np.exp2(rng.integers(-3, 3, t.shape)) / most / np.sqrt(max(k, 1))
        t.copy_(torch.from_numpy(scale))
    return tensors


def wide(b_s: torch.Tensor, name: str, n: int) -> np.ndarray:
    """b_s with a column for each of n, in fp64."""
    exact = oracle.exact(b_s)
    return exact.repeat(128, axis=1)[:, :n] if name == "gemm_1x128_128x128" else exact


def assert_within_bound(name: str, tensors: dict[str, torch.Tensor], out: str) -> None:
    """c equals the fp64 product up to what fp32 accumulation and one rounding can do; NaN and Inf agree."""
    a, b, a_s, c = (oracle.exact(tensors[t]) for t in ("a", "b", "a_s", "c"))
    with np.errstate(invalid="ignore"):
        value, error = oracle.gemm(a, b, a_s, wide(tensors["b_s"], name, b.shape[1]))
        low, high = (np.where(np.isfinite(value), value + side * error, value) for side in (-1, 1))
    if out != "fp32":
        low, high = oracle.round_to(low, out), oracle.round_to(high, out)
    np.testing.assert_array_equal(np.isnan(c), np.isnan(value))
    wrong = ~((low <= c) & (c <= high)) & ~np.isnan(value)
    first = tuple(np.argwhere(wrong)[0]) if wrong.any() else ()
    assert not wrong.any(), f"c{first} = {c[first]}, expected {value[first]} +- {error[first]}"
