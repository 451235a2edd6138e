"""A content key for a Triton function: its code and all that its code refers to.

Triton's own key contains the line number of the function, so a comment above a kernel would recompile
it.  This one is over the syntax tree, without comments, docstrings and positions.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from typing import Any

from triton.runtime.jit import JITCallable


def source_sha256(fn: JITCallable) -> str:
    """The sha256 of a Triton function, the functions it calls and the constants it reads."""
    found: dict[str, str] = {}
    _collect(fn, found)
    text = "\n".join(f"{name}\n{found[name]}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


def combined_sha256(digests: Iterable[str]) -> str:
    """One digest of many, whatever their order."""
    return hashlib.sha256("\n".join(sorted(set(digests))).encode()).hexdigest()


def _collect(fn: Any, found: dict[str, str]) -> None:
    name = f"{fn.__module__}.{fn.__qualname__}"
    if name in found:
        return
    tree = ast.parse(fn.src)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    found[name] = ast.dump(tree)
    scope = fn.get_capture_scope() if hasattr(fn, "get_capture_scope") else fn.__globals__
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            _reference(node.id, scope.get(node.id), found)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            _reference(f"{node.value.id}.{node.attr}", getattr(owner, node.attr, None), found)


def _reference(name: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, JITCallable):
        # Triton's own library is part of the toolchain, whose version is in the key already.
        if not value.__module__.startswith("triton."):
            _collect(value, found)
    elif type(value).__name__ == "constexpr" or isinstance(value, int | float | str | bool):
        found[f"constant {name}"] = repr(value)
