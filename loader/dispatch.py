"""Choosing a variant for one launch, and proving that the launch fits what the variant assumes."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from fp8_aot.loader.bundle import Bundle
from fp8_aot.loader.schema import Condition, Kernel, Pointer, Rule, Size, Variant
from fp8_aot.loader.views import TensorView

MAX_GRID = 2**31 - 1
"""Largest first grid dimension of both vendors; the other two end at 65,535."""
_MAX_GRID_YZ = 65_535


class Step(Struct, frozen=True):
    """One decision on the way to a variant: what was looked at, whether it was taken, and why (not)."""

    subject: str
    taken: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.subject}: {'taken' if self.taken else 'passed over'}: {self.reason}"


class Choice(Struct, frozen=True):
    """The chosen variant, or None, and every step that led there; ``cell`` names what was asked for."""

    cell: str
    variant: Variant | None
    steps: tuple[Step, ...]

    @property
    def reason(self) -> str:
        """Why the last step ended as it did."""
        return self.steps[-1].reason if self.steps else "nothing to choose from"

    def __str__(self) -> str:
        chosen = "no prebuilt kernel" if self.variant is None else self.variant.id
        return "\n".join([self.cell, *(f"  {step}" for step in self.steps), f"  -> {chosen}"])


def argument_values(kernel: Kernel, tensors: Mapping[str, TensorView], sizes: Mapping[str, int]) -> dict[str, int]:
    """The values of a kernel's run-time arguments, by name, in order."""
    values = {}
    for arg in kernel.args:
        if isinstance(arg, Pointer):
            values[arg.name] = tensors[arg.tensor].ptr
        elif isinstance(arg, Size):
            values[arg.name] = sizes[arg.symbol]
        else:
            strides = tensors[arg.tensor].strides
            assert strides is not None  # a TensorView always has strides once it is made
            values[arg.name] = strides[arg.dim]
    return values


def choose(
    bundle: Bundle,
    kernel: str,
    dtypes: dict[str, str],
    sizes: Mapping[str, int],
    values: Mapping[str, int],
) -> Choice:
    """Choose the variant for a launch: the first rule whose conditions hold and one of whose variants the
    argument values allow, aligned before general."""
    cell = f"{kernel} ({', '.join(f'{axis}={dtype}' for axis, dtype in dtypes.items())})"
    cell += f" for {bundle.manifest.target.name}"
    if kernel not in bundle.kernels:
        return Choice(cell, None, (Step(str(bundle.path), False, f"has no kernel {kernel}"),))
    entry = bundle.dispatch(kernel, dtypes)
    if entry is None:
        have = "; ".join(
            ", ".join(f"{axis}={dtype}" for axis, dtype in d.dtypes.items())
            for d in bundle.manifest.dispatch
            if d.kernel == kernel
        )
        return Choice(cell, None, (Step(str(bundle.path), False, f"has {kernel} for {have} only"),))
    steps: list[Step] = []
    for rule in entry.rules:
        tile = bundle.variants[next(iter(rule.variants.values()))].tile
        failed = next((c for c in rule.when if not _holds(c, sizes)), None)
        if failed is not None:
            steps.append(
                Step(f"tile {tile}", False, f"is for {_words(failed)}, {failed.symbol} is {sizes[failed.symbol]}")
            )
            continue
        variant = _specialize(bundle, rule, tile, values, steps)
        if variant is not None:
            return Choice(cell, variant, tuple(steps))
    raise AssertionError("the last rule of a dispatch list fits any launch")  # the manifest was checked


def _holds(condition: Condition, sizes: Mapping[str, int]) -> bool:
    value = sizes[condition.symbol]
    return (condition.least is None or value >= condition.least) and (condition.most is None or value <= condition.most)


def _words(condition: Condition) -> str:
    least = f"{condition.least} <= " if condition.least is not None else ""
    most = f" <= {condition.most}" if condition.most is not None else ""
    return f"{least}{condition.symbol}{most}"


def _specialize(bundle: Bundle, rule: Rule, tile: str, values: Mapping[str, int], steps: list[Step]) -> Variant | None:
    aligned = rule.variants.get("aligned")
    if aligned is not None:
        variant = bundle.variants[aligned]
        odd = [name for name in variant.divisible_by_16 if values[name] % 16]
        if not odd:
            steps.append(Step(f"tile {tile}, aligned", True, "every assumption holds"))
            return variant
        shown = ", ".join(
            f"{name} = {values[name]:#x}" if "ptr" in name else f"{name} = {values[name]}" for name in odd
        )
        steps.append(Step(f"tile {tile}, aligned", False, f"assumes multiples of 16, but {shown}"))
    if "general" not in rule.variants:
        return None
    steps.append(Step(f"tile {tile}, general", True, "it assumes nothing"))
    return bundle.variants[rule.variants["general"]]


def grid_of(kernel: Kernel, variant: Variant, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """The launch grid, three dimensions; any of them may be 0, which means that there is nothing to do.

    Raises:
        ValueError: a dimension is larger than the hardware's limit.
    """
    grid = []
    for axis, limit in zip(kernel.grid, (MAX_GRID, _MAX_GRID_YZ, _MAX_GRID_YZ), strict=False):
        blocks = 1
        for factor in axis:
            tile = factor.tile if isinstance(factor.tile, int) else int(variant.constexprs[factor.tile])
            blocks *= -(-sizes[factor.symbol] // tile)
        if blocks > limit:
            shown = ", ".join(f"{s}={v}" for s, v in sizes.items())
            raise ValueError(f"{kernel.name}: sizes {shown} need a grid of {blocks} blocks, the limit is {limit}")
        grid.append(blocks)
    grid += [1] * (3 - len(grid))
    return grid[0], grid[1], grid[2]
