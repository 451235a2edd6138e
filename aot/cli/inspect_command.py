"""``fp8-aot inspect``"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import click
import msgspec

from fp8_aot.aot.cli.common import json_option, kernel_option, print_json, print_table
from fp8_aot.aot.errors import UsageError
from fp8_aot.loader.schema import Condition, Manifest


@click.command("inspect")
@click.argument("path", metavar="BUNDLE", type=click.Path(dir_okay=False, path_type=Path))
@kernel_option
@json_option
def command(path: Path, kernels: tuple[str, ...], as_json: bool) -> None:
    """Show what a bundle contains: target, toolchain, kernels, variants and dispatch rules."""
    from fp8_aot.aot.opened import open_bundle

    bundle = open_bundle(path)
    manifest = _only(bundle.manifest, kernels)
    if as_json:
        print_json({"bundle": str(path), "bytes": len(bundle.data), **msgspec.to_builtins(manifest)})
        return
    target, made_by, provenance = manifest.target, manifest.toolchain, manifest.provenance
    commit = "unknown" if provenance.commit is None else provenance.commit
    click.echo(f"{path}: {len(bundle.data):,} bytes, fp8-aot {manifest.version}, manifest schema {manifest.schema}")
    click.echo(f"target      {target.name}: {target.backend} {target.arch}, {target.fp8}, warps of {target.warp_size}")
    click.echo(f"toolchain   Triton {made_by.triton}, {made_by.assembler.name} {made_by.assembler.version}")
    click.echo(f"driver      {made_by.min_driver} or newer")
    click.echo(f"commit      {commit}{' (dirty)' if provenance.dirty else ''}")
    for kernel in manifest.kernels:
        variants = [v for v in manifest.variants if v.kernel == kernel.name]
        click.echo(f"\n{kernel.name}: {kernel.promise}")
        click.echo(f"  arguments: {', '.join(f'{arg.name} {arg.type}' for arg in kernel.args)}")
        print_table(
            ["dtypes", "tile", "specialization", "#registers", "#spills", "#shared", "#bytes", "object"],
            [
                (
                    ",".join(v.dtypes.values()),
                    v.tile,
                    v.specialization,
                    v.registers,
                    v.spills,
                    v.shared + v.static_shared,
                    v.object_size,
                    v.object[:12],
                )
                for v in variants
            ],
        )
        for entry in manifest.dispatch:
            if entry.kernel == kernel.name:
                tiles = {v.id: f"{v.tile} {v.specialization}" for v in variants}
                for rule in entry.rules:
                    when = " and ".join(map(_condition, rule.when)) or "otherwise"
                    chosen = " or ".join(tiles[name] for name in rule.variants.values())
                    click.echo(f"  {','.join(entry.dtypes.values())}: {when}: {chosen}")


def _only(manifest: Manifest, globs: tuple[str, ...]) -> Manifest:
    if not globs:
        return manifest
    names = {k.name for k in manifest.kernels if any(fnmatchcase(k.name, glob) for glob in globs)}
    if not names:
        known = ", ".join(k.name for k in manifest.kernels)
        raise UsageError(f"--kernel: {', '.join(globs)} matches no kernel of the bundle, it has {known}")
    return msgspec.structs.replace(
        manifest,
        kernels=tuple(k for k in manifest.kernels if k.name in names),
        variants=tuple(v for v in manifest.variants if v.kernel in names),
        dispatch=tuple(d for d in manifest.dispatch if d.kernel in names),
    )


def _condition(condition: Condition) -> str:
    least = f"{condition.least} <= " if condition.least is not None else ""
    most = f" <= {condition.most}" if condition.most is not None else ""
    return f"{least}{condition.symbol}{most}"
