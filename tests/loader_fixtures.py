"""Fixtures of the loader's tests: a test module names this plugin in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeCuda, FakeHip
from loader_kit import stand_in

from fp8_aot.loader import config, driver
from fp8_aot.loader.runtime import runtime


@pytest.fixture
def clean_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A loader as in a new process: no setting, no driver, no bundle in reach, nothing loaded."""
    monkeypatch.chdir(tmp_path)
    for name in ("FP8_AOT_MODE", "FP8_AOT_BUNDLE_PATH"):
        monkeypatch.delenv(name, raising=False)
    runtime.unload()
    driver.reset()
    monkeypatch.setattr(config, "_settings", None)
    monkeypatch.setattr(runtime, "_used", False)
    monkeypatch.setattr(runtime, "_forked", False)
    yield
    runtime.unload()
    driver.reset()


@pytest.fixture
def on(clean_loader: None, bundles: Path) -> Iterator[Callable[..., FakeCuda | FakeHip]]:
    """``on(target, count, **options)``: a stand-in with the real bundle of the target configured."""
    fakes = []

    def make(target: str, count: int = 1, **options: Any) -> FakeCuda | FakeHip:
        fakes.append(stand_in(target, count, **options))
        config.update("strict", bundles / f"{target}.zip")
        return fakes[-1]

    yield make
    assert [error for fake in fakes for error in fake.errors] == []
