"""Attention backend ``torch``: the reference. Plain SDPA, one sequence at a time, on any device."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from outpace.model.arena import KVArena
from outpace.model.attention import AttentionOptions, attend_reference
from outpace.model.masks import MaskSpec
from outpace.model.plan import StepPlan
from outpace.tree import BoolArray


class TorchBackend:
    """Makes steps of the reference backend.

    Args:
        layer_of: Index of each attention module (by ``id``) in the arena.
        masks: The pattern of each layer.
    """

    def __init__(self, layer_of: dict[int, int], masks: SequenceOf[MaskSpec]) -> None:
        self._layer_of, self._masks = layer_of, masks

    def step(self, plan: StepPlan, arena: KVArena) -> TorchStep:
        """Begin one packed pass."""
        return TorchStep(plan, arena, self._layer_of, self._masks)


class TorchStep:
    """One packed pass on the reference backend.

    Args:
        plan: What to compute.
        arena: Where keys and values are; new ones are written to it, layer by layer.
        layer_of: Index of each attention module (by ``id``) in the arena.
        masks: The pattern of each layer.
    """

    def __init__(self, plan: StepPlan, arena: KVArena, layer_of: dict[int, int], masks: SequenceOf[MaskSpec]) -> None:
        self._plan = plan
        self._arena = arena
        self._layer_of = layer_of
        self._masks = masks
        self._cached = plan.cached_lengths()
        self._rows: dict[torch.device, torch.Tensor] = {}
        start = int(plan.write_starts[0])
        self._single = slice(start, start + plan.num_tokens) if plan.batch_size == 1 else None
        self._parts: dict[tuple[int, MaskSpec, torch.device, torch.dtype], _Part] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write the layer's new keys and values, and attend sequence by sequence; see `AttentionStep`."""
        index = self._layer_of[id(module)]
        keys, values = self._arena.layer(index)  # [rows, key_heads, dim]
        new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if self._single is not None:
            keys[self._single] = new_keys
            values[self._single] = new_values
        else:
            rows = self._write_rows(keys.device)
            keys.index_copy_(0, rows, new_keys)
            values.index_copy_(0, rows, new_values)
        outs = [self.attend_one(b, index, query, options) for b in range(self._plan.batch_size)]
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]

    def attend_one(self, b: int, index: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """``[t, heads, value_dim]``: layer ``index`` for sequence ``b`` alone, whose new keys and values are written."""
        keys, values = self._arena.layer(index)
        part = self._part_for(b, self._masks[index], keys.device, query.dtype)
        return attend_reference(
            query[0, :, part.begin : part.end],
            part.select(keys).transpose(0, 1),
            part.select(values).transpose(0, 1),
            part.mask,
            options,
            causal=part.causal,
        ).transpose(0, 1)

    def _write_rows(self, device: torch.device) -> torch.Tensor:
        if device not in self._rows:
            self._rows[device] = torch.from_numpy(self._plan.write_rows()).to(device)
        return self._rows[device]

    def _part_for(self, b: int, spec: MaskSpec, device: torch.device, dtype: torch.dtype) -> _Part:
        """What a sequence attends to under one pattern: the same in all layers that have it."""
        slot = (b, spec, device, dtype)
        if slot not in self._parts:
            self._parts[slot] = self._part(b, spec, device, dtype)
        return self._parts[slot]

    def _part(self, b: int, spec: MaskSpec, device: torch.device, dtype: torch.dtype) -> _Part:
        plan = self._plan
        begin, end = int(plan.cu_seqlens_q[b]), int(plan.cu_seqlens_q[b + 1])
        cached = int(self._cached[b])
        first = min(spec.first_visible(cached), cached)  # nobody in this part sees an earlier row
        runs = self._visible_runs(b, first, end - begin)
        if len(runs) == 1:
            rows: slice | torch.Tensor = slice(runs[0][0], runs[0][0] + runs[0][1])
        else:
            flat = np.concatenate([np.arange(start, start + length, dtype=np.int64) for start, length in runs])
            rows = torch.from_numpy(flat).to(device)
        num_new = end - begin
        if num_new == 1:
            return _Part(begin, end, rows, None, False)
        is_chain_of_pending = int(plan.num_pending[b]) == num_new
        if cached == 0 and is_chain_of_pending and spec.first_visible(num_new - 1) == 0:
            return _Part(begin, end, rows, None, True)
        allowed = self._allowed(b, spec, first)
        mask = torch.zeros(allowed.shape, dtype=dtype, device="cpu")
        mask.masked_fill_(torch.from_numpy(~allowed), float("-inf"))
        return _Part(begin, end, rows, mask.to(device), False)

    def _visible_runs(self, b: int, first: int, num_new: int) -> list[tuple[int, int]]:
        """``(start, length)`` of the arena rows from cached row ``first`` on, neighbours joined."""
        plan = self._plan
        runs: list[tuple[int, int]] = []
        skip = first
        own = range(int(plan.segment_offsets[b]), int(plan.segment_offsets[b + 1]))
        pieces = [(int(plan.segment_starts[s]), int(plan.segment_lengths[s])) for s in own]
        for start, length in [*pieces, (int(plan.write_starts[b]), num_new)]:
            dropped = min(skip, length)
            skip -= dropped
            if length == dropped:
                continue
            if runs and runs[-1][0] + runs[-1][1] == start + dropped:
                runs[-1] = (runs[-1][0], runs[-1][1] + length - dropped)
            else:
                runs.append((start + dropped, length - dropped))
        return runs

    def _allowed(self, b: int, spec: MaskSpec, first: int) -> BoolArray:
        """``bool[t, length]``: pattern by position, and inside the tree only ancestors."""
        plan = self._plan
        begin, end = int(plan.cu_seqlens_q[b]), int(plan.cu_seqlens_q[b + 1])
        cached = int(self._cached[b])
        pending = int(plan.num_pending[b])
        queries = plan.position_ids[begin:end]
        keys = np.concatenate([np.arange(first, cached), queries])
        allowed = spec.allows(torch.from_numpy(queries)[:, None], torch.from_numpy(keys)[None, :]).numpy()
        num_nodes = end - begin - pending
        if num_nodes:
            bits = plan.ancestors[plan.node_offsets[b] : plan.node_offsets[b + 1]]
            nodes = np.arange(num_nodes)
            related = (bits[:, nodes // 64] >> (nodes % 64).astype(np.uint64)) & np.uint64(1)
            allowed[:pending, -num_nodes:] = False
            allowed[pending:, -num_nodes:] &= related.astype(bool)
        result: BoolArray = allowed
        return result


class _Part:
    """What one sequence does in a layer: its tokens, its rows, its mask."""

    __slots__ = ("begin", "causal", "end", "mask", "rows")

    def __init__(
        self, begin: int, end: int, rows: slice | torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> None:
        self.begin, self.end, self.rows, self.mask, self.causal = begin, end, rows, mask, causal

    def select(self, storage: torch.Tensor) -> torch.Tensor:
        """The rows of one layer's storage, in the sequence's order: a view where they are consecutive."""
        return storage[self.rows] if isinstance(self.rows, slice) else storage.index_select(0, self.rows)
