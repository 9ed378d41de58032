"""The attention backends against dense attention, written out token by token in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.model import KVArena, LayerKV, MaskSpec, attention, pack
from outpace.model.attention import AttentionOptions, attend_reference
from outpace.model.cpu_backend import CpuBackend
from outpace.model.torch_backend import TorchBackend
from outpace.tree import DraftTrees
from outpace.verify import verdicts_of
from verify_support import make_tree

CPU = torch.device("cpu")
# Absolute, on outputs of about 1. bfloat16 has 8 bits: inputs are exact, scores and weights are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04}
BACKENDS = {"torch": TorchBackend, "cpu": CpuBackend}
MASKS = [MaskSpec("full"), *(MaskSpec(kind, size) for kind in ("window", "chunk") for size in (1, 3, 7, 20))]


@dataclass
class Sample:
    """One sequence: what is cached in pieces, what is pending, what is drafted."""

    pieces: list[int]  # lengths of its segments
    shares: int | None  # index of an earlier sample that it was forked from after the first piece
    pending: int
    parents: list[int]


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    found: list[Sample] = []
    for index in range(draw(st.integers(1, 4))):
        pieces = draw(st.sampled_from([[], [1], [9], [4, 3], [2, 6, 5], [30]]))
        forkable = [i for i in range(index) if found[i].pieces and found[i].shares is None]
        shares = draw(st.sampled_from([None, *forkable])) if pieces else None
        size = draw(st.sampled_from([0, 0, 1, 5, 12, 70]))
        seed = draw(st.integers(0, 2**16))
        rng = np.random.default_rng(seed)
        parents = [int(rng.integers(-1, node)) for node in range(size)]
        found.append(Sample(pieces, shares, draw(st.sampled_from([1, 1, 2, 7])), parents))
    return found


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: list[int],
    options: AttentionOptions,
) -> torch.Tensor:
    """One token: ``query [heads, dim]`` over the ``visible`` rows of ``keys [length, key_heads, dim]``; ``[heads, width]``."""
    heads, dim = query.shape
    groups = heads // keys.shape[1]
    scaling = 1 / math.sqrt(dim) if options.scaling is None else options.scaling
    out = torch.empty(heads, values.shape[2], dtype=torch.float64)
    for head in range(heads):
        scores = torch.stack([query[head] @ keys[row, head // groups] for row in visible]) * scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.exp()
        total = weights.sum()
        if options.sinks is not None:
            total = total + options.sinks[head].double().exp()
        out[head] = sum(w / total * values[row, head // groups] for w, row in zip(weights, visible, strict=True))
    return out


class Batch:
    """Samples in an arena, with their content beside it: ``keys[b]``, ``values[b]`` in float64, ``[length, heads, dim]``."""

    def __init__(self, found: list[Sample], layer: LayerKV, heads: int, generator: torch.Generator) -> None:
        self.samples, self.layer, self.generator = found, layer, generator
        self.arena = KVArena([layer], max_rows=2000, initial_rows=16)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        helper = 1000  # forks that leave at once: each makes what is there a segment
        for b, sample in enumerate(found):
            pieces = list(sample.pieces)
            self.keys.append(torch.empty(0, layer.key_heads, layer.key_dim, dtype=torch.float64))
            self.values.append(torch.empty(0, layer.value_heads, layer.value_dim, dtype=torch.float64))
            if sample.shares is None:
                self.arena.open(b)
            else:
                other = sample.shares
                self.arena.fork(other, b)
                self.keys[b], self.values[b] = self.keys[other], self.values[other]
            for length in pieces:
                self._extend(b, length)
                self.arena.fork(b, helper)
                self.arena.free(helper)
        self.new = [sample.pending + len(sample.parents) for sample in found]
        for b, count in enumerate(self.new):
            self.arena.prepare(b, count)
        self.query = self._draw(sum(self.new), heads, layer.key_dim)
        self.new_keys = self._draw(sum(self.new), layer.key_heads, layer.key_dim)
        self.new_values = self._draw(sum(self.new), layer.value_heads, layer.value_dim)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.layer.dtype)

    def _extend(self, b: int, length: int) -> None:
        new_keys = self._draw(length, self.layer.key_heads, self.layer.key_dim)
        new_values = self._draw(length, self.layer.value_heads, self.layer.value_dim)
        self.arena.prepare(b, length)
        rows = slice(self.arena.write_start(b), self.arena.write_start(b) + length)
        stored_keys, stored_values = self.arena.layer(0)
        stored_keys[rows], stored_values[rows] = new_keys, new_values
        self.arena.commit([b], [length], None)
        self.keys[b] = torch.cat([self.keys[b], new_keys.double()])
        self.values[b] = torch.cat([self.values[b], new_values.double()])

    def run(self, backend: str, spec: MaskSpec, options: AttentionOptions) -> torch.Tensor:
        """``[T, heads, width]`` by the backend."""
        keys = range(len(self.samples))
        plan = pack(
            pending=[np.full(sample.pending, 5, np.int32) for sample in self.samples],
            first_positions=[self.arena.cached_length(b) for b in keys],
            trees=DraftTrees.concatenate(
                [make_tree(list(range(len(sample.parents))), sample.parents) for sample in self.samples]
            ),
            segments=[self.arena.segments(b) for b in keys],
            write_starts=[self.arena.write_start(b) for b in keys],
            wants_logits=[True for _ in keys],
        )
        module = torch.nn.Identity()
        step = BACKENDS[backend]({id(module): 0}, [spec]).step(plan, self.arena)
        packed = (x.transpose(0, 1)[None] for x in (self.query, self.new_keys, self.new_values))
        return step.attend(module, *packed, spec, options)[0]

    def expect(self, spec: MaskSpec, options: AttentionOptions) -> torch.Tensor:
        """The same, one token at a time: its text is what is cached, what is pending before it, and its ancestors."""
        out, begin = [], 0
        for b, sample in enumerate(self.samples):
            end = begin + self.new[b]
            keys = torch.cat([self.keys[b], self.new_keys[begin:end].double()])
            values = torch.cat([self.values[b], self.new_values[begin:end].double()])
            cached = len(self.keys[b])
            for token in range(self.new[b]):
                rows, node = [], token - sample.pending
                while node >= 0:
                    rows.append(cached + sample.pending + node)
                    node = sample.parents[node]
                text = [*range(cached + min(token + 1, sample.pending)), *reversed(rows)]
                last = len(text) - 1  # a row's position is its place in this text
                if spec.kind == "window":
                    text = text[max(0, last + 1 - spec.size) :]
                elif spec.kind == "chunk":
                    text = text[last // spec.size * spec.size :]
                out.append(attend_dense(self.query[begin + token].double(), keys, values, text, options))
            begin = end
        return torch.stack(out)


@st.composite
def layers(draw: st.DrawFn, dtype: torch.dtype) -> tuple[LayerKV, int]:
    """A layer and its number of query heads."""
    key_heads = draw(st.sampled_from([1, 2, 3]))
    key_dim, value_dim = draw(st.sampled_from([(8, 8), (16, 16), (8, 5), (4, 12), (32, 64), (64, 33), (96, 32)]))
    return LayerKV(key_heads, key_dim, key_heads, value_dim, dtype, CPU), key_heads * draw(st.sampled_from([1, 2, 3]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_packed_attention_is_each_tokens_own(backend: str, dtype: torch.dtype, data: st.DataObject) -> None:
    layer, heads = data.draw(layers(dtype))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    options = AttentionOptions(
        scaling=data.draw(st.sampled_from([None, 0.5, 0.1])),
        softcap=data.draw(st.sampled_from([None, None, 1.5])),
        sinks=data.draw(st.sampled_from([None, None, torch.linspace(-2, 3, heads)])),
    )
    spec = data.draw(st.sampled_from(MASKS))
    batch = Batch(data.draw(samples()), layer, heads, generator)
    found, expected = batch.run(backend, spec, options), batch.expect(spec, options)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("shares", [False, True])
def test_the_strategy_makes_what_it_says(shares: bool) -> None:
    """Several segments, really shared: otherwise the property above would not see them."""
    found = [Sample([4, 3], None, 2, [-1, 0, 0]), Sample([2, 6, 5], 0 if shares else None, 1, [])]
    batch = Batch(found, LayerKV(1, 4, 1, 4, torch.float32, CPU), 2, torch.Generator().manual_seed(0))
    first, second = (batch.arena.segments(b) for b in (0, 1))
    assert [length for _, length in first] == [4, 3]
    assert [length for _, length in second] == ([4, 3, 2, 6, 5] if shares else [2, 6, 5])
    assert (second[:2] == first) == shares
    assert batch.arena.num_used == sum(length for _, length in {*first, *second})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_written_in_a_step_are_those_that_a_commit_keeps(backend: str, dtype: torch.dtype) -> None:
    sample = Sample([3], None, 2, [-1, -1, 1, 2])
    batch = Batch([sample], LayerKV(2, 35, 2, 7, dtype, CPU), 2, torch.Generator().manual_seed(0))
    batch.run(backend, MaskSpec("full"), AttentionOptions(None, None, None))
    batch.arena.commit([0], [2], verdicts_of([[1, 2]], [[1, 2, 9]]))
    rows = [row for start, length in batch.arena.segments(0) for row in range(start, start + length)]
    expected = torch.cat([batch.keys[0], batch.new_keys[[0, 1, 3, 4]].double()])
    assert torch.equal(batch.arena.layer(0)[0][rows].double(), expected)
    expected = torch.cat([batch.values[0], batch.new_values[[0, 1, 3, 4]].double()])
    assert torch.equal(batch.arena.layer(0)[1][rows].double(), expected)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_causal_is_the_causal_mask(heads: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, 7, 4, generator=generator) for n in (heads, 2, 2))
    mask = torch.full((7, 7), float("-inf")).triu(1)
    options = AttentionOptions(0.7, softcap, None)
    torch.testing.assert_close(
        attend_reference(query, key, value, None, options, causal=True),
        attend_reference(query, key, value, mask, options),
        atol=1e-6,
        rtol=0,
    )


def test_scores_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator) for shape in ((4, 37, 8), (2, 50, 8), (2, 50, 6)))
    mask = torch.where(torch.rand(37, 50, generator=generator) < 0.3, float("-inf"), 0.0)
    mask[:, 0] = 0.0
    options = AttentionOptions(0.4, 3.0, torch.randn(4, generator=generator))
    whole = attend_reference(query, key, value, mask, options)
    monkeypatch.setattr(attention, "_LARGEST_SCORES", 4 * 50 * 5)  # five queries at a time
    torch.testing.assert_close(attend_reference(query, key, value, mask, options), whole)
    causal = attend_reference(query, key[:, :37], value[:, :37], None, options, causal=True)
    monkeypatch.undo()
    torch.testing.assert_close(attend_reference(query, key[:, :37], value[:, :37], None, options, causal=True), causal)
