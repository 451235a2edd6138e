"""What the subcommands share: options, tables, JSON output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
target_option = click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="Only this target; may be repeated."
)
kernel_option = click.option(
    "--kernel", "kernels", multiple=True, metavar="GLOB", help="Only kernels whose name matches; may be repeated."
)


def default_matrix() -> Path:
    """``./build_matrix.toml``, or else the one that comes with the package."""
    here = Path("build_matrix.toml")
    return here if here.exists() else Path(__file__).parent.parent / "build_matrix.toml"


matrix_option = click.option(
    "--matrix",
    type=click.Path(dir_okay=False, path_type=Path),
    default=default_matrix,
    show_default="./build_matrix.toml, or the package's own",
    help="The build matrix.",
)


def console(*, stderr: bool = False) -> Console:
    """A console; tables that are not shown on a terminal keep their whole width."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, markup=False)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table; columns whose name starts with ``#`` are numbers, set to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.lstrip("#"), justify="right" if column.startswith("#") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row))
    console().print(table)
