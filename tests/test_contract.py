"""The public contract: its agreement with the kernels' specs, and its checks."""

import itertools
import re
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8_aot.kernels import SPECS
from fp8_aot.kernels import spec as kernel_spec
from fp8_aot.loader.contract import MAX_SIZE, OPS, check_layout, check_shape, output_layout, solve

ops = st.sampled_from(list(OPS.values()))
size = st.one_of(st.integers(0, 600), st.integers(0, MAX_SIZE), st.just(MAX_SIZE))


def sizes_of(op):
    return st.fixed_dictionaries(dict.fromkeys(op.symbols, size))


def shapes_of(op, sizes):
    """Input shapes by the definition, in exact rational arithmetic rather than the contract's own."""
    return {t.name: tuple((sizes[d.symbol] + d.group - 1) // d.group for d in t.shape) for t in op.inputs}


# --- the contract and the kernels


def test_contract_and_kernels_have_the_same_operations():
    assert list(OPS) == list(SPECS)
    assert all(name == op.name for name, op in OPS.items())


@pytest.mark.parametrize("name", OPS)
def test_contract_equals_kernel_spec(name):
    op, spec = OPS[name], SPECS[name]
    role = {"high": "in"}

    def describe(tensor, output):
        dims = tuple((d.symbol, d.group) for d in tensor.shape)
        return tensor.name, role.get(tensor.dtype, tensor.dtype), dims, tensor.unit_dim, output

    ours = [describe(t, False) for t in op.inputs] + [describe(t, True) for t in op.outputs]
    assert ours == [describe(t, t.output) for t in spec.tensors]
    assert op.symbols == spec.symbols


def test_limits_equal_the_kernels():
    assert MAX_SIZE == kernel_spec.MAX_SIZE
    axes = {axis: dtypes for spec in SPECS.values() for axis, dtypes in spec.dtypes.items()}
    assert axes == {"in": ("bf16", "fp16", "fp32"), "out": ("bf16", "fp16", "fp32")}


@pytest.mark.parametrize("name", OPS)
def test_first_use_of_a_symbol_is_ungrouped(name):
    seen = set()
    for dim in itertools.chain.from_iterable(t.shape for t in OPS[name].inputs):
        assert dim.group == 1 or dim.symbol in seen
        seen.add(dim.symbol)
    assert seen == set(OPS[name].symbols)


def test_import_needs_neither_torch_nor_triton():
    code = (
        "import sys, fp8_aot.loader.contract as c\n"
        "bad = {m.split('.')[0] for m in sys.modules} & {'torch', 'triton', 'numpy'}\n"
        "bad |= {m for m in sys.modules if m.startswith(('fp8_aot.kernels', 'fp8_aot.aot'))}\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- solve


@given(st.data())
def test_solve_recovers_sizes(data):
    op = data.draw(ops)
    sizes = data.draw(sizes_of(op))
    assert solve(op, shapes_of(op, sizes)) == sizes


@given(st.data())
def test_solve_rejects_a_wrong_extent_that_is_determined(data):
    op = data.draw(ops.filter(lambda op: len(op.inputs) > 1))
    sizes = data.draw(sizes_of(op))
    shapes = shapes_of(op, sizes)
    # The first dimension of b and both of a_s and b_s follow from dimensions before them.
    name, dim = data.draw(st.sampled_from([("b", 0), *itertools.product(("a_s", "b_s"), (0, 1))]))
    right = shapes[name]
    near = st.integers(right[dim] - 2, right[dim] + 2)
    wrong = data.draw(near | st.integers(-2, 700))
    assume(wrong != right[dim])
    shapes[name] = tuple(wrong if d == dim else extent for d, extent in enumerate(right))
    with pytest.raises(ValueError) as error:
        solve(op, shapes)
    start = f"{op.name}: argument {name} has shape {shapes[name]}, expected {right}: "
    assert str(error.value).startswith(start)


GEMM = OPS["gemm_1x128_128x128"]
GEMM_SHAPES = {"a": (4, 200), "b": (200, 300), "a_s": (4, 2), "b_s": (2, 3)}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("a_s", (4, 3), "has shape (4, 3), expected (4, 2): one scale per row and 128 columns of a"),
        ("a_s", (4, 1), "has shape (4, 1), expected (4, 2): one scale per row and 128 columns of a"),
        ("a_s", (4,), "has shape (4,), expected (4, 2): one scale per row and 128 columns of a"),
        ("b", (201, 300), "has shape (201, 300), expected (200, 300): as many rows as a has columns"),
        ("b", (), "has shape (), expected (200, N): as many rows as a has columns"),
        ("a", (2, 4, 200), "has shape (2, 4, 200), expected (M, K): a matrix"),
        ("b_s", (3, 2), "has shape (3, 2), expected (2, 3): one scale per 128 rows and 128 columns of b"),
        ("a", (MAX_SIZE + 1, 200), f"has shape ({MAX_SIZE + 1}, 200), expected M between 0 and {MAX_SIZE}"),
        ("b", (200, -1), f"has shape (200, -1), expected N between 0 and {MAX_SIZE}"),
    ],
)  # fmt: skip
def test_solve_messages(name, shape, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'gemm_1x128_128x128: argument {name} {message}')}$"):
        solve(GEMM, GEMM_SHAPES | {name: shape})


@pytest.mark.parametrize(
    "shapes",
    [
        {k: v for k, v in GEMM_SHAPES.items() if k != "b_s"},
        GEMM_SHAPES | {"c": (4, 300)},
        {k if k != "a_s" else "scale": v for k, v in GEMM_SHAPES.items()},
    ],
)
def test_solve_rejects_other_arguments(shapes):
    with pytest.raises(ValueError, match=r"expected shapes of \['a', 'b', 'a_s', 'b_s'\]"):
        solve(GEMM, shapes)


