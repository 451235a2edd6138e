"""Building bundles: compile every cell, in parallel, and write each target's bundle when all of it is there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path

import pebble

from fp8_aot.aot import bundle, worker
from fp8_aot.aot.cache import Cache, check_writable, write_atomically
from fp8_aot.aot.cells import Cell
from fp8_aot.aot.compile import request
from fp8_aot.aot.errors import WorkError
from fp8_aot.aot.matrix import Matrix
from fp8_aot.aot.targets import Target
from fp8_aot.aot.toolchain import check_versions
from fp8_aot.aot.worker import Compiled, Failed, Request
from fp8_aot.loader import schema

CELL_SECONDS = 900
"""A compiler that takes longer than this for one cell is stopped, and the cell has failed."""


@dataclass(frozen=True)
class Failure:
    """A cell that was not built, with the compiler's message."""

    cell: Cell
    message: str
    traceback: str = ""


@dataclass
class TargetReport:
    """What became of one target; ``path`` is None where its bundle was not written.

    ``seconds`` is the time that compilers took for it in this build, summed over processes.
    """

    target: Target
    variants: list[schema.Variant] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    excluded: int = 0
    seconds: float = 0.0
    path: Path | None = None
    bytes: int = 0
    changed: bool = False


@dataclass(frozen=True)
class Report:
    """What a build did: by target, wall-clock seconds, and how many cells the cache answered."""

    targets: tuple[TargetReport, ...]
    seconds: float
    compiled: int
    cached: int

    @property
    def failures(self) -> list[Failure]:
        """Every cell that was not built."""
        return [failure for target in self.targets for failure in target.failures]


Progress = Callable[[int, int, str], None]


def default_jobs() -> int:
    """One compiling process for each core that this process may use."""
    return len(os.sched_getaffinity(0))


def build(
    matrix: Matrix,
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int,
    cache: Cache | None,
    allow_mismatch: bool = False,
    progress: Progress = lambda done, total, label: None,
) -> Report:
    """Build the cells and write ``out/<target>.zip`` for each target all of whose cells compiled.

    ``progress`` is called with the cells done, their total and the id of the latest one.

    Raises:
        UsageError: the installed Triton is not the matrix's, or ``out`` or the cache
            cannot be written.
        WorkError: writing failed on the way.
    """
    start = time.monotonic()
    targets = list({cell.target.name: cell.target for cell in cells}.values())
    check_versions(targets, allow_mismatch)
    check_writable("--out", out)
    if cache:
        check_writable("--cache", cache.directory)
    wanted = [cell for cell in cells if cell.excluded is None]
    jobs_of: dict[str, tuple[Request, list[Cell]]] = {}
    for cell in wanted:
        job = request(cell)
        jobs_of.setdefault(job.key, (job, []))[1].append(cell)
    results: dict[str, Compiled | Failed] = {}
    done = 0

    def finish(key: str, result: Compiled | Failed) -> None:
        nonlocal done
        results[key] = result
        done += len(jobs_of[key][1])
        progress(done, len(wanted), jobs_of[key][1][0].id)

    for key, (job, _) in jobs_of.items():
        hit = cache.get(job) if cache else None
        if hit is not None:
            finish(key, hit)
    cached = len(results)
    missing = [(key, job) for key, (job, _) in jobs_of.items() if key not in results]
    _compile_all(missing, jobs, cache, cache.directory if cache else out, finish)

    keys = {cell.id + cell.target.name: key for key, (_, of_key) in jobs_of.items() for cell in of_key}
    reports = []
    for target in targets:
        of_target = [cell for cell in cells if cell.target.name == target.name]
        pairs = [(c, results[keys[c.id + target.name]]) for c in of_target if c.excluded is None]
        report = _target_report(matrix, target, pairs, out)
        report.excluded = len(of_target) - len(pairs)
        of_keys = {keys[cell.id + target.name] for cell, _ in pairs}
        report.seconds = sum(r.seconds for r in map(results.__getitem__, of_keys) if isinstance(r, Compiled))
        reports.append(report)
    return Report(tuple(reports), time.monotonic() - start, len(missing), cached)


def _compile_all(
    missing: Sequence[tuple[str, Request]],
    jobs: int,
    cache: Cache | None,
    folder: Path,
    finish: Callable[[str, Compiled | Failed], None],
) -> None:
    """Compile in processes whose temporary files lie in a scratch folder below ``folder``."""
    if not missing:
        return
    # spawn: a fork would share the parent's Triton and its state with every compiler.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix=".scratch-", dir=folder, ignore_cleanup_errors=True) as scratch,
        pebble.ProcessPool(
            jobs, context=context, initializer=worker.prepare, initargs=(Path(scratch).resolve(),)
        ) as pool,
    ):
        futures = {
            pool.schedule(worker.compile_request, args=(job,), timeout=CELL_SECONDS): (key, job) for key, job in missing
        }
        try:
            for future in as_completed(futures):
                key, job = futures[future]
                result = _result(future)
                if cache and isinstance(result, Compiled):
                    cache.put(job, result)
                finish(key, result)
        except BaseException:
            pool.stop()
            raise


def _result(future: pebble.ProcessFuture) -> Compiled | Failed:
    try:
        result: Compiled | Failed = future.result()
        return result
    except TimeoutError:
        return Failed(f"the compiler did not finish within {CELL_SECONDS} s and was stopped", "")
    except pebble.ProcessExpired as error:
        return Failed(f"the compiling process died: {_cause(error.exitcode)}", "")


def _cause(status: int) -> str:
    return signal.strsignal(-status) or f"signal {-status}" if status < 0 else f"exit status {status}"


def _target_report(
    matrix: Matrix, target: Target, pairs: Iterable[tuple[Cell, Compiled | Failed]], out: Path
) -> TargetReport:
    report = TargetReport(target)
    built: list[tuple[Cell, schema.Variant]] = []
    objects: dict[str, bytes] = {}
    for cell, result in pairs:
        if isinstance(result, Failed):
            report.failures.append(Failure(cell, result.message, result.traceback))
            continue
        try:
            made = bundle.variant(cell, result)
        except WorkError as error:
            report.failures.append(Failure(cell, str(error)))
            continue
        built.append((cell, made))
        objects[made.object] = result.object
    report.variants = [made for _, made in built]
    if report.failures or not built:
        return report
    data = bundle.assemble(matrix, built, objects)
    path = out / f"{target.name}.zip"
    report.bytes = len(data)
    report.changed = not path.exists() or path.read_bytes() != data
    if report.changed:
        try:
            write_atomically(path, data)
        except OSError as error:
            raise WorkError(f"--out {out}: cannot write {path.name}: {error.strerror}") from None
    report.path = path
    return report
