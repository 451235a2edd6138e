"""A content key for a Triton function: its code and all that its code refers to.

Triton's own key contains the line number of the function, so a comment above a kernel would recompile
it.  This one is over the syntax tree, without comments, docstrings and positions, and the same for every
version of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from triton.language.core import constexpr, dtype
from triton.runtime.jit import JITCallable


def source_sha256(fn: JITCallable) -> str:
    """The sha256 of a Triton function, the functions it calls and the constants it reads."""
    found: list[str] = []
    _collect(fn, {}, found)
    return hashlib.sha256("\n\n".join(found).encode()).hexdigest()


def combined_sha256(digests: Iterable[str]) -> str:
    """One digest of many, whatever their order."""
    return hashlib.sha256("\n".join(sorted(set(digests))).encode()).hexdigest()


def _collect(fn: Any, seen: dict[int, int], found: list[str]) -> int:
    """Add a function and all it refers to; gives its number, which stands for it where others name it.

    Numbers follow the order of first mention.  Names would not do: two modules may each have a ``GROUP``.
    """
    if id(fn) in seen:
        return seen[id(fn)]
    number = seen[id(fn)] = len(seen)
    tree = ast.parse(fn.src)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    lines = {f"function {number}, noinline {getattr(fn, 'noinline', None)}: {_dump(tree)}": None}
    scope = fn.get_capture_scope() if hasattr(fn, "get_capture_scope") else fn.__globals__
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            value = _describe(_lookup(node, scope), seen, found)
            if value is not None:
                lines[f"{ast.unparse(node)} = {value}"] = None
    found.append("\n".join(lines))
    return number


def _lookup(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of modules, stands for; None where that is not known."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _lookup(node.value, scope)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None


def _describe(value: Any, seen: dict[int, int], found: list[str]) -> str | None:
    """A value that code can depend on, in words; None for others."""
    if isinstance(value, constexpr):
        return _describe(value.value, seen, found)
    if isinstance(value, JITCallable):
        # Triton's own library is part of the toolchain, whose version is in the key already.
        in_triton = value.__module__.partition(".")[0] == "triton"
        return None if in_triton else f"function {_collect(value, seen, found)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(str(_describe(item, seen, found)) for item in value)})"
    return repr(value) if isinstance(value, int | float | str | dtype) else None


def _dump(node: object) -> str:
    # ast.dump shows empty fields, and newer versions of Python add such.
    if isinstance(node, ast.AST):
        fields = [(name, getattr(node, name, None)) for name in node._fields]
        inner = ", ".join(f"{name}={_dump(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({inner})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)
