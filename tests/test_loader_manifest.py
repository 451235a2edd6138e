"""Manifests that are wrong: always a typed error that says what, never another exception."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from fake_driver import FakeCuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loader_kit import manifest_of, views_of

from fp8_aot import loader
from fp8_aot.loader import config
from fp8_aot.loader.bundle import Bundle
from fp8_aot.loader.dispatch import argument_values, choose, grid_of
from fp8_aot.loader.launch import check_tensors
from fp8_aot.loader.plan import Plan
from fp8_aot.loader.runtime import runtime
from fp8_aot.loader.schema import SCHEMA, BundleError, Pointer, SchemaError, decode, encode, write

pytest_plugins = "loader_fixtures"


@pytest.fixture(scope="module")
def small(bundles):
    """A real manifest cut down to one kernel and one dtype signature."""
    manifest = manifest_of(bundles / "sm90.zip")
    manifest["kernels"] = [k for k in manifest["kernels"] if k["name"] == "act_quant_lhs"]
    for part in ("variants", "dispatch"):
        kept = [p for p in manifest[part] if p["kernel"] == "act_quant_lhs" and p["dtypes"] == {"in": "bf16"}]
        manifest[part] = kept
    assert len(manifest["variants"]) == 4
    return manifest


def decoded(manifest):
    return decode(json.dumps(manifest).encode(), "here")


def test_the_small_manifest_is_valid_and_canonical(small):
    again = encode(decoded(small))
    assert json.loads(again) == small
    assert encode(decode(again, "here")) == again
    assert again.endswith(b"}\n")


@pytest.mark.parametrize(
    ("schema", "advice"),
    [(SCHEMA + 1, "a newer fp8-aot that reads schema 2"), (0, "an older fp8-aot that reads schema 0")],
)
def test_another_schema_says_what_to_use(small, schema, advice):
    # What else another schema has is not looked at.
    text = json.dumps({"schema": schema, "anything": [1, {"else": None}]}).encode()
    with pytest.raises(SchemaError) as caught:
        decode(text, "here")
    assert str(caught.value) == (
        f"here: manifest schema {schema}, this fp8-aot reads schema {SCHEMA}: use {advice}, "
        "or rebuild the bundle with this one"
    )


def kernel(m):
    return m["kernels"][0]


def variant(m):
    return m["variants"][0]


def rule(m):
    return m["dispatch"][0]["rules"][0]


CASES = {
    "unknown field": (lambda m: m.update(extra=1), "unknown field `extra`"),
    "project": (lambda m: m.update(project="other"), "Invalid enum value 'other'"),
    "backend": (lambda m: m["target"].update(backend="metal"), "Invalid enum value 'metal'"),
    "negative": (lambda m: variant(m).update(shared=-1), "Expected `int` >= 0"),
    "huge": (lambda m: variant(m).update(shared=2**31), "Expected `int` <= 2147483647"),
    "float": (lambda m: variant(m).update(shared=1.5), "Expected `int`"),
    "bool": (lambda m: variant(m).update(shared=True), "Expected `int`, got `bool`"),
    "no threads": (lambda m: variant(m).update(threads=0), "Expected `int` >= 1"),
    "no blocks": (lambda m: variant(m).update(num_ctas=0), "Expected `int` >= 1"),
    "digest": (lambda m: variant(m).update(object="ABC"), "matching regex"),
    "missing": (lambda m: variant(m).pop("symbol"), "missing required field `symbol`"),
    "kernel twice": (lambda m: m["kernels"].append(kernel(m)), "duplicate kernel or variant"),
    "variant twice": (lambda m: m["variants"].append(variant(m)), "duplicate kernel or variant"),
    "dispatch twice": (lambda m: m["dispatch"].append(m["dispatch"][0]), "duplicate dispatch"),
    "tensor twice": (lambda m: kernel(m)["tensors"].append(kernel(m)["tensors"][0]), "duplicate tensor or argument"),
    "argument twice": (lambda m: kernel(m)["args"].append(kernel(m)["args"][0]), "duplicate tensor or argument"),
    "variant's kernel": (lambda m: variant(m).update(kernel="k"), "is of unknown kernel k"),
    "dispatch's kernel": (lambda m: m["dispatch"][0].update(kernel="k"), "dispatch for unknown kernel k"),
    "no rules": (lambda m: m["dispatch"][0].update(rules=[]), "no last rule that serves any launch"),
    "last rule with a condition": (
        lambda m: m["dispatch"][0]["rules"][-1].update(when=rule(m)["when"]),
        "no last rule that serves any launch",
    ),
    "last rule aligned": (
        lambda m: m["dispatch"][0]["rules"][-1]["variants"].pop("general"),
        "no last rule that serves any launch",
    ),
    "rule without variants": (lambda m: rule(m).update(variants={}), "a rule without a variant"),
    "rule's variant": (lambda m: rule(m)["variants"].update(aligned="v"), "names v, which is no variant of it"),
    "rule's variant is of another kind": (
        lambda m: rule(m)["variants"].update(aligned=rule(m)["variants"]["general"]),
        "takes .*general for aligned",
    ),
    "rule's size": (lambda m: rule(m)["when"][0].update(symbol="Z"), "asks for unknown size Z"),
    "argument's size": (lambda m: kernel(m)["args"][3].update(symbol="Z"), "argument rows names unknown size Z"),
    "argument's tensor": (lambda m: kernel(m)["args"][0].update(tensor="z"), "argument x_ptr names unknown tensor z"),
    "no grid": (lambda m: kernel(m).update(grid=[]), "a grid has one to three dimensions"),
    "four grid dimensions": (lambda m: kernel(m).update(grid=[[], [], [], []]), "a grid has one to three dimensions"),
    "grid's size": (lambda m: kernel(m)["grid"][0][0].update(symbol="Z"), "grid factor Z/BLOCK_R names nothing"),
    "grid's tile": (lambda m: kernel(m)["grid"][0][0].update(tile="T"), "grid factor M/T names nothing"),
    "grid's tile 0": (lambda m: kernel(m)["grid"][0][0].update(tile=0), "Expected `int` >= 1"),
    "size that no tensor gives": (
        lambda m: [d.update(group=2) for t in kernel(m)["tensors"] for d in t["shape"] if d["symbol"] == "M"],
        "no tensor gives the value of M",
    ),
    "no pointers": (
        lambda m: kernel(m).update(args=[a for a in kernel(m)["args"] if a["role"] != "pointer"]),
        "no argument is a pointer",
    ),
    "too few parameters": (lambda m: variant(m)["params"].pop(), "9 parameters for 8 arguments and 2 scratch"),
    "parameter's size": (lambda m: variant(m)["params"][0].update(size=4), "x_ptr has a parameter of 4 bytes"),
    "scratch's size": (lambda m: variant(m)["params"][-1].update(size=4), "a scratch pointer is not of 8 bytes"),
    "overlap": (lambda m: variant(m)["params"][4].update(offset=26), "the parameter at 26 overlaps"),
    "far away": (lambda m: variant(m)["params"][-1].update(offset=2**31 - 1), "expected at most 32764"),
    "pointers apart": (
        lambda m: [p.update(offset=p["offset"] + 8) for p in variant(m)["params"][1:]],
        "pointer arguments are not next to each other",
    ),
    "assumption": (lambda m: variant(m)["divisible_by_16"].append("z"), "assumes something of an unknown argument"),
    "a general variant that assumes": (
        lambda m: [v.update(divisible_by_16=["x_ptr"]) for v in m["variants"] if v["specialization"] == "general"],
        "is general, and assumes something of x_ptr",
    ),
    "tile": (lambda m: variant(m)["constexprs"].pop("BLOCK_R"), "tile constexpr BLOCK_R is None"),
    "tile 0": (lambda m: variant(m)["constexprs"].update(BLOCK_R=0), "tile constexpr BLOCK_R is 0"),
    "half a tile": (lambda m: variant(m)["constexprs"].update(BLOCK_R=0.5), "tile constexpr BLOCK_R is 0.5"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said(small, name):
    manifest = copy.deepcopy(small)
    change, says = CASES[name]
    change(manifest)
    with pytest.raises(BundleError, match=f"^here: manifest.json.*{says}"):
        decoded(manifest)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"schema": "1"}',
        b'{"schema": 1.5}',
        b'{"schema": NaN}',
        b'{"schema": 1',
        b'{"schema": 1} x',
        b'\xff\xfe{"schema": 1}',
        b'{"schema": 1, "\xff": 0}',
        b'{"schema": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"schema": 1, "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"schema": 1' + b"0" * 5000 + b"}",
        b'{"schema": -1e999}',
    ],
)
def test_what_is_no_manifest(text):
    with pytest.raises(BundleError, match=r"^here: manifest\.json"):
        decode(text, "here")


NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1",
    "0",
    "1",
    "1.5",
    "-0.0",
    "1e400",
    "0x10",
    str(2**31),
    str(2**63),
    "9" * 400,
]
OTHERS = ["null", "true", "[]", "{}", "[[[]]]", '{"symbol": "M"}', '["a", "b"]', "", "'x'"]
TEXTS = ['""', '"M"', r'"\ud800"', r'"\u0000"', '"' + "x" * 300 + '"']
ODD = st.sampled_from([*NUMBERS, *OTHERS, *TEXTS])


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_replaced_by_any_other(small, clean_loader, data):
    """A mutated manifest is refused with a typed error, or is one that a launch gets along with."""
    text = json.dumps(small)
    values = list(re.finditer(r'(?<=[:\[,] )(?:"[^"]*"(?!:)|-?[\d.]+|null|true|false)|\[\]|\{\}', text))
    for _ in range(data.draw(st.integers(1, 2))):
        found = data.draw(st.sampled_from(values))
        text = text[: found.start()] + data.draw(ODD) + text[found.end() :]
        values = [v for v in values if v.end() < found.start()] or values[:1]
    attempt(text.encode())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_field_removed_or_doubled(small, clean_loader, data):
    manifest = copy.deepcopy(small)
    node = manifest
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and data.draw(st.booleans()):
            node = node[key]
            continue
        change = data.draw(st.sampled_from(["remove", "double", "swap"]))
        if change == "remove":
            del node[key]
        elif change == "swap":
            node[key], node[keys[0]] = node[keys[0]], node[key]
        elif isinstance(node, list):
            node.append(node[key])
        else:
            node[f"{key}2"] = node[key]
        break
    attempt(json.dumps(manifest).encode())


def attempt(text):
    """Decode a manifest; if it is valid, whatever a launch does with it works, or fails with one of our errors."""
    try:
        manifest = decode(text, "here")
    except BundleError:
        return
    assert encode(decode(encode(manifest), "here")) == encode(manifest)
    driver = FakeCuda().driver()
    function = driver.load(0, b"image", "kernel", 0)
    path = Path("mutated.zip")
    path.write_bytes(write(text, {}))
    bundle = Bundle(path)
    for entry in manifest.dispatch:
        kernel = bundle.kernels[entry.kernel]
        sizes = {d.symbol: 48 for t in kernel.tensors for d in t.shape}
        try:
            views = views_of(json.loads(text), kernel.name, entry.dtypes, sizes)
            assert check_tensors(kernel, views) == sizes
        except (TypeError, ValueError):
            continue
        values = argument_values(kernel, views, sizes)
        choice = choose(bundle, kernel.name, entry.dtypes, sizes, values)
        try:
            grid = grid_of(kernel, choice.variant, sizes)
        except ValueError:
            continue
        plan = Plan(driver, function, kernel, choice.variant, values, grid, lambda: None)
        with driver.on_device(0):
            plan.launch(tuple(values[a.name] for a in kernel.args if isinstance(a, Pointer)), 0)


def test_duplicate_keys_take_the_last(small):
    # As in every JSON reader; what counts is that no other check is skipped.
    text = json.dumps(small)
    assert decode(b'{"schema": 9, ' + text[1:].encode(), "here").schema == SCHEMA
    with pytest.raises(SchemaError):
        decode(text[:-1].encode() + b', "schema": 9}', "here")


def test_a_reference_to_an_object_that_is_not_there(small, on, tmp_path):
    fake = on("sm90")
    path = tmp_path / "b.zip"
    path.write_bytes(write(encode(decoded(small)), {}))
    config.update(None, path)
    runtime.unload()
    views = views_of(small, "act_quant_lhs", {"in": "bf16"}, {"M": 2, "K": 3})
    with pytest.raises(loader.IntegrityError, match=r"b.zip: objects/.* is missing: build or fetch the bundle again"):
        loader.launch("act_quant_lhs", views)
    assert fake.loads == []
