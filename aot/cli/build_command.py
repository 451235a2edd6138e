"""``fp8-aot build``"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fp8_aot.aot.cli.common import (
    console,
    json_option,
    kernel_option,
    matrix_option,
    print_json,
    print_table,
    target_option,
)

if TYPE_CHECKING:
    from fp8_aot.aot.build import Report


@click.command("build")
@matrix_option
@target_option
@kernel_option
@click.option("--jobs", type=click.IntRange(min=1), show_default="one for each core", help="Compiling processes.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("artifacts"),
    show_default=True,
    help="Folder for the bundles.",
)
@click.option(
    "--cache",
    "cache_dir",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="~/.cache/fp8-aot",
    help="Folder that keeps compiled cells between builds.",
)
@click.option("--no-cache", is_flag=True, help="Compile every cell, keep none.")
@click.option("--allow-toolchain-mismatch", is_flag=True, help="Build with another Triton than the matrix names.")
@click.option("--dry-run", is_flag=True, help="Check everything, compile and write nothing.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    matrix: Path,
    targets: tuple[str, ...],
    kernels: tuple[str, ...],
    jobs: int | None,
    out: Path,
    cache_dir: Path | None,
    no_cache: bool,
    allow_toolchain_mismatch: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Compile the build matrix into one bundle per target.  Needs no GPU.

    With --kernel, a bundle holds only the kernels that match.  A cell that fails is named with the
    compiler's message; the others are still compiled, and the target's old bundle stays.
    """
    from fp8_aot.aot import build
    from fp8_aot.aot.cache import Cache, default_directory
    from fp8_aot.aot.cells import expand
    from fp8_aot.aot.matrix import load
    from fp8_aot.aot.toolchain import check_versions

    loaded = load(matrix)
    cells = expand(loaded, targets, kernels)
    if dry_run:
        check_versions({c.target.name: c.target for c in cells}.values(), allow_toolchain_mismatch)
        _print_plan(cells, as_json)
        return 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[cell]}"),
        console=console(stderr=True),
        transient=True,
        # Where it is not a terminal, the bar would leave an empty line.
        disable=as_json or not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("compiling", total=None, cell="")
        report = build.build(
            loaded,
            cells,
            out,
            jobs=jobs or build.default_jobs(),
            cache=None if no_cache else Cache(cache_dir or default_directory()),
            allow_mismatch=allow_toolchain_mismatch,
            progress=lambda done, total, cell: bar.update(task, completed=done, total=total, cell=cell),
        )
    if as_json:
        print_json(_as_json(report))
    else:
        _print_report(report, bool(ctx.obj))
    return 1 if report.failures else 0


def _print_plan(cells: list[Any], as_json: bool) -> None:
    counts: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        count = counts.setdefault((cell.target.name, cell.kernel), [0, 0])
        count[cell.excluded is not None] += 1
    rows = [(target, kernel, built, excluded) for (target, kernel), (built, excluded) in counts.items()]
    if as_json:
        keys = ("target", "kernel", "variants", "excluded")
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        print_table(["target", "kernel", "#variants", "#excluded"], rows)


def _rows(report: Report) -> list[dict[str, Any]]:
    rows = []
    for target in report.targets:
        variants = target.variants
        rows.append(
            {
                "target": target.target.name,
                "variants": len(variants),
                "excluded": target.excluded,
                "compile_seconds": round(target.seconds, 1),
                "failed": len(target.failures),
                "bytes": target.bytes,
                "max_registers": max((v.registers for v in variants), default=0),
                "max_shared": max((v.shared for v in variants), default=0),
                "spilling": sum(v.spills > 0 for v in variants),
                "bundle": str(target.path) if target.path else None,
                "changed": target.changed,
            }
        )
    return rows


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "seconds": round(report.seconds, 2),
        "compiled": report.compiled,
        "cached": report.cached,
        "targets": _rows(report),
        "failures": [{"target": f.cell.target.name, "id": f.cell.id, "message": f.message} for f in report.failures],
    }


# Columns of the closing table and the keys of ``_rows`` that fill them.
_NUMBERS = {
    "#variants": "variants",
    "#excluded": "excluded",
    "#failed": "failed",
    "#seconds": "compile_seconds",
    "#bytes": "bytes",
    "#registers": "max_registers",
    "#shared": "max_shared",
    "#spilling": "spilling",
}


def _print_report(report: Report, debug: bool) -> None:
    for failure in report.failures:
        text = failure.traceback if debug and failure.traceback else failure.message
        click.echo(f"failed: {failure.cell.target.name} {failure.cell.id}\n  {_indent(text)}", err=True)
    rows = []
    for row in _rows(report):
        state = "not written, the old one stays" if row["bundle"] is None else row["bundle"]
        rows.append((row["target"], *(row[key] for key in _NUMBERS.values()), state))
    print_table(["target", *_NUMBERS, "bundle"], rows)
    click.echo(f"{report.compiled} compiled, {report.cached} from the cache, {report.seconds:.1f} s")


def _indent(text: str) -> str:
    return text.strip().replace("\n", "\n  ")
