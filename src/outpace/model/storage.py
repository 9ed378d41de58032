"""Rows of keys and values in memory: one tensor for all layers that are alike."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from outpace.errors import ArenaFullError

OUT_OF_ROWS = (
    "Shorten the prompts, lower max_tokens or max_batch_size, or raise kv_tokens (rows) if the machine has more memory."
)
_STAGING_BYTES = 64 * 2**20  # rows on their way take no more memory than this


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer stores for a token.

    Attributes:
        key_heads: Heads of the keys.
        key_dim: Width of one head's key.
        value_heads: Heads of the values.
        value_dim: Width of one head's value.
        dtype: Of both.
        device: Where the layer runs.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values in this layer."""
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * self.dtype.itemsize


class RowStorage:
    """Keys and values of all layers, ``num_rows`` rows of each.

    Attributes:
        num_rows: Rows of every layer.
        row_bytes: Bytes of one row over all layers.

    Args:
        layers: What each layer stores. Layers may differ, also in their device.
        num_rows: To begin with.

    Raises:
        ArenaFullError: There is not that much memory.
    """

    def __init__(self, layers: SequenceOf[LayerKV], num_rows: int) -> None:
        self.row_bytes = sum(layer.row_bytes for layer in layers)
        self.num_rows = 0
        self._groups: dict[LayerKV, list[int]] = {}
        for index, layer in enumerate(layers):
            self._groups.setdefault(layer, []).append(index)
        self._tensors: dict[LayerKV, tuple[torch.Tensor, torch.Tensor]] = {}  # [layers alike, rows, heads, dim] each
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.grow(num_rows)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[rows, heads, key_dim]`` and values ``[rows, heads, value_dim]`` of one layer, as views."""
        return self._views[index]

    def grow(self, num_rows: int) -> None:
        """Take more rows; those that are there keep their content and their place.

        Raises:
            ArenaFullError: There is not that much memory; nothing has changed.
        """
        grown: dict[LayerKV, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in self._groups:
            grown[layer] = self._allocate(layer, num_rows, num_rows - self.num_rows)
            for new, old in zip(grown[layer], self._tensors.get(layer, ()), strict=False):
                new[:, : self.num_rows] = old
        self._tensors = grown
        places = {index: (layer, place) for layer, own in self._groups.items() for place, index in enumerate(own)}
        self._views = [(grown[layer][0][place], grown[layer][1][place]) for _, (layer, place) in sorted(places.items())]
        self.num_rows = num_rows

    def move(self, source: SequenceOf[int], target: SequenceOf[int]) -> None:
        """Copy rows ``source[i]`` to ``target[i]`` in every layer, in that order, some at a time.

        A row that is both must come as a source before it comes as a target.

        Raises:
            ArenaFullError: No memory even for a few rows on their way; nothing has changed.
        """
        if not len(source):
            return
        block = min(len(source), max(16, _STAGING_BYTES // self.row_bytes))
        sizes = [min(block, len(source) - begin) for begin in range(0, len(source), block)]
        work = []
        for layer in self._groups:
            rows = self._index(layer, source), self._index(layer, target)
            work.append((self._tensors[layer], rows, {size: self._allocate(layer, size, size) for size in set(sizes)}))
        for place, size in enumerate(sizes):
            span = slice(place * block, place * block + size)
            for stores, (src, dst), staging in work:
                for store, stage in zip(stores, staging[size], strict=True):
                    torch.index_select(store, 1, src[span], out=stage)
                    store.index_copy_(1, dst[span], stage)

    def check(self) -> None:
        """Audit: every tensor has the same number of rows.

        Raises:
            AssertionError: With what is wrong.
        """
        for layer, stores in self._tensors.items():
            for store in stores:
                assert store.shape[1] == self.num_rows, f"{layer}: {store.shape[1]} rows, expected {self.num_rows}"

    def _index(self, layer: LayerKV, rows: SequenceOf[int]) -> torch.Tensor:
        return torch.as_tensor(rows, dtype=torch.int64, device=layer.device)

    def _allocate(self, layer: LayerKV, num_rows: int, needed: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(self._groups[layer])
        keys = (count, num_rows, layer.key_heads, layer.key_dim)
        values = (count, num_rows, layer.value_heads, layer.value_dim)
        try:
            return (
                torch.zeros(keys, dtype=layer.dtype, device=layer.device),
                torch.zeros(values, dtype=layer.dtype, device=layer.device),
            )
        except (RuntimeError, MemoryError) as error:
            raise ArenaFullError(needed, 0, self.num_rows, self.row_bytes, f"{OUT_OF_ROWS} ({error})") from error
