"""The ``fp8-aot`` command: one module a subcommand, imported when it is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any, NoReturn

import click

from fp8_aot.aot.errors import UsageError, WorkError
from fp8_aot.loader.errors import LoaderError
from fp8_aot.loader.schema import VERSION

COMMANDS = {
    "build": "Compile the build matrix into one bundle per target.",
    "list": "Show every cell of the build matrix: built, or excluded and why.",
    "inspect": "Show what a bundle contains.",
    "verify": "Check a bundle: integrity, targets, and parameter lists proven against the objects.",
}


BUILD_PACKAGES = {"triton": "Triton", "pebble": "pebble", "elftools": "pyelftools"}
"""Modules of the ``build`` extra, which nodes that only run kernels do without, and what they are called."""


class _Commands(click.Group):
    """Subcommands are found by name, so that ``--help`` and ``list`` do not wait for what ``build`` imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"fp8_aot.aot.cli.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, prog_name="fp8-aot")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Build, look into and check bundles of ahead-of-time compiled FP8 kernels.

    Exit status: 0 done, 1 the work failed, 2 wrong usage.
    """
    ctx.obj = debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> None:
    """Entry point of the ``fp8-aot`` command."""
    # Kernels declared under the interpreter cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)
    # The default would end this process without removing its temporary files and its workers.
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:]))


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def run(args: list[str], **extra: Any) -> int:
    """Run the command line and return its exit status: 0 done, 1 the work failed, 2 wrong usage."""
    debug = "--debug" in args
    # --debug is welcome anywhere on the line.
    args = (["--debug"] if debug else []) + [arg for arg in args if arg != "--debug"]
    try:
        result = cli.main(args, prog_name="fp8-aot", standalone_mode=False, **extra)
        return result if isinstance(result, int) else 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _fail(*_describe(error))


def _describe(error: Exception) -> tuple[str, int]:
    """One line for an error, and the exit status."""
    if isinstance(error, click.exceptions.Abort):
        return "stopped", 1
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "fp8-aot"
        return f"{error.format_message()}  (see {command} --help)", 2
    if isinstance(error, click.ClickException):
        return error.format_message(), 1
    if isinstance(error, UsageError):
        return str(error), 2
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in BUILD_PACKAGES:
        package = BUILD_PACKAGES[missing]
        return f"this command needs {package}, which is not installed: pip install 'fp8-aot[build]'", 2
    if isinstance(error, WorkError | LoaderError | OSError):
        return str(error), 1
    return f"internal error: {type(error).__name__}: {error}  (--debug shows where)", 1


def _fail(message: str, status: int) -> int:
    click.echo(f"fp8-aot: error: {' '.join(message.splitlines())}", err=True)
    return status
