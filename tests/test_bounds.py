"""Every access of every kernel is inside its tensor, for any shape and tile; and a missing mask is found.

``interp.run`` checks each address and counts each store, so a test of bounds is a launch that raises nothing.
The second half takes masks out, one at a time, and expects the checker to object: the public bugs of the
same kernels elsewhere (pytorch/ao #4036, #4634, #4627), and every mask there is here.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import fault_kernels
import numpy as np
import pytest
import torch
from checked_builder import OutOfBounds, Unchecked, WrongCoverage
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interp import allocate, label, matrix_configs, run
from mutation import Mutation, accesses, load_mutated, mutations, users

import fp8_aot.kernels
from fp8_aot.kernels import SPECS, gemm, quant
from fp8_aot.kernels.spec import MAX_SIZE, Config, KernelSpec

KERNEL_FILES = sorted(p for folder in fp8_aot.kernels.__path__ for p in Path(folder).glob("*.py"))
MODULES = [importlib.import_module(name) for name in sorted({s.fn.fn.__module__ for s in SPECS.values()})]

per_kernel = pytest.mark.parametrize("name", SPECS)
per_tile = pytest.mark.parametrize(
    ("name", "config"), [pytest.param(n, c, id=f"{n}-{label(c)}") for n in SPECS for c in matrix_configs(n)]
)

TAILS = ((1, 1, 1), (3, 5, 7), (131, 133, 129), (130, 140, 300))
"""Sizes M, N, K that no tile divides."""

IN_BOUNDS_BY_CONSTRUCTION = {
    ("gemm_1x128_128x128_kernel", "tl.load(b_s_ptrs)"): (
        "a scalar: a tile of at most 128 columns lies in one block of 128, and every program has a tile"
    ),
    ("quant_block", "tl.store(scale_ptr + scale_at)"): (
        "a scalar: the grid has one program for each block, and each stores its own scale"
    ),
}
"""Accesses that stay in bounds without their mask: function, access, reason."""


def launch(spec: KernelSpec, config: Config, sizes: Mapping[str, int], *, pad: int = 0, offset: int = 0) -> None:
    """A launch on tensors of any content, for its checks."""
    dtypes = {axis: names[0] for axis, names in spec.dtypes.items()}
    run(spec, allocate(spec, sizes, dtypes, pad=pad, offset=offset), config)


def sizes_of(spec: KernelSpec, m: int, n: int, k: int) -> dict[str, int]:
    """Values of a kernel's size symbols."""
    values = {"M": m, "N": n, "K": k, "R": m, "C": k}
    return {symbol: values[symbol] for symbol in spec.symbols}


@per_tile
@settings(deadline=None, derandomize=True, max_examples=4, database=None)
@given(
    m=st.integers(0, 200),
    n=st.integers(0, 200),
    k=st.integers(0, 200),
    pad=st.integers(0, 40),
    offset=st.integers(0, 40),
)
@example(m=1, n=1, k=1, pad=0, offset=0)
@example(m=13, n=129, k=127, pad=3, offset=0)
@example(m=128, n=128, k=128, pad=0, offset=0)
@example(m=257, n=131, k=130, pad=1, offset=5)
def test_in_bounds_and_complete(name: str, config: Config, m: int, n: int, k: int, pad: int, offset: int) -> None:
    """Any shape, views with gaps between rows: only elements are touched, each output element once."""
    spec = SPECS[name]
    launch(spec, config, sizes_of(spec, m, n, k), pad=pad, offset=offset)


@per_kernel
@pytest.mark.parametrize("stride", [2**31 - 1, 2**31, 2**32])
def test_strides_beyond_32_bits(name: str, stride: int) -> None:
    """Rows far apart: the same results as with rows side by side, so no offset is computed in 32 bits."""
    spec = SPECS[name]
    dtypes = {axis: names[0] for axis, names in spec.dtypes.items()}
    near, far = (allocate(spec, sizes_of(spec, 130, 135, 260), dtypes) for _ in range(2))
    for t in spec.tensors:
        if not t.output:
            values = torch.randint(-8, 9, near[t.name].shape, generator=torch.Generator().manual_seed(1))
            near[t.name].copy_(values)
            far[t.name].copy_(values)
    run(spec, near, spec.default)
    run(spec, far, spec.default, strides={t.name: stride for t in spec.tensors})
    for t in spec.tensors:
        assert torch.equal(near[t.name].float(), far[t.name].float())


