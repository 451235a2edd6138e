"""Device memory and LDS, in which each byte knows what may be done to it."""

from __future__ import annotations

import numpy as np

BASE = 0x7F10_0000_0000
_GAP = 4096  # bytes between tensors, which nothing may touch

READ, WRITE = np.uint8(1), np.uint8(2)


class OutOfBounds(Exception):
    """An access to a byte that the access has no right to."""


class WrongCoverage(Exception):
    """An output byte that was not written exactly once."""


def _windows(array: np.ndarray, size: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(array, size, writeable=True)


class Memory:
    """Bytes from ``base`` on, none of which may be touched until ``allow`` says so."""

    def __init__(self, size: int, base: int = BASE) -> None:
        self.base = base
        self.data = np.full(size, 0xFF, np.uint8)
        self.rights = np.zeros(size, np.uint8)
        self.writes = np.zeros(size, np.uint8)
        self._free = _GAP

    def reserve(self, size: int, align: int = 256) -> int:
        """The address of ``size`` new bytes, a gap before and after them."""
        start = -(-self._free // align) * align
        self._free = start + size + _GAP
        if self._free > self.data.size:
            raise MemoryError(f"{size} bytes do not fit")
        return self.base + start

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """A view of memory."""
        return self.data[address - self.base :][:size]

    def allow(self, address: int, size: int, rights: np.uint8) -> None:
        """Give bytes rights."""
        self.rights[address - self.base :][:size] |= rights

    def load(self, addresses: np.ndarray, size: int, what: str) -> np.ndarray:
        """``size`` bytes at each address, (lanes, size)."""
        at = self._check(addresses, size, READ, f"{what} reads")
        return _windows(self.data, size)[at]

    def store(self, addresses: np.ndarray, values: np.ndarray, what: str) -> None:
        """Store (lanes, size) bytes."""
        size = values.shape[1]
        at = self._check(addresses, size, WRITE, f"{what} writes")
        _windows(self.data, size)[at] = values
        np.add.at(self.writes, at[:, None] + np.arange(size), 1)

    def _check(self, addresses: np.ndarray, size: int, right: np.uint8, what: str) -> np.ndarray:
        at = addresses.astype(np.int64) - self.base
        inside = (at >= 0) & (at <= self.data.size - size)
        if inside.all():
            inside = (_windows(self.rights, size)[at] & right).all(axis=1)
        if not inside.all():
            raise OutOfBounds(f"{what} {size} bytes at {int(addresses[~inside][0]):#x}")
        aligned = at % min(size & -size, 16) == 0
        if not aligned.all():
            raise OutOfBounds(f"{what} {size} bytes at {int(addresses[~aligned][0]):#x}, which is not aligned")
        return at

    def check_coverage(self) -> None:
        """Every byte that may be written was, once.

        Raises:
            WrongCoverage: one was not.
        """
        wrong = ((self.rights & WRITE) != 0) & (self.writes != 1)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise WrongCoverage(f"byte {at + self.base:#x} was written {self.writes[at]} times, expected once")


class Lds(Memory):
    """A workgroup's LDS: readable where it has been written."""

    def __init__(self, size: int) -> None:
        super().__init__(max(size, 1), base=0)
        self.rights[:size] = WRITE

    def store(self, addresses: np.ndarray, values: np.ndarray, what: str) -> None:
        super().store(addresses, values, what)
        for byte in range(values.shape[1]):
            self.rights[addresses + byte] |= READ
