"""From a matrix to cells: one cell is one binary to build, or one that is excluded and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8_aot.aot.errors import UsageError
from fp8_aot.aot.matrix import OPTIONS, Exclude, KernelEntry, Matrix, Specialization, TileEntry
from fp8_aot.aot.targets import Target
from fp8_aot.kernels.spec import Config


@dataclass(frozen=True)
class Cell:
    """One kernel × dtypes × tile config × specialization for one target."""

    entry: KernelEntry
    tile: TileEntry
    target: Target
    dtypes: Mapping[str, str]
    specialization: Specialization
    excluded: str | None = None

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.entry.spec.name

    @property
    def tile_name(self) -> str:
        """The tile config in words, the same for all cells that share it."""
        return tile_name(self.tile.config)

    @property
    def id(self) -> str:
        """The cell's name within its target."""
        dtypes = ",".join(f"{axis}={dtype}" for axis, dtype in self.dtypes.items())
        return f"{self.kernel}/{dtypes}/{self.tile_name}/{self.specialization}"


def tile_name(config: Config) -> str:
    """A tile config in words: its constexprs, then the compiler options that differ from the default
    or always matter."""
    parts = [f"{key}={value}" for key, value in config.constexprs.items()]
    parts += [f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"]
    parts += [f"num_ctas={config.num_ctas}"] if config.num_ctas > 1 else []
    return ",".join(parts)


def expand(matrix: Matrix, targets: Iterable[str] = (), kernels: Iterable[str] = ()) -> list[Cell]:
    """All cells of the named targets and kernel globs (all where none is named), in matrix order.

    Raises:
        UsageError: a target is unknown, a glob matches no kernel, an exclude matches no cell, a target's
            dispatch would have no last resort, or no cell is left.
    """
    targets, globs = list(targets), list(kernels)
    for name in targets:
        if name not in matrix.targets:
            raise UsageError(f"--target: unknown target {name!r}, expected one of {', '.join(matrix.targets)}")
    for glob in globs:
        if not any(fnmatchcase(entry.spec.name, glob) for entry in matrix.kernels):
            known = ", ".join(entry.spec.name for entry in matrix.kernels)
            raise UsageError(f"--kernel: {glob!r} matches no kernel, there are {known}")
    used: set[int] = set()
    cells = [cell for target in matrix.targets.values() for cell in _target_cells(matrix, target, used)]
    for i, exclude in enumerate(matrix.excludes):
        if i not in used:
            raise UsageError(f"{matrix.path}: exclude[{i + 1}]: matches no cell of {exclude.kernel}")
    _check_last_resorts(matrix, cells)
    chosen = [
        cell
        for cell in cells
        if (not targets or cell.target.name in targets)
        and (not globs or any(fnmatchcase(cell.kernel, glob) for glob in globs))
    ]
    if not chosen:
        raise UsageError(f"{matrix.path}: there is no cell for these targets and kernels")
    return chosen


def _target_cells(matrix: Matrix, target: Target, used: set[int]) -> Iterable[Cell]:
    for entry in matrix.kernels:
        for dtypes in _products(entry.dtypes):
            for tile in entry.tiles:
                if target.name not in tile.targets:
                    continue
                for specialization in tile.specializations:
                    reason = None
                    for i, exclude in enumerate(matrix.excludes):
                        if _matches(exclude, entry, tile, target, dtypes, specialization):
                            used.add(i)
                            reason = reason or exclude.reason
                    yield Cell(entry, tile, target, dtypes, specialization, reason)


def _products(axes: Mapping[str, tuple[str, ...]]) -> list[dict[str, str]]:
    products: list[dict[str, str]] = [{}]
    for axis, values in axes.items():
        products = [{**product, axis: value} for product in products for value in values]
    return products


def _matches(
    exclude: Exclude,
    entry: KernelEntry,
    tile: TileEntry,
    target: Target,
    dtypes: Mapping[str, str],
    specialization: Specialization,
) -> bool:
    if exclude.kernel != entry.spec.name or exclude.target not in (None, target.name):
        return False
    facts: dict[str, object] = dict(tile.config.constexprs)
    facts |= {key: getattr(tile.config, key) for key in OPTIONS}
    facts |= {f"{axis}_dtype": dtype for axis, dtype in dtypes.items()}
    facts["specialization"] = specialization
    return all(facts[key] == value for key, value in exclude.when.items())


def _check_last_resorts(matrix: Matrix, cells: Iterable[Cell]) -> None:
    """Every target, kernel and dtype signature needs a general variant that serves any shape."""
    needed: dict[tuple[str, str, tuple[str, ...]], bool] = {}
    for cell in cells:
        key = (cell.target.name, cell.kernel, tuple(cell.dtypes.values()))
        serves = cell.excluded is None and not cell.tile.when and cell.specialization == "general"
        needed[key] = needed.get(key, False) or serves
    for (target, kernel, dtypes), served in needed.items():
        if not served:
            raise UsageError(
                f"{matrix.path}: kernel {kernel} ({', '.join(dtypes)}) on {target}: no tile without `when` and "
                "with a general variant is left, so some shapes would have no binary"
            )
