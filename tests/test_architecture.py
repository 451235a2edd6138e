"""The arrows between the packages, held by looking at every import statement, lazy ones included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_MODULES = {"__init__", "ops", "reference", "torch_call", "torch_check", "torch_ops"}


def imports(path, package):
    """Absolute names of the modules that a file imports, and the line of each."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from fp8_aot import loader` imports a module; `from x.y import name` may.
                yield f"{module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("importlib.import_module", "import_module", "__import__") and isinstance(
                node.args[0], ast.Constant
            ):
                yield str(node.args[0].value), node.lineno


def files(package):
    found = [path for path in sorted((ROOT / package).rglob("*.py")) if "__pycache__" not in path.parts]
    assert found
    return found


def dotted(path):
    return ".".join(("fp8_aot", *path.relative_to(ROOT).parent.parts))


def within(name, *modules):
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def breaches(package, wrong):
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(package)
        for name, line in imports(path, dotted(path))
        if wrong(name, path)
    ]


def test_the_builder_reads_kernels_and_the_schema_only():
    allowed = ("fp8_aot.aot", "fp8_aot.kernels", "fp8_aot.loader.schema", "fp8_aot.loader.errors")

    def wrong(name, path):
        return within(name, "fp8_aot", "kernels", "loader", "aot") and not within(name, *allowed)

    assert breaches("aot", wrong) == []
    assert breaches("aot", lambda name, path: within(name, "torch")) == []


def test_kernels_import_nothing_of_ours_and_no_torch():
    def wrong(name, path):
        return within(name, "torch", "kernels", "loader", "aot") or (
            within(name, "fp8_aot") and not within(name, "fp8_aot.kernels")
        )

    assert breaches("kernels", wrong) == []


def test_the_loader_needs_neither_builder_nor_kernels_nor_triton():
    def wrong(name, path):
        if within(name, "fp8_aot.kernels", "triton"):
            return path != ROOT / "loader" / "jit.py"
        return within(name, "aot", "kernels", "loader") or (
            within(name, "fp8_aot") and not within(name, "fp8_aot.loader")
        )

    assert breaches("loader", wrong) == []


def test_jit_imports_triton_and_kernels_in_functions_only():
    for node in ast.parse((ROOT / "loader" / "jit.py").read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if within(name, "triton", "fp8_aot.kernels", "torch")]


def test_torch_is_in_its_modules_only():
    def wrong(name, path):
        return within(name, "torch") and (path.parent != ROOT / "loader" or path.stem not in TORCH_MODULES)

    assert breaches("loader", wrong) == []
    # In __init__ only within functions.
    for node in ast.parse((ROOT / "loader" / "__init__.py").read_text()).body:
        assert not (isinstance(node, ast.Import) and any(within(alias.name, "torch") for alias in node.names))


def test_the_schema_stands_alone():
    """The builder imports it without the rest of the loader's code."""

    def wrong(name, path):
        return within(name, "fp8_aot") and not within(name, "fp8_aot.loader.schema", "fp8_aot.loader.errors")

    assert breaches("loader/schema", wrong) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a.b as c, d", ["a.b", "d"]),
        ("def f():\n    from ..loader import jit", ["fp8_aot.loader.jit"]),
        ("from . import x", ["fp8_aot.aot.x"]),
        ("from .schema.y import x", ["fp8_aot.aot.schema.y.x"]),
        ("if 0:\n    import_module('torch.fx')", ["torch.fx"]),
    ],
)
def test_every_form_of_import_is_seen(tmp_path, text, names):
    path = tmp_path / "m.py"
    path.write_text(text)
    assert [name for name, _ in imports(path, "fp8_aot.aot")] == names
