"""Reading ``build_matrix.toml``: every mistake in it is found here, before anything compiles."""

from __future__ import annotations

import hashlib
import importlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from packaging.version import InvalidVersion, Version

from fp8_aot.aot.errors import UsageError
from fp8_aot.aot.targets import TRITON_TYPES, Target, max_shared
from fp8_aot.kernels.spec import FP8_MAX, MAX_SIZE, Config, KernelSpec

Specialization = Literal["aligned", "general"]
SPECIALIZATIONS: tuple[Specialization, ...] = ("aligned", "general")

OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
"""Compiler options of a tile and their defaults."""


@dataclass(frozen=True)
class Bound:
    """``least <= symbol <= most``: when the dispatch may take a tile."""

    symbol: str
    least: int | None
    most: int | None


@dataclass(frozen=True)
class TileEntry:
    """One tile of a kernel: its config, the targets and specializations it is for, the shapes it serves."""

    config: Config
    targets: frozenset[str]
    specializations: tuple[Specialization, ...]
    when: tuple[Bound, ...]


@dataclass(frozen=True)
class KernelEntry:
    """One ``[[kernel]]`` table."""

    source: str
    spec: KernelSpec
    dtypes: Mapping[str, tuple[str, ...]]
    tiles: tuple[TileEntry, ...]


@dataclass(frozen=True)
class Exclude:
    """One ``[[exclude]]`` table: cells that must not be built, and why."""

    kernel: str
    target: str | None
    when: Mapping[str, object]
    reason: str


@dataclass(frozen=True)
class Matrix:
    """A valid matrix; ``sha256`` is that of the file."""

    path: Path
    sha256: str
    targets: Mapping[str, Target]
    kernels: tuple[KernelEntry, ...]
    excludes: tuple[Exclude, ...]


@dataclass(frozen=True)
class _Table:
    """A TOML table with its place in the file, for errors that name both."""

    path: Path
    place: str
    values: dict[str, Any]
    known: set[str] = field(default_factory=set)

    def fail(self, message: str, key: str | None = None) -> NoReturn:
        where = f"{self.place}.{key}" if key and self.place else key or self.place
        raise UsageError(f"{self.path}: {where}: {message}" if where else f"{self.path}: {message}")

    def take(self, key: str, kind: type | tuple[type, ...], what: str, default: Any = ...) -> Any:
        """The value of ``key``, of a Python type, described in errors by ``what``."""
        self.known.add(key)
        if key not in self.values:
            if default is ...:
                self.fail(f"missing, expected {what}", key)
            return default
        value = self.values[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"is {value!r}, expected {what}", key)
        return value

    def names(self, key: str, legal: Iterable[str], what: str, default: Any = ...) -> tuple[str, ...]:
        """A non-empty list of different strings out of ``legal``."""
        values = self.take(key, list, f"a list of {what}s", default)
        legal = list(legal)
        if not values:
            self.fail(f"is empty, expected at least one {what}", key)
        for value in values:
            if value not in legal:
                self.fail(f"unknown {what} {value!r}, expected one of {', '.join(legal)}", key)
            if list(values).count(value) > 1:
                self.fail(f"{what} {value!r} is listed twice", key)
        return tuple(values)

    def tables(self, key: str, default: Any = ...) -> list[_Table]:
        """A list of tables under ``key``."""
        values = self.take(key, list, "a list of tables", default)
        place = f"{self.place}.{key}" if self.place else key
        for i, value in enumerate(values):
            if not isinstance(value, dict):
                self.fail(f"entry {i + 1} is {value!r}, expected a table", key)
        return [_Table(self.path, f"{place}[{i + 1}]", value) for i, value in enumerate(values)]

    def close(self) -> None:
        """Fail on keys that nothing has taken."""
        for key in self.values:
            if key not in self.known:
                self.fail(f"unknown key, expected one of {', '.join(sorted(self.known))}", key)


