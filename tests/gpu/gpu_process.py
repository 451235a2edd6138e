"""Running a program of the tests in a process without Triton and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def isolated(
    bundle_path: Path, tmp_path: Path, *args: str, prefix: tuple[str, ...] = (), timeout: int = 550, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run ``isolated.py`` in a process where importing Triton fails and PATH holds nothing."""
    empty = tmp_path / "bin"
    empty.mkdir(exist_ok=True)
    for tool in ("readlink", "dirname"):  # what NVIDIA's launcher script of compute-sanitizer calls
        if prefix and not (empty / tool).exists():
            (empty / tool).symlink_to(shutil.which(tool) or tool)
    environment = os.environ | {
        "PATH": str(empty),
        "FP8_AOT_BUNDLE_PATH": str(bundle_path),
        "FP8_AOT_MODE": "strict",
        **extra,
    }
    for name in ("TRITON_INTERPRET", "CC", "CUDA_HOME"):
        environment.pop(name, None)
    command = [*prefix, sys.executable, str(HERE / "isolated.py"), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
