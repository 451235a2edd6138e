"""Tests that need a GPU and a bundle for it: skipped without either.

The bundle is looked for as a user's is: ``FP8_AOT_BUNDLE_PATH``, then ``./artifacts``.  For the tests that
compare bit by bit with the JIT it must have been built with the Triton version installed here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def bundle_path() -> Path:
    """The bundle of this machine's GPU."""
    from fp8_aot.loader.runtime import runtime

    state = runtime.state("cuda" if torch.version.hip is None else "hip", 0)
    if state.bundle is None:
        pytest.skip("no bundle for this GPU: " + "; ".join(map(str, state.decisions)))
    return state.bundle.path.resolve()


@pytest.fixture
def strict(bundle_path: Path):
    """Prebuilt kernels only: a miss raises."""
    import fp8_aot.loader as loader

    loader.configure(mode="strict", bundle_path=bundle_path)
    yield loader
    loader.configure(mode="warn")