def load(path: Path) -> Matrix:
    """Read and check a matrix.

    Raises:
        UsageError: the file cannot be read, or something in it is wrong; the message names the file,
            the table and the key (list entries count from 1).
    """
    try:
        data = path.read_bytes()
        values = tomllib.loads(data.decode())
    except OSError as error:
        raise UsageError(f"{path}: cannot read the build matrix: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    top = _Table(path, "", values)
    schema = top.take("schema", int, "1")
    if schema != 1:
        top.fail(f"is {schema}, this fp8-aot reads 1", "schema")
    toolchain = _Table(path, "toolchain", top.take("toolchain", dict, "a table"))
    triton = _triton(toolchain)
    toolchain.close()
    targets = _targets(top, triton)
    kernels = tuple(_kernel(table, targets) for table in top.tables("kernel"))
    if not kernels:
        top.fail("is empty, expected at least one [[kernel]]", "kernel")
    names = [entry.spec.name for entry in kernels]
    for i, name in enumerate(names):
        if name in names[:i]:
            top.fail(f"kernel {name} has a table already (kernel[{names.index(name) + 1}])", f"kernel[{i + 1}]")
    excludes = tuple(_exclude(table, kernels, targets) for table in top.tables("exclude", []))
    top.close()
    return Matrix(path, hashlib.sha256(data).hexdigest(), targets, kernels, excludes)


def _triton(table: _Table, default: Any = ...) -> str:
    wanted: str = table.take("triton", str, 'a Triton version like "3.9.0"', default)
    try:
        Version(wanted)
    except InvalidVersion:
        table.fail(f'is {wanted!r}, expected a Triton version like "3.9.0"', "triton")
    return wanted


def _targets(top: _Table, triton: str) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    tables = top.take("target", dict, "tables [target.NAME]")
    if not tables:
        top.fail("is empty, expected at least one [target.NAME]", "target")
    for name, values in tables.items():
        if not isinstance(values, dict):
            top.fail(f"is {values!r}, expected a table", f"target.{name}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
            top.fail("expected a name of letters, digits, _, . and -: the bundle's file has it", f"target.{name}")
        targets[name] = _target(_Table(top.path, f"target.{name}", values), name, triton)
    return targets


def _target(table: _Table, name: str, triton: str) -> Target:
    backend = table.take("backend", str, '"cuda" or "hip"')
    if backend not in ("cuda", "hip"):
        table.fail(f'is {backend!r}, expected "cuda" or "hip"', "backend")
    if backend == "cuda":
        number = table.take("arch", int, "a compute capability without its dot, like 90")
        if not 75 <= number < 1000:
            table.fail(f"is {number}, expected a compute capability without its dot, like 90", "arch")
        arch = str(number)
    else:
        arch = table.take("arch", str, 'a name like "gfx942"')
        if not re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
            table.fail(f'is {arch!r}, expected a name like "gfx942"', "arch")
    legal = list(FP8_MAX) if backend == "hip" else ["e4m3fn"]
    fp8 = table.take("fp8", str, " or ".join(legal))
    if fp8 not in legal:
        table.fail(f"is {fp8!r}, expected {' or '.join(legal)}", "fp8")
    # gfx9 runs waves of 64, RDNA (gfx10 and later) of 32, as CUDA does.
    waves = [32, 64] if backend == "hip" else [32]
    warp_size = table.take("warp_size", int, "32 or 64", 64 if arch.startswith("gfx9") else 32)
    if warp_size not in waves:
        table.fail(f"is {warp_size}, expected {' or '.join(map(str, waves))}", "warp_size")
    pinned = _triton(table, triton)
    shared = table.take("max_shared", int, "a number of bytes", max_shared(backend, arch))
    if shared is not None and shared < 1:
        table.fail(f"is {shared}, expected a number of bytes", "max_shared")
    table.close()
    return Target(name, cast(Any, backend), arch, cast(Any, warp_size), cast(Any, fp8), pinned, shared)


def _kernel(table: _Table, targets: Mapping[str, Target]) -> KernelEntry:
    source = table.take("source", str, '"package.module:spec"')
    spec = resolve(source, table)
    dtypes = {axis: table.names(f"{axis}_dtype", legal, "dtype", list(legal)) for axis, legal in spec.dtypes.items()}
    for tensor in spec.tensors:
        for dtype in () if tensor.dtype == "fp8" else dtypes.get(tensor.dtype, (tensor.dtype,)):
            if dtype not in TRITON_TYPES:
                table.fail(f"tensor {tensor.name} has unknown dtype {dtype!r}, known are {', '.join(TRITON_TYPES)}")
    tiles = table.tables("tiles")
    if not tiles:
        table.fail("is empty, expected at least one tile", "tiles")
    entries = tuple(_tile(tile, spec, targets) for tile in tiles)
    table.close()
    for i, entry in enumerate(entries):
        for other in entries[:i]:
            same = entry.config == other.config and set(entry.specializations) & set(other.specializations)
            if same and entry.targets & other.targets:
                both = ", ".join(sorted(entry.targets & other.targets))
                tiles[i].fail(f"duplicate cell: the same tile is listed before for {both}")
    return KernelEntry(source, spec, dtypes, entries)


def resolve(source: str, table: _Table | None = None) -> KernelSpec:
    """The spec that ``package.module:name`` names.

    Raises:
        UsageError: it cannot be imported, or is no KernelSpec.
    """

    def fail(message: str) -> NoReturn:
        if table is None:
            raise UsageError(f"{source}: {message}")
        table.fail(message, "source")

    module, colon, name = source.partition(":")
    if not (module and colon and name):
        fail(f'is {source!r}, expected "package.module:spec"')
    try:
        spec = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        fail(f"unknown kernel {source!r}: {error}")
    # A module may fail in any way while it is imported; a spec that does not match its function is one.
    except Exception as error:
        fail(f"{source!r} cannot be imported: {type(error).__name__}: {error}")
    if not isinstance(spec, KernelSpec):
        fail(f"{source!r} is a {type(spec).__name__}, expected a KernelSpec")
    return spec


def _tile(table: _Table, spec: KernelSpec, targets: Mapping[str, Target]) -> TileEntry:
    constexprs: dict[str, int] = {}
    for tile in spec.tiles:
        value = table.take(tile.name, int, f"a power of two from {tile.least} to {tile.most}")
        if not tile.least <= value <= tile.most or value & (value - 1):
            table.fail(f"is {value}, expected a power of two from {tile.least} to {tile.most}", tile.name)
        constexprs[tile.name] = value
    options = {key: table.take(key, int, "a number", default) for key, default in OPTIONS.items()}
    for key in ("num_warps", "num_ctas"):
        if not 1 <= options[key] <= 32 or options[key] & (options[key] - 1):
            table.fail(f"is {options[key]}, expected a power of two from 1 to 32", key)
    if not 1 <= options["num_stages"] <= 16:
        table.fail(f"is {options['num_stages']}, expected 1 to 16", "num_stages")
    chosen = table.names("targets", targets, "target", list(targets))
    special = table.names("specializations", SPECIALIZATIONS, "specialization", list(SPECIALIZATIONS))
    when = tuple(_bounds(_Table(table.path, f"{table.place}.when", table.take("when", dict, "a table", {})), spec))
    table.close()
    config = Config(constexprs, **options)
    for name in chosen:
        _check_threads(table, config, targets[name])
        _check_shared(table, spec, config, targets[name])
    return TileEntry(config, frozenset(chosen), cast(tuple[Specialization, ...], special), when)


def _bounds(table: _Table, spec: KernelSpec) -> Iterable[Bound]:
    for symbol in table.values:
        if symbol not in spec.symbols:
            table.fail(f"unknown size, expected one of {', '.join(spec.symbols)}", symbol)
        limits = _Table(
            table.path, f"{table.place}.{symbol}", table.take(symbol, dict, "a table { least = 1, most = 64 }")
        )
        least, most = (limits.take(key, int, "a number", None) for key in ("least", "most"))
        limits.close()
        if least is None and most is None:
            limits.fail("is empty, expected least, most or both")
        for key, value in (("least", least), ("most", most)):
            if value is not None and not 0 <= value <= MAX_SIZE:
                limits.fail(f"is {value}, expected 0 to {MAX_SIZE:,}", key)
        if least is not None and most is not None and least > most:
            limits.fail(f"no size is at least {least} and at most {most}")
        yield Bound(symbol, least, most)


def _check_threads(table: _Table, config: Config, target: Target) -> None:
    threads = config.num_warps * target.warp_size
    if threads > 1024:
        table.fail(f"is {config.num_warps}: {threads:,} threads on {target.name}, at most 1,024", "num_warps")


def _check_shared(table: _Table, spec: KernelSpec, config: Config, target: Target) -> None:
    """Fail where the operands in flight alone cannot fit the target's shared memory."""
    # AMD's pipeliner keeps one stage in registers.
    stages = config.num_stages if target.backend == "cuda" else max(config.num_stages - 1, 1)
    need = spec.staged_bytes(config) * stages // config.num_ctas
    if target.max_shared is not None and need > target.max_shared:
        table.fail(
            f"needs at least {need:,} bytes of shared memory ({config.num_stages} stages), "
            f"{target.name} has {target.max_shared:,}"
        )


def _exclude(table: _Table, kernels: Iterable[KernelEntry], targets: Mapping[str, Target]) -> Exclude:
    specs = {entry.spec.name: entry.spec for entry in kernels}
    kernel = table.take("kernel", str, "a kernel's name")
    if kernel not in specs:
        table.fail(f"unknown kernel {kernel!r}, expected one of {', '.join(specs)}", "kernel")
    target = table.take("target", str, "a target's name", None)
    if target is not None and target not in targets:
        table.fail(f"unknown target {target!r}, expected one of {', '.join(targets)}", "target")
    when = table.take("when", dict, "a table", {})
    spec = specs[kernel]
    legal = [t.name for t in spec.tiles] + list(OPTIONS) + [f"{axis}_dtype" for axis in spec.dtypes]
    legal.append("specialization")
    for key, value in when.items():
        if key not in legal:
            table.fail(f"unknown key, expected one of {', '.join(legal)}", f"when.{key}")
        kind, what = (str, "a string") if key == "specialization" or key.endswith("_dtype") else (int, "a number")
        if not isinstance(value, kind) or isinstance(value, bool):
            table.fail(f"is {value!r}, expected {what}", f"when.{key}")
    reason = table.take("reason", str, "why these cells must not be built")
    if not reason.strip():
        table.fail("is empty, expected why these cells must not be built", "reason")
    table.close()
    return Exclude(kernel, target, when, reason)
