"""Build matrices and third-party kernels that tests write to disk."""

from __future__ import annotations

import copy
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRITON = importlib.metadata.version("triton")

TARGETS: dict[str, dict[str, Any]] = {
    "sm90": {"backend": "cuda", "arch": 90, "fp8": "e4m3fn"},
    "sm100": {"backend": "cuda", "arch": 100, "fp8": "e4m3fn"},
    "gfx942": {"backend": "hip", "arch": "gfx942", "fp8": "e4m3fnuz"},
}

# A kernel that compiles quickly: a copy, tile by tile.  {extra} comes first in its body.
COPY = """
import multiprocessing
import os
import signal
import time
from pathlib import Path

import triton
import triton.language as tl

from fp8_aot.kernels.spec import Config, Dim, KernelSpec, Pointer, Size, Stride, Tensor, Tile, kernel

{setup}

ARGS = (
    Pointer("x_ptr", "x"), Pointer("y_ptr", "y"), Size("rows", "M"), Size("cols", "N", specialize=True),
    Stride("stride_x", "x", 0, specialize=True), Stride("stride_y", "y", 0, specialize=True),
)


@kernel(*ARGS)
def {name}_kernel(
    x_ptr, y_ptr, rows: tl.int32, cols: tl.int32, stride_x: tl.int64, stride_y: tl.int64, BLOCK: tl.constexpr
):
    {body}
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + c, mask=c < cols)
    tl.store(y_ptr + row * stride_y + c, x, mask=c < cols)


spec = KernelSpec(
    name="{name}",
    fn={name}_kernel,
    tensors=(
        Tensor("x", "in", (Dim("M"), Dim("N")), 1),
        Tensor("y", "in", (Dim("M"), Dim("N")), 1, output=True),
    ),
    args=ARGS,
    tiles=(Tile("BLOCK", 16, 1024),),
    dtypes={{"in": ("bf16", "fp32")}},
    grid=((("M", 1),), (("N", "BLOCK"),)),
    default=Config({{"BLOCK": 64}}),
    promise="y is x",
    source="tests",
)
"""


def write_kernel(folder: Path, module: str, body: str = "pass", setup: str = "") -> str:
    """Write ``module`` (``package.module``) with a copy kernel named after it; gives its ``source``."""
    package, name = module.split(".")
    (folder / package).mkdir(parents=True, exist_ok=True)
    (folder / package / f"{name}.py").write_text(COPY.format(name=name, body=body, setup=setup))
    return f"{module}:spec"


def copy_matrix(
    *sources: str, blocks: tuple[int, ...] = (128,), targets: tuple[str, ...] = ("sm90",)
) -> dict[str, Any]:
    """A matrix of copy kernels, one dtype, general tiles; the last block size is the last resort."""
    small = [{"BLOCK": b, "specializations": ["general"], "when": {"N": {"most": b}}} for b in blocks[:-1]]
    tiles = [*small, {"BLOCK": blocks[-1], "specializations": ["general"]}]
    return {
        "schema": 1,
        "toolchain": {"triton": TRITON},
        "target": {name: TARGETS[name] for name in targets},
        "kernel": [{"source": source, "in_dtype": ["bf16"], "tiles": tiles} for source in sources],
    }


def write_matrix(path: Path, values: Mapping[str, Any]) -> Path:
    """Write a matrix as TOML, one line for each top-level key."""
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
    return path


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


BASE: dict[str, Any] = {
    "schema": 1,
    "toolchain": {"triton": TRITON},
    "target": TARGETS,
    "kernel": [
        {
            "source": "fp8_aot.kernels.quant:act_quant_lhs",
            "tiles": [
                {"BLOCK_R": 4, "num_warps": 1, "when": {"M": {"most": 512}}},
                {"BLOCK_R": 32, "num_warps": 4},
            ],
        },
        {
            "source": "fp8_aot.kernels.gemm:gemm_1x128_128x128",
            "out_dtype": ["bf16"],
            "tiles": [{"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_stages": 1}],
        },
    ],
    "exclude": [
        {"kernel": "act_quant_lhs", "target": "sm90", "when": {"BLOCK_R": 4, "in_dtype": "fp32"}, "reason": "slow"}
    ],
}
"""A valid matrix with something of everything."""

MISSING = object()
"""Stands for no value."""


def change(*places: tuple[str, object]) -> dict[str, Any]:
    """BASE with values put at places like ``kernel.0.tiles.1.BLOCK_R``; MISSING removes."""
    values = copy.deepcopy(BASE)
    for place, value in places:
        *path, last = place.split(".")
        at: Any = values
        for step in path:
            at = at[int(step)] if isinstance(at, list) else at[step]
        if value is MISSING:
            del at[last]
        elif isinstance(at, list):
            at.insert(int(last), value)
        else:
            at[last] = value
    return values
