"""Which variant a launch takes, on real bundles, against the rules worked out again from their JSON."""

from __future__ import annotations

import pytest
from loader_kit import argument_values, expected_variant, kernel_of, manifest_of, views_of

from fp8_aot.loader import explain
from fp8_aot.loader.bundle import Bundle
from fp8_aot.loader.dispatch import choose, grid_of

pytest_plugins = "loader_fixtures"

TARGETS = ("sm90", "sm100", "gfx942")


@pytest.fixture(scope="module", params=TARGETS)
def pair(request, bundles):
    """A bundle as the loader reads it, and its manifest as plain JSON."""
    path = bundles / f"{request.param}.zip"
    return Bundle(path), manifest_of(path)


def chosen(pair, kernel, dtypes, sizes, **places):
    bundle, manifest = pair
    views = views_of(manifest, kernel, dtypes, sizes, **places)
    values = argument_values(manifest, kernel, sizes, views)
    choice = choose(bundle, kernel, dtypes, sizes, values)
    assert choice.variant is not None
    assert choice.variant.id == expected_variant(manifest, kernel, dtypes, sizes, values)["id"]
    assert [step.taken for step in choice.steps] == [False] * (len(choice.steps) - 1) + [True]
    return choice


def signatures(manifest):
    return [(entry["kernel"], entry["dtypes"], entry["rules"]) for entry in manifest["dispatch"]]


def corners(rules, symbols):
    """Sizes on, just below and just above every bound of the rules, multiples of 16 and not."""
    bounds = {b for rule in rules for c in rule["when"] for b in (c["least"], c["most"]) if b is not None}
    values = sorted({v for b in bounds for v in (b - 1, b, b + 1, b - 16, b + 16)} | {16, 1 << 16})
    for first in values:
        for rest in values:
            yield {symbol: first if symbol == symbols[0] else rest for symbol in symbols}


def test_every_variant_of_every_rule_is_reached(pair):
    bundle, manifest = pair
    reached = set()
    for kernel, dtypes, rules in signatures(manifest):
        symbols = list(dict.fromkeys(d["symbol"] for t in kernel_of(manifest, kernel)["tensors"] for d in t["shape"]))
        for sizes in corners(rules, symbols):
            for shift in ({}, {kernel_of(manifest, kernel)["tensors"][0]["name"]: 1}):
                reached.add(chosen(pair, kernel, dtypes, sizes, shift=shift).variant.id)
    named = {name for _, _, rules in signatures(manifest) for rule in rules for name in rule["variants"].values()}
    assert reached == named == set(bundle.variants)


def test_bounds_are_inclusive(pair):
    bundle, _ = pair
    taken = 0
    for entry in bundle.manifest.dispatch:
        for condition in entry.rules[0].when:
            sizes = dict.fromkeys(("M", "N", "K"), 16)
            inside = chosen(pair, entry.kernel, entry.dtypes, sizes | {condition.symbol: condition.most})
            outside = chosen(pair, entry.kernel, entry.dtypes, sizes | {condition.symbol: condition.most + 16})
            assert inside.variant.id in entry.rules[0].variants.values()
            assert outside.variant.id not in entry.rules[0].variants.values()
            assert f"{condition.symbol} is {condition.most + 16}" in outside.steps[0].reason
            taken += 1
    assert taken >= 15


def test_one_argument_off_takes_the_general_variant(pair):
    """The alignment proof: each assumption broken alone, by the least amount."""
    _, manifest = pair
    sizes = {"M": 4096, "N": 4096, "K": 4096}
    for kernel, dtypes, _ in signatures(manifest):
        fits = chosen(pair, kernel, dtypes, sizes)
        assert fits.variant.specialization == "aligned"
        assert len(fits.variant.divisible_by_16) >= 5
        for arg in kernel_of(manifest, kernel)["args"]:
            name = arg["name"]
            if arg["role"] == "size":
                off = sizes | {arg["symbol"]: 4097}
                # A larger size makes strides odd too: padding makes them even again.
                views = views_of(manifest, kernel, dtypes, off)
                pad = {t: -view.shape[0 if view.strides[0] == 1 else 1] % 16 for t, view in views.items()}
                choice = chosen(pair, kernel, dtypes, off, pad=pad)
            elif arg["role"] == "pointer":
                choice = chosen(pair, kernel, dtypes, sizes, shift={arg["tensor"]: 1})
            else:
                choice = chosen(pair, kernel, dtypes, sizes, pad={arg["tensor"]: 1})
            assumed = name in fits.variant.divisible_by_16
            assert (choice.variant.specialization == "general") == assumed, (kernel, name)
            if assumed:
                reasons = [step.reason for step in choice.steps if not step.taken]
                assert any(f" {name} = " in reason and reason.count("=") == 1 for reason in reasons), reasons


@pytest.mark.parametrize("shift", range(1, 17))
def test_every_misalignment_of_an_address(pair, shift):
    choice = chosen(pair, "act_quant_lhs", {"in": "bf16"}, {"M": 64, "K": 256}, shift={"x": shift})
    assert choice.variant.specialization == ("aligned" if shift == 16 else "general")


def test_unknown_signature_and_kernel(pair):
    bundle, manifest = pair
    target = manifest["target"]["name"]
    choice = choose(bundle, "gemm_1x128_128x1", {"out": "fp64"}, {"M": 1, "N": 1, "K": 1}, {})
    assert choice.variant is None
    assert choice.cell == f"gemm_1x128_128x1 (out=fp64) for {target}"
    assert choice.reason == "has gemm_1x128_128x1 for out=bf16; out=fp16; out=fp32 only"
    choice = choose(bundle, "softmax", {"in": "bf16"}, {"M": 1}, {})
    assert choice.variant is None
    assert choice.reason == "has no kernel softmax"
    assert str(choice.steps[0]) == f"{bundle.path}: passed over: has no kernel softmax"


def test_a_grid_beyond_the_hardware_is_refused(pair):
    bundle, _ = pair
    kernel = bundle.kernels["gemm_1x128_128x128"]
    variant = next(v for v in bundle.variants.values() if v.kernel == kernel.name and v.constexprs["BLOCK_M"] == 16)
    most = (2**31 - 1) * 16
    assert grid_of(kernel, variant, {"M": most, "N": 128, "K": 0}) == (2**31 - 1, 1, 1)
    with pytest.raises(ValueError, match=r"gemm_1x128_128x128: sizes M=\d+, N=128, K=0 need a grid of 2147483648 "):
        grid_of(kernel, variant, {"M": most + 1, "N": 128, "K": 0})
    assert grid_of(kernel, variant, {"M": 0, "N": 128, "K": 0}) == (0, 1, 1)


def test_explain_takes_operations_only(clean_loader):
    with pytest.raises(ValueError, match="op is 'softmax', expected one of act_quant_lhs, "):
        explain("softmax")