def test_solve_wgrad_scale_is_per_column():
    op = OPS["gemm_1x128_128x1"]
    assert solve(op, GEMM_SHAPES | {"b_s": (2, 300)}) == {"M": 4, "K": 200, "N": 300}
    with pytest.raises(ValueError, match=r"b_s has shape \(2, 3\), expected \(2, 300\): one scale per 128 rows"):
        solve(op, GEMM_SHAPES)


def test_check_shape_of_outputs():
    op = OPS["act_quant_transposed_lhs"]
    check_shape(op, "scale", (200, 2), {"M": 130, "K": 200})
    with pytest.raises(ValueError, match=r"y has shape \(130, 200\), expected \(200, 130\): the shape of x transp"):
        check_shape(op, "y", (130, 200), {"M": 130, "K": 200})
    with pytest.raises(KeyError, match="has no tensor w"):
        check_shape(op, "w", (130, 200), {"M": 130, "K": 200})


# --- layouts


def addresses(shape, strides):
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))]


@pytest.mark.parametrize("name", OPS)
def test_check_layout_accepts_exactly_what_a_kernel_addresses(name):
    """Accepted: the elements lie where ``unit + free * stride`` puts them, outputs apart.

    All shapes up to 3x3 and all strides from -1 to 4.
    """
    op = OPS[name]
    for tensor, output in [(t, False) for t in op.inputs] + [(t, True) for t in op.outputs]:
        for shape in itertools.product(range(4), repeat=2):
            for strides in itertools.product(range(-1, 5), repeat=2):
                accepted = accepts(op, tensor.name, shape, strides)
                assert accepted == addressable(tensor.unit_dim, output, shape, strides), (shape, strides)


def accepts(op, name, shape, strides):
    try:
        check_layout(op, name, shape, strides)
    except ValueError as error:
        assert str(error).startswith(f"{op.name}: argument {name} must have ")
        return False
    return True


def addressable(unit, output, shape, strides):
    """Whether a kernel that knows only the free stride finds every element, by listing addresses."""
    stride = strides[1 - unit]
    there = addresses(shape, strides)
    if there != addresses(shape, (stride, 1) if unit else (1, stride)) or min(there, default=0) < 0:
        return False
    # Lines of an output must be apart as such: interleaved ones need not collide, yet are refused.
    lines_apart = shape[1 - unit] < 2 or stride >= shape[unit] or not there
    assert not (output and lines_apart) or len(set(there)) == len(there)
    return lines_apart or not output


@pytest.mark.parametrize(
    ("op", "name", "shape", "strides", "message"),
    [
        ("act_quant_lhs", "x", (128, 256), (1, 128),
         "argument x must have last stride 1 (row-major), got strides (1, 128): "
         "a transposed view? call .contiguous()"),
        ("gemm_1x128_128x128", "b", (256, 128), (128, 1),
         "argument b must have first stride 1 (column-major), got strides (128, 1): "
         "a row-major tensor? call .t().contiguous().t()"),
        ("act_quant_lhs", "y", (128, 256), (255, 1),
         "argument y must have first stride at least 256, got strides (255, 1): its rows overlap"),
        ("act_quant_lhs", "scale", (128, 2), (1, 0),
         "argument scale must have last stride at least 128, got strides (1, 0): its columns overlap"),
        ("act_quant_lhs", "x", (128, 256), (-256, 1),
         "argument x must have first stride at least 0, got strides (-256, 1): "
         "a negative stride is not supported"),
        ("act_quant_lhs", "x", (128, 256), (1,),
         "argument x has shape (128, 256) and strides (1,), expected 2 dimensions"),
    ],
)  # fmt: skip
def test_check_layout_messages(op, name, shape, strides, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{op}: {message}')}$"):
        check_layout(OPS[op], name, shape, strides)


@given(st.data())
def test_output_layout_passes_the_checks(data):
    op = data.draw(ops)
    sizes = data.draw(sizes_of(op))
    layouts = output_layout(op, sizes)
    assert list(layouts) == [t.name for t in op.outputs]
    for name, (shape, strides) in layouts.items():
        check_shape(op, name, shape, sizes)
        check_layout(op, name, shape, strides)
        extent = max(shape[op.tensor(name).unit_dim], 1)
        assert sorted(strides) == [1, extent]


@pytest.mark.parametrize(
    ("name", "sizes", "layout"),
    [
        ("act_quant_lhs", {"M": 3, "K": 200}, {"y": ((3, 200), (200, 1)), "scale": ((3, 2), (1, 3))}),
        ("act_quant_transposed_lhs", {"M": 3, "K": 200},
         {"y": ((200, 3), (3, 1)), "scale": ((200, 1), (1, 200))}),
        ("act_quant_rhs", {"M": 130, "K": 20}, {"y": ((130, 20), (1, 130)), "scale": ((2, 20), (20, 1))}),
        ("weight_quant_rhs", {"N": 130, "K": 300}, {"y": ((130, 300), (1, 130)), "scale": ((2, 3), (1, 2))}),
        ("weight_quant_transposed_rhs", {"N": 130, "K": 300},
         {"y": ((300, 130), (1, 300)), "scale": ((3, 2), (1, 3))}),
        ("gemm_1x128_128x128", {"M": 3, "N": 5, "K": 7}, {"c": ((3, 5), (5, 1))}),
        ("gemm_1x128_128x1", {"M": 3, "N": 0, "K": 7}, {"c": ((3, 0), (1, 1))}),
    ],
)  # fmt: skip
def test_output_layout_is_the_documented_one(name, sizes, layout):
    assert output_layout(OPS[name], sizes) == layout
