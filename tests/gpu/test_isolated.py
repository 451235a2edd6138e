"""Everything from a bundle where there is no Triton and no compiler, and nothing out of bounds."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from gpu_process import isolated


def test_all_operations_without_triton(bundle_path: Path, tmp_path: Path) -> None:
    done = isolated(bundle_path, tmp_path, "all")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compute_sanitizer_finds_nothing(bundle_path: Path, tmp_path: Path) -> None:
    """memcheck over the tail shapes, torch's caching allocator off: each tensor is an allocation of its own."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    done = isolated(
        bundle_path,
        tmp_path,
        "sanitizer",
        prefix=(tool, "--tool", "memcheck", "--error-exitcode", "9"),
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"ERROR SUMMARY: 0 errors", done.stdout), done.stdout
    assert "sanitizer: good" in done.stdout
