"""``fp8-aot list``"""

from __future__ import annotations

from pathlib import Path

import click

from fp8_aot.aot.cli.common import (
    json_option,
    kernel_option,
    matrix_option,
    print_json,
    print_table,
    target_option,
)


@click.command("list")
@matrix_option
@target_option
@kernel_option
@json_option
def command(matrix: Path, targets: tuple[str, ...], kernels: tuple[str, ...], as_json: bool) -> None:
    """Show every cell of the build matrix: built, or excluded and why."""
    from fp8_aot.aot.cells import expand
    from fp8_aot.aot.matrix import load

    cells = expand(load(matrix), targets, kernels)
    if as_json:
        print_json(
            [
                {
                    "target": cell.target.name,
                    "id": cell.id,
                    "kernel": cell.kernel,
                    "dtypes": dict(cell.dtypes),
                    "constexprs": dict(cell.tile.config.constexprs),
                    "num_warps": cell.tile.config.num_warps,
                    "num_stages": cell.tile.config.num_stages,
                    "num_ctas": cell.tile.config.num_ctas,
                    "specialization": cell.specialization,
                    "when": {b.symbol: {"least": b.least, "most": b.most} for b in cell.tile.when},
                    "built": cell.excluded is None,
                    "reason": cell.excluded,
                }
                for cell in cells
            ]
        )
        return
    print_table(
        ["target", "cell", "state"],
        [
            (cell.target.name, cell.id, "built" if cell.excluded is None else f"excluded: {cell.excluded}")
            for cell in cells
        ],
    )
    excluded = sum(cell.excluded is not None for cell in cells)
    click.echo(f"{len(cells) - excluded} cells to build, {excluded} excluded")
