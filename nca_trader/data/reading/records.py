"""The rows of a file as arrays, one row an asset and time."""

from __future__ import annotations

import dataclasses

import numpy as np

CAPACITY = 1 << 20  # rows of an array to begin with


@dataclasses.dataclass
class Records:
    """Rows in the order of the file, 8 bytes a number and no text.

    Attributes:
      columns: `[rows]` each: time datetime64[ns], symbol int32 (a place in `symbols`), present
        bool, and float64 open, high, low, close, volume, and what else the file has.
      symbols: the assets' names, in the order of the file.
    """

    columns: dict[str, np.ndarray]
    symbols: list[str]

    def __len__(self) -> int:
        return len(self.columns["time"])

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        self.columns[name] = value

    def take(self, mask: np.ndarray) -> Records:
        """The rows where `mask` is True; the same arrays, not copies, where it is so everywhere."""
        columns = self.columns if mask.all() else {n: c[mask] for n, c in self.columns.items()}
        return Records(dict(columns), self.symbols)


class Growing:
    """An array that chunks are added to.

    It grows twofold, and no page of it takes memory before it is written to. A list of the chunks,
    joined at the end, would take twice the memory, as what is freed of it lies scattered.
    """

    def __init__(self, dtype: np.dtype):
        self._array, self._size = np.empty(CAPACITY, dtype), 0

    def add(self, values: np.ndarray) -> None:
        """Puts `values` `[n]` at the end."""
        size = self._size + len(values)
        if size > len(self._array):
            grown = np.empty(max(2 * len(self._array), size), self._array.dtype)
            grown[: self._size] = self._array[: self._size]
            self._array = grown
        self._array[self._size : size] = values
        self._size = size

    @property
    def whole(self) -> np.ndarray:
        """`[size]` all that was added, not a copy."""
        return self._array[: self._size]
