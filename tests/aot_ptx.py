"""The PTX behind a target's bundle: run as a program, it writes their digests by cell id to a file.

    python tests/aot_ptx.py MATRIX TARGET OUTPUT

A bundle holds what the assembler made of it, so each cell is compiled again, as the builder does it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

from fp8_aot.aot import worker


def main(matrix: str, target: str, output: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # First of all: Triton reads the environment when it is imported.
        worker.prepare(Path(scratch))
        from fp8_aot.aot.cells import expand
        from fp8_aot.aot.compile import request
        from fp8_aot.aot.matrix import load

        found = {}
        known: dict[str, str] = {}
        for cell in expand(load(Path(matrix)), [target]):
            job = request(cell)
            if job.key not in known:
                ptx = worker.triton_compile(job).asm["ptx"]
                known[job.key] = hashlib.sha256(ptx.encode()).hexdigest()
            found[cell.id] = known[job.key]
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