@pytest.mark.parametrize(
    ("name", "huge"), [(n, h) for n, s in SPECS.items() for h in (*s.symbols, "all") if (n[:4], h) != ("gemm", "K")]
)
def test_sizes_up_to_the_largest(name: str, huge: str) -> None:
    """First, middle and last programs of the largest launches, with every mixture of least and most tiles.

    They are in bounds, and no 32-bit integer overflows.  (K of a GEMM is a loop, too long to run.)
    """
    spec = SPECS[name]
    sizes = dict.fromkeys(spec.symbols, 3) | {huge: MAX_SIZE}
    if huge == "all":
        sizes = dict.fromkeys(spec.symbols, 2**18 - 1) | ({"K": 130} if name.startswith("gemm") else {})
    tensors, strides = {}, {}
    for t in spec.tensors:
        dtype = {"fp8": torch.float8_e4m3fn, "fp32": torch.float32}.get(t.dtype, torch.bfloat16)
        shape = tuple(d.extent(sizes) for d in t.shape)
        # One element in memory stands for all: only addresses matter.
        tensors[t.name] = torch.zeros(1, 1, dtype=dtype).expand(shape)
        strides[t.name] = shape[t.unit_dim] + 1
    for values in itertools.product(*((t.least, t.most) for t in spec.tiles)):
        config = Config({t.name: value for t, value in zip(spec.tiles, values, strict=True)})
        (programs,) = spec.grid_size(sizes, config)
        assert programs < 2**31
        chosen = {0, 1, programs // 2, programs // 2 + 1, programs - 2, programs - 1} - {-1}
        run(spec, tensors, config, strides=strides, programs=sorted(chosen))


def test_every_access_has_a_mask() -> None:
    """And there is no other way to memory in a kernel."""
    other_ways = ("atomic", "descriptor", "block_ptr", "inline_asm", "extern", "gather", "scatter")
    found = 0
    for path in KERNEL_FILES:
        tree = ast.parse(path.read_text())
        for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
            for call in accesses(function):
                where = f"{path.name}:{call.lineno}"
                assert isinstance(call.func, ast.Attribute)
                assert ast.unparse(call.func.value) == "tl", f"{where}: {ast.unparse(call)}"
                mask = {k.arg: k.value for k in call.keywords}.get("mask")
                assert mask is not None and ast.unparse(mask) != "None", f"{where}: {ast.unparse(call)}"
                found += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert not any(way in node.attr for way in other_ways), f"{path.name}:{node.lineno}"
    assert found


# --- The public bugs, each made by taking the mask out of our kernel ---


def assert_caught(
    module: ModuleType, function: str, access: str, name: str, sizes: dict[str, int], tensor: str, folder: Path
) -> None:
    """Without the mask of one access the kernel is stopped at ``tensor``, and with it it is not."""
    config = Config({t.name: min(t.most, 256) for t in SPECS[name].tiles})
    launch(SPECS[name], config, sizes)
    (mutation,) = (
        m
        for m in mutations(module)
        if m.function == function and m.access.startswith(access) and m.change == "without mask"
    )
    with pytest.raises(OutOfBounds, match=rf"(loads from|stores to) {tensor} at element"):
        launch(load_mutated(mutation.source, folder)[name], config, sizes)


@pytest.mark.parametrize("name", ["gemm_1x128_128x128", "gemm_1x128_128x1"])
@pytest.mark.parametrize("m", [2, 3, 4, 13, 26, 67])
def test_unmasked_a_scales_are_caught(name: str, m: int, tmp_path: Path) -> None:
    """pytorch/ao #4634: a_s is read up to BLOCK_M - 1 rows too far, by all its own test shapes."""
    sizes = {"M": m, "N": 128, "K": 128}
    assert_caught(gemm, f"{name}_kernel", "tl.load(a_s_ptr", name, sizes, "a_s", tmp_path)


@pytest.mark.parametrize("n", [128, 129, 384])
def test_unmasked_b_scales_are_caught(n: int, tmp_path: Path) -> None:
    """pytorch/ao #4634: b_s of 128x1 groups is read too far wherever BLOCK_N does not divide N."""
    sizes = {"M": 256, "N": n, "K": 128}
    name = "gemm_1x128_128x1"
    assert_caught(gemm, f"{name}_kernel", "tl.load(b_s_ptr", name, sizes, "b_s", tmp_path)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 13])
def test_unmasked_row_scales_are_caught(m: int, tmp_path: Path) -> None:
    """pytorch/ao #4036: scales of rows >= M land in the next column."""
    sizes = {"M": m, "K": 512}
    assert_caught(quant, "quant_1x128", "tl.store(scale_ptr", "act_quant_lhs", sizes, "scale", tmp_path)


@pytest.mark.parametrize(
    ("rows", "cols", "row_tile", "col_tile"),
    [
        (128, 256, 128, 512),  # 1,024 bytes beyond a buffer of 1,024
        (128, 128, 128, 256),  # 512 beyond 512
        (384, 384, 512, 256),  # every column at a wrong place
    ],
)
def test_unmasked_mx_scales_are_caught(rows: int, cols: int, row_tile: int, col_tile: int) -> None:
    """pytorch/ao #3357, #3362, #4627: E8M0 scales without a mask, the column stride from the tile."""
    sizes = {"R": rows, "C": cols}
    tiles = {"ROW_TILE": row_tile, "COL_TILE": col_tile}
    with pytest.raises(OutOfBounds, match="stores to scale at element"):
        launch(fault_kernels.mx_scales, Config(tiles | {"MASKED": 0}), sizes)
    launch(fault_kernels.mx_scales, Config(tiles | {"MASKED": 1}), sizes)


