"""What is compiled again, and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from building import build_json, objects, pythonpath, tree
from conftest import compiling_environment


def test_damaged_cache_entries_are_compiled_again(good: dict[str, Any], tmp_path: Path) -> None:
    entries = sorted(path for path in good["cache"].rglob("*") if path.is_file())
    assert len(entries) == 2
    whole = [path.read_bytes() for path in entries]
    before = tree(good["out"])
    for damage in (
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: bytes(32) + data[32:],
    ):
        for path, data in zip(entries, whole, strict=True):
            path.write_bytes(damage(data))
        report = build_json(good["matrix"], good["out"], good["cache"], env=good["env"])
        assert (report["compiled"], report["cached"]) == (2, 0)
        assert tree(good["out"]) == before
        assert [path.read_bytes() for path in entries] == whole
    assert sorted(path for path in good["cache"].rglob("*") if path.is_file()) == entries


def test_what_makes_a_cell_be_compiled_again(good: dict[str, Any], tmp_path: Path) -> None:
    file = good["site"] / "their" / "good.py"
    text, first = file.read_text(), objects(good["out"] / "sm90.zip")

    def rebuild(new: str) -> int:
        file.write_text(new)
        compiled: int = build_json(good["matrix"], good["out"], good["cache"], env=good["env"])["compiled"]
        return compiled

    commented = text.replace("    row = ", '    "new"\n\n    # A comment.\n    row = ').replace("import os\n", "\n" * 9)
    assert rebuild(commented.replace('    "new"\n', "")) == 0
    # And rightly so: the binary does not hold line numbers.
    file.write_text(commented.replace('    "new"\n', ""))
    build_json(good["matrix"], tmp_path / "new", None, env=good["env"])
    assert objects(tmp_path / "new" / "sm90.zip") == first
    assert rebuild(text.replace("c < cols)\n    tl.store", "c < cols - 1)\n    tl.store")) == 2
    assert rebuild(text) == 0


SOURCES = '''
import triton
import triton.language as tl
import {package}.helpers
import {package} as package
from {package}.helpers import inner as called

GROUP = tl.constexpr(128)
PLAIN: tl.constexpr = (1, 2)
UNUSED = 5


@triton.jit
def helper(x, N: tl.constexpr):
    """Adds."""
    return x + GROUP + N


def make(n):
    m = tl.constexpr(n)

    @triton.jit
    def made(x):
        return x * m

    return made


double, triple = make(2), make(3)


@triton.jit
def unused(x):
    return x


@triton.jit
def fn(x_ptr, n, B: tl.constexpr = 4):
    x = tl.load(x_ptr)
    x = helper(x, B) + called(x) + package.helpers.outer(x)
    tl.store(x_ptr, double(x) + triple(x) + PLAIN[0] + package.helpers.OFFSET)
'''

HELPERS = """
import triton
import triton.language as tl

GROUP = tl.constexpr(64)
OFFSET = tl.constexpr(7)


@triton.jit
def inner(x):
    return x + GROUP


@triton.jit
def deepest(x):
    return x - 1


@triton.jit
def outer(x):
    return deepest(x)
"""

SAME = [
    ("kernel", "    x = tl.load", "    # A comment.\n\n    x = tl.load"),
    ("kernel", "import triton\n", "import triton\n\n\n"),
    ("kernel", '"""Adds."""', '"""Adds, with other words."""'),
    ("kernel", '    """Adds."""\n', ""),
    ("kernel", "UNUSED = 5", "UNUSED = 6"),
    ("kernel", "def unused(x):\n    return x", "def unused(x):\n    return x + 1"),
    ("kernel", "x_ptr, n, B", "x_ptr,  n,\n    B"),
    ("helpers", "@triton.jit\ndef outer", "# More.\n@triton.jit\ndef outer"),
]
OTHER = [
    ("kernel", "tl.load(x_ptr)", "tl.load(x_ptr + 1)"),
    ("kernel", "GROUP = tl.constexpr(128)", "GROUP = tl.constexpr(64)"),
    ("kernel", "(1, 2)", "(3, 2)"),
    ("kernel", "x + GROUP + N", "x + GROUP - N"),
    ("kernel", "= 4)", "= 8)"),
    ("kernel", "make(2), make(3)", "make(2), make(4)"),
    ("kernel", "make(2), make(3)", "make(3), make(2)"),
    ("kernel", "x * m", "x + m"),
    ("kernel", "x_ptr, n,", "x_ptr, n: tl.int64,"),
    ("kernel", "@triton.jit\ndef helper", "@triton.jit(noinline=True)\ndef helper"),
    ("kernel", "import inner as called", "import deepest as called"),
    ("helpers", "GROUP = tl.constexpr(64)", "GROUP = tl.constexpr(128)"),
    ("helpers", "OFFSET = tl.constexpr(7)", "OFFSET = tl.constexpr(8)"),
    ("helpers", "x + GROUP", "x - GROUP"),
    ("helpers", "x - 1", "x - 2"),
]


def test_a_functions_key_is_all_that_its_code_depends_on(tmp_path: Path) -> None:
    changes = [None, *SAME, *OTHER]
    for i, change in enumerate(changes):
        texts = {"kernel": SOURCES.format(package=f"package{i}"), "helpers": HELPERS}
        if change is not None:
            where, old, new = change
            assert texts[where].count(old) == 1, change
            texts[where] = texts[where].replace(old, new)
        (tmp_path / f"package{i}").mkdir()
        for name, text in texts.items():
            (tmp_path / f"package{i}" / f"{name}.py").write_text(text)
    code = (
        "import importlib, sys\n"
        "from fp8_aot.aot.source import source_sha256\n"
        "for i in range(int(sys.argv[1])):\n"
        "    module = importlib.import_module(f'package{i}.kernel')\n"
        "    print(source_sha256(module.fn))\n"
    )
    env = {**compiling_environment(), **pythonpath(tmp_path)}
    command = [sys.executable, "-c", code, str(len(changes))]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    first, *digests = done.stdout.split()
    assert len(first) == 64
    for change, digest in zip(SAME, digests[: len(SAME)], strict=True):
        assert digest == first, change
    others = digests[len(SAME) :]
    for change, digest in zip(OTHER, others, strict=True):
        assert digest != first, change
    assert len(set(others)) == len(others)
