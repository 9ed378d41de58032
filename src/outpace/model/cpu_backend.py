"""Attention backend ``cpu``: one call a layer for the whole ragged batch, see `outpace.kernels.attention`.

Layers that the kernel does not know (another device, another dtype, values with other heads than keys) and long parts of
prompts, for which a library's matrix products are faster, go the way of the reference backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from outpace.kernels import blocks
from outpace.kernels.attention import attention_kernel, scratch_bytes
from outpace.kernels.team import Team, team
from outpace.model.arena import KVArena
from outpace.model.attention import AttentionOptions
from outpace.model.cpu_layout import Layout, lay_out
from outpace.model.masks import MaskSpec
from outpace.model.plan import StepPlan
from outpace.model.storage import LayerKV
from outpace.model.torch_backend import TorchStep

DTYPES = (torch.float32, torch.bfloat16)
# New tokens of a sequence that the kernel takes. On the machine it was measured on (EPYC with AVX-512, head width 64) it was
# faster than torch's SDPA for every length from 32 to 2048, by 1.1 to 2.0 times.
MOST_TOKENS = 2048
_LOG2_E = 1.4426950408889634


def supports(layer: LayerKV) -> bool:
    """Whether the kernel knows what this layer stores."""
    return layer.device.type == "cpu" and layer.dtype in DTYPES and layer.key_heads == layer.value_heads


class CpuBackend:
    """What lives as long as a target: the kernel, the parameter block and memory to work in.

    Args:
        layer_of: Index of each attention module (by ``id``) in the arena.
        masks: The pattern of each layer.
        threads: What to run in.
    """

    def __init__(self, layer_of: dict[int, int], masks: SequenceOf[MaskSpec], threads: Team | None = None) -> None:
        self.layer_of, self.masks = layer_of, list(masks)
        self.team = threads or team()
        self.kernel = attention_kernel()
        self.parameters = np.zeros(blocks.PARAMETERS, np.int64)
        self.address = self.parameters.ctypes.data
        self.edge = np.zeros(48, np.float32)
        self.edge[:32] = -np.inf
        self._memory = np.empty(0, np.uint8)
        self._counters = np.zeros(0, np.int64)
        self._num_steps = 0
        self.filled_for: object = None  # which step and kind of layer the parameter block was last filled for

    def next_number(self) -> int:
        """A number for a step, as no other has."""
        self._num_steps += 1
        return self._num_steps

    def step(self, plan: StepPlan, arena: KVArena) -> CpuStep:
        """One packed pass."""
        return CpuStep(self, plan, arena)

    def memory(self, size: int) -> int:
        """Address of at least ``size`` bytes, at a cache line's beginning; of use until the next call."""
        if len(self._memory) < size + 64:
            self._memory = np.empty(size + size // 4 + 64, np.uint8)
        return (self._memory.ctypes.data + 63) // 64 * 64

    def counters(self, number: int) -> int:
        """Address of that many counters, all 0: the kernel leaves them so."""
        if len(self._counters) < number:
            self._counters = np.zeros(2 * number, np.int64)
        return self._counters.ctypes.data


class CpuStep:
    """One packed pass on the CPU backend; see `AttentionStep`."""

    def __init__(self, backend: CpuBackend, plan: StepPlan, arena: KVArena) -> None:
        self._backend, self._plan, self._arena = backend, plan, arena
        self._num_threads = backend.team.num_threads
        self._torch: TorchStep | None = None
        self._layouts: dict[tuple[MaskSpec, int, int], Layout] = {}
        self._number = backend.next_number()

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write the layer's new keys and values, and attend."""
        index = self._backend.layer_of[id(module)]
        keys, values = self._arena.layer(index)
        dtype = keys.dtype
        if (
            dtype not in DTYPES
            or not query.dtype == key.dtype == value.dtype == dtype
            or query.device.type != "cpu"
            or keys.device.type != "cpu"
            or keys.shape[1] != values.shape[1]
        ):
            return self._reference().attend(module, query, key, value, mask, options)
        heads, num_tokens, key_dim = query.shape[1:]
        key_heads, value_dim = values.shape[1:]
        long = self._prepare(index, key_heads, heads // key_heads, key_dim, value_dim, dtype)
        if query.stride(3) != 1:
            query = query.contiguous()
        if key.stride(3) != 1:
            key = key.contiguous()
        if value.stride(3) != 1:
            value = value.contiguous()
        out = query.new_empty((1, num_tokens, heads, value_dim))
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        parameters = self._backend.parameters
        size = dtype.itemsize
        _, query_head, query_row, _ = query.stride()
        _, key_head, key_row, _ = key.stride()
        _, value_head, value_row, _ = value.stride()
        parameters[: blocks.SCALE] = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            query_row * size, query_head * size, key_row * size, key_head * size, value_row * size, value_head * size,
        )  # fmt: skip
        parameters[blocks.NEXT_ITEM : blocks.HALVES] = 0
        floats = parameters[blocks.SCALE : blocks.NEXT_ITEM].view(np.float64)
        scaling = key_dim**-0.5 if options.scaling is None else options.scaling
        if options.softcap is None:
            floats[:] = (scaling * _LOG2_E, 0.0)
        else:
            floats[:] = (options.softcap * _LOG2_E, scaling / options.softcap)
        self._backend.team.run(self._backend.kernel, self._backend.address, self._num_threads)
        for b in long:
            begin, end = int(self._plan.cu_seqlens_q[b]), int(self._plan.cu_seqlens_q[b + 1])
            out[0, begin:end] = self._reference().attend_one(b, index, query, options)
        return out

    def _reference(self) -> TorchStep:
        if self._torch is None:
            self._torch = TorchStep(self._plan, self._arena, self._backend.layer_of, self._backend.masks)
        return self._torch

    def _prepare(
        self, index: int, key_heads: int, group: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> list[int]:
        """Fill in what is the same for layers that are alike; the sequences that the kernel leaves out."""
        backend = self._backend
        kind = (backend.masks[index], key_heads, group)
        layout = self._layouts.get(kind)
        if layout is None:
            layout = lay_out(self._plan, backend.masks[index], key_heads, group, self._num_threads, MOST_TOKENS)
            self._layouts[kind] = layout
        filled_for = (self._number, kind, key_dim, value_dim, dtype)
        if backend.filled_for == filled_for:
            return layout.long
        backend.filled_for = filled_for
        rows = layout.block_rows * group
        scratch = math.ceil(scratch_bytes(rows, key_dim, value_dim) / 64) * 64
        part = rows * ((value_dim + 15) // 16 * 64 + 8)
        num_places = layout.num_parts * key_heads
        memory = backend.memory(scratch * self._num_threads + part * num_places)
        backend.parameters[blocks.HALVES :] = (
            dtype == torch.bfloat16, key_heads, group, key_dim, value_dim,
            len(layout.items), layout.items.ctypes.data, layout.sequences.ctypes.data, layout.runs.ctypes.data,
            layout.rows.ctypes.data, backend.edge.ctypes.data, backend.counters(num_places),
            memory + scratch * self._num_threads, part, memory, scratch,
        )  # fmt: skip
        return layout.long