def test_unmasked_mx_scales_are_right_where_tiles_divide() -> None:
    """So the recreated bug is that of the public kernel, which works for such shapes."""
    tiles = {"ROW_TILE": 128, "COL_TILE": 256, "MASKED": 0}
    launch(fault_kernels.mx_scales, Config(tiles), {"R": 256, "C": 512})


# --- Every mask ---


ALL_MUTATIONS = [(module, mutation) for module in MODULES for mutation in mutations(module)]


def stopped(spec: KernelSpec) -> OutOfBounds | None:
    """The error of the first launch that is stopped, over all tails and tiles, if there is one."""
    for sizes in TAILS:
        for config in reversed(matrix_configs(spec.name)):
            try:
                launch(spec, config, sizes_of(spec, *sizes))
            except OutOfBounds as error:
                return error
    return None


@pytest.mark.parametrize(("module", "mutation"), [pytest.param(*m, id=str(m[1])) for m in ALL_MUTATIONS])
def test_every_mask_is_needed_and_its_absence_found(module: ModuleType, mutation: Mutation, tmp_path: Path) -> None:
    """Without it, or without half of it, each kernel with this access is stopped in some launch.

    Or in none, where a listed reason says so.  A kernel has an access if it stops once that goes astray.
    """
    changed, astray = (load_mutated(text, tmp_path) for text in (mutation.source, mutation.astray))
    needed = (mutation.function, mutation.access) not in IN_BOUNDS_BY_CONSTRUCTION
    have = [spec.name for spec in users(module, mutation.function) if stopped(astray[spec.name])]
    assert have, "no kernel makes this access"
    for name in have:
        error = stopped(changed[name])
        assert (error is not None) == needed, f"{name}: {error or 'no launch was stopped'}"


def test_listed_accesses_exist() -> None:
    """The list of exceptions has no stale entries."""
    assert IN_BOUNDS_BY_CONSTRUCTION.keys() <= {(m.function, m.access) for _, m in ALL_MUTATIONS}


# --- The checker itself ---

FAULTS = {
    "none": None,
    "gap": (OutOfBounds, r"loads from x at element 5 \(row 0, column 5\).*2 of 7 lanes"),
    "before": (OutOfBounds, r"stores to y at element -1 "),
    "after": (OutOfBounds, r"program \(2, 0, 0\): stores to y at element 21 \(row 3, column 0\)"),
    "misaligned": (OutOfBounds, r"loads from x at element 0\.25 "),
    "narrow": (OutOfBounds, r"loads from x \(fp32\) as int8"),
    "read output": (OutOfBounds, "loads from y, an output"),
    "write input": (OutOfBounds, "stores to x, an input"),
    "twice": (WrongCoverage, r"y \(row 0, column 0 of \(3, 5\)\) was written 2 times"),
    "never": (WrongCoverage, r"y \(row 0, column 4 of \(3, 5\)\) was written 0 times"),
    "far": (OutOfBounds, "far from every tensor"),
    "atomic": (Unchecked, "not checked"),
    "no other": None,
}


@pytest.mark.parametrize(("number", "fault"), list(enumerate(FAULTS)))
def test_the_checker_names_each_fault(number: int, fault: str) -> None:
    """A copy of 3 rows of 5, two elements apart, that goes wrong in one way at a time."""
    spec = fault_kernels.copy
    tensors = allocate(spec, {"R": 3, "C": 5}, pad=2)
    tensors["x"].copy_(torch.arange(15.0).reshape(3, 5))
    config = Config({"FAULT": number})
    expected = FAULTS[fault]
    if expected is None:
        run(spec, tensors, config)
        wanted = tensors["x"].numpy().copy()
        if fault == "no other":  # the lane that the mask excludes reads anything but a fair zero
            wanted[:, 4] = np.nan
        np.testing.assert_array_equal(tensors["y"].numpy(), wanted)
    else:
        error, message = expected
        with pytest.raises(error, match=message):
            run(spec, tensors, config)


def test_no_launch_of_an_empty_grid() -> None:
    """A fault in the kernel does not matter where there is no program."""
    tensors = allocate(fault_kernels.copy, {"R": 0, "C": 5})
    run(fault_kernels.copy, tensors, Config({"FAULT": list(FAULTS).index("atomic")}))


def test_shapes_that_disagree_are_refused() -> None:
    tensors = allocate(fault_kernels.copy, {"R": 3, "C": 5})
    tensors["x"] = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=r"x: shape \(4, 5\), expected \(3, 5\)"):
        run(fault_kernels.copy, tensors, Config({"FAULT": 0}))


def test_the_fault_kernels_are_not_shipped() -> None:
    assert not {s.name for s in vars(fault_kernels).values() if isinstance(s, KernelSpec)} & SPECS.keys()
    assert Path(fault_kernels.__file__ or "") not in KERNEL_FILES
