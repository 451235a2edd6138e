"""From compiled cells to a bundle: the manifest's writer."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8_aot.aot.cells import Cell
from fp8_aot.aot.compile import assumed
from fp8_aot.aot.elf import ElfError, KernelInfo, read_object
from fp8_aot.aot.errors import WorkError
from fp8_aot.aot.matrix import KernelEntry, Matrix
from fp8_aot.aot.source import combined_sha256, source_sha256
from fp8_aot.aot.toolchain import toolchain
from fp8_aot.aot.worker import Compiled
from fp8_aot.kernels import spec as kernel_spec
from fp8_aot.loader import schema


def variant(cell: Cell, compiled: Compiled) -> schema.Variant:
    """The manifest's entry of a compiled cell, with what its object says of itself.

    Raises:
        WorkError: the object is not what was asked for, or does not fit the target.
    """
    target, spec = cell.target, cell.entry.spec
    try:
        found = read_object(compiled.object)
    except ElfError as error:
        raise WorkError(f"the compiler's object cannot be read: {error}") from None
    kernel = next((k for k in found.kernels if k.symbol == compiled.symbol), None)
    if kernel is None:
        raise WorkError(f"the object has no kernel {compiled.symbol}")
    if target.max_shared is not None and compiled.shared > target.max_shared:
        raise WorkError(
            f"needs {compiled.shared:,} bytes of shared memory, {target.name} has {target.max_shared:,}: "
            "smaller tiles or fewer stages"
        )
    config = cell.tile.config
    return schema.Variant(
        id=cell.id,
        kernel=cell.kernel,
        dtypes=dict(cell.dtypes),
        tile=cell.tile_name,
        constexprs=spec.constexprs(config, target.fp8),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        specialization=cell.specialization,
        divisible_by_16=assumed(spec, cell.specialization),
        object=hashlib.sha256(compiled.object).hexdigest(),
        object_size=len(compiled.object),
        symbol=compiled.symbol,
        threads=_threads(kernel, compiled, target.warp_size),
        shared=compiled.shared,
        static_shared=kernel.static_shared,
        registers=kernel.registers,
        spills=kernel.spills,
        params=tuple(schema.Parameter(offset, size) for offset, size in kernel.params),
        global_scratch=compiled.global_scratch,
        profile_scratch=compiled.profile_scratch,
        tensordesc=compiled.tensordesc,
    )


def _threads(kernel: KernelInfo, compiled: Compiled, warp_size: int) -> int:
    # A warp-specialised kernel runs more warps than were asked for; its object says how many.
    return kernel.max_threads or compiled.num_warps * warp_size


def kernel_entry(entry: KernelEntry) -> schema.Kernel:
    """The manifest's entry of a kernel: its spec, as data."""
    spec = entry.spec
    tensors = tuple(
        schema.Tensor(t.name, t.dtype, _dims(t.shape), 1 if t.unit_dim else 0, t.output) for t in spec.tensors
    )
    args = tuple(_argument(spec, arg) for arg in spec.args)
    dtypes = {axis: tuple(legal) for axis, legal in spec.dtypes.items()}
    return schema.Kernel(
        name=spec.name,
        abi=schema.abi_of(tensors, args, dtypes),
        source=entry.source,
        source_sha256=source_sha256(spec.fn),
        promise=spec.promise,
        tensors=tensors,
        args=args,
        tiles=tuple(t.name for t in spec.tiles),
        dtypes=dtypes,
        grid=tuple(tuple(schema.GridFactor(s, t) for s, t in axis) for axis in spec.grid),
        specialized=assumed(spec, "aligned"),
    )


def _dims(shape: tuple[kernel_spec.Dim, kernel_spec.Dim]) -> tuple[schema.Dim, schema.Dim]:
    first, second = (schema.Dim(d.symbol, d.group) for d in shape)
    return first, second


def _argument(spec: kernel_spec.KernelSpec, arg: kernel_spec.Argument) -> schema.Argument:
    if isinstance(arg, kernel_spec.Pointer):
        return schema.Pointer(arg.name, arg.tensor, f"*{spec.tensor(arg.tensor).dtype}")
    if isinstance(arg, kernel_spec.Size):
        return schema.Size(arg.name, arg.symbol, "i32")
    return schema.Stride(arg.name, arg.tensor, 1 if arg.dim else 0, "i64")


def dispatch(cells: Sequence[Cell]) -> tuple[schema.Dispatch, ...]:
    """Dispatch rules of one target's cells: tiles in matrix order, up to the first that serves any launch."""
    groups: dict[tuple[str, tuple[str, ...]], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.kernel, tuple(cell.dtypes.values())), []).append(cell)
    return tuple(schema.Dispatch(kernel, dict(group[0].dtypes), _rules(group)) for (kernel, _), group in groups.items())


def _rules(cells: Sequence[Cell]) -> tuple[schema.Rule, ...]:
    rules = []
    # By entry, not by name: one tile may be listed twice, for different specializations and sizes.
    for _, group in itertools.groupby(cells, lambda cell: id(cell.tile)):
        of_tile = list(group)
        variants = {cell.specialization: cell.id for cell in of_tile}
        bounds = of_tile[0].tile.when
        rules.append(schema.Rule(tuple(schema.Condition(b.symbol, b.least, b.most) for b in bounds), variants))
        if not bounds and "general" in variants:
            break
    return tuple(rules)


def assemble(matrix: Matrix, built: Sequence[tuple[Cell, schema.Variant]], objects: Mapping[str, bytes]) -> bytes:
    """The bundle file of one target's built cells; ``objects`` are by sha256."""
    target = built[0][0].target
    entries = {cell.kernel: cell.entry for cell, _ in built}
    kernels = tuple(kernel_entry(entry) for entry in entries.values())
    commit, dirty = commit_of(matrix.path)
    manifest = schema.Manifest(
        schema=schema.SCHEMA,
        project="fp8-aot",
        version=schema.VERSION,
        target=schema.Target(target.name, target.backend, target.arch, target.warp_size, target.fp8),
        toolchain=toolchain(target),
        provenance=schema.Provenance(commit, dirty, combined_sha256(k.source_sha256 for k in kernels), matrix.sha256),
        kernels=kernels,
        variants=tuple(v for _, v in built),
        dispatch=dispatch([cell for cell, _ in built]),
    )
    schema.check(manifest, f"the bundle of {target.name}")
    names = {f"objects/{sha256}.{target.extension}": data for sha256, data in objects.items()}
    return schema.write(schema.encode(manifest), names)


def commit_of(path: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout that tracks a file, and whether its tracked files differ from it."""

    def git(*args: str) -> str | None:
        # Without the option, `git status` may rewrite the index.
        command = ["git", "--no-optional-locks", "-C", str(path.resolve().parent), *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", path.resolve().name) is None:
        return None, None
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)
