"""Counting from many threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable


class Counter:
    """A count that any thread adds to without a lock, and without losing any.

    Attributes:
        add: adds one; it is a single call into C, which threads cannot interrupt.
    """

    __slots__ = ("_reads", "add")

    def __init__(self) -> None:
        self.add: Callable[[], int] = itertools.count().__next__
        self._reads = 0

    def value(self) -> int:
        """How often ``add`` was called; only one thread may ask at a time."""
        # Looking at the count moves it on.
        looked = self._reads
        self._reads += 1
        return self.add() - looked
