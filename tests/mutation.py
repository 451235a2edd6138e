"""Kernels with one mask taken out, to show that the tests would see it.

A kernel module is mutated as text and imported from a file of its own, beside the true one.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fp8_aot.kernels.spec import KernelSpec


@dataclass(frozen=True)
class Mutation:
    """A change of a module's source: of which access, in which function, and the text that results.

    ``astray`` is the text in which that access goes far away instead, whatever its mask.
    """

    function: str
    access: str
    change: str
    source: str
    astray: str

    def __str__(self) -> str:
        return f"{self.function}: {self.access} {self.change}"


def load_mutated(source: str, folder: Path) -> dict[str, KernelSpec]:
    """The specs, by name, of a kernel module with text ``source``, which is kept in ``folder``."""
    path = folder / f"mutated_{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    module_spec = importlib.util.spec_from_file_location(f"{folder.name}_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return {s.name: s for s in vars(module).values() if isinstance(s, KernelSpec)}


def replaced(module: ModuleType, old: str, new: str, function: str) -> str:
    """A module's source with the one occurrence of ``old`` in a function replaced."""
    source = inspect.getsource(module)
    body = ast.get_source_segment(source, _functions(ast.parse(source))[function])
    assert body is not None and body.count(old) == 1, f"{function} has not exactly one {old!r}"
    return source.replace(body, body.replace(old, new))


def accesses(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Every call of something called load or store in a function."""
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in ("load", "store"):
            yield node


def mutations(module: ModuleType) -> Iterator[Mutation]:
    """For every ``tl.load`` and ``tl.store``: its mask removed, and each operand of an ``&`` in it removed."""
    source = inspect.getsource(module)
    for function in _functions(ast.parse(source)).values():
        for call in accesses(function):
            keywords = {k.arg: k.value for k in call.keywords}
            mask = keywords["mask"]
            pointer = ast.unparse(call.args[0])
            access = f"{ast.unparse(call.func)}({pointer})"
            astray = _substitute(source, [(call.args[0], f"({pointer}) + (1 << 50)")])
            nothing = [(keywords[name], "None") for name in ("mask", "other") if name in keywords]
            changes = [("without mask", nothing)]
            value = _assigned(function, mask.id) if isinstance(mask, ast.Name) else mask
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitAnd):
                for kept, dropped in ((value.left, value.right), (value.right, value.left)):
                    changes.append((f"without {ast.unparse(dropped)}", [(mask, ast.unparse(kept))]))
            for change, edits in changes:
                yield Mutation(function.name, access, change, _substitute(source, edits), astray)


def users(module: ModuleType, function: str) -> list[KernelSpec]:
    """The specs of a module whose kernel is, or calls, a function."""
    functions = _functions(ast.parse(inspect.getsource(module)))

    def reaches(name: str) -> bool:
        names = {n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)} & functions.keys()
        return name == function or any(reaches(n) for n in names)

    specs = [s for s in vars(module).values() if isinstance(s, KernelSpec)]
    return [s for s in specs if reaches(s.fn.fn.__name__)]


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _assigned(function: ast.FunctionDef, name: str) -> ast.expr | None:
    """The expression that is assigned to a name in a function, if there is one."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.value
    return None


def _substitute(source: str, changes: list[tuple[ast.expr, str]]) -> str:
    """Source with the text of some expressions replaced."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    spans = []
    for node, text in changes:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        spans.append((start, end, text))
    for start, end, text in sorted(spans, reverse=True):
        source = source[:start] + text + source[end:]
    return source
