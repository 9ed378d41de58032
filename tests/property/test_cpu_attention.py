"""The CPU backend against the reference, where contexts are too long for the dense oracle: parts, threads, long prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels.team import Team, team
from outpace.model import KVArena, LayerKV, MaskSpec, cpu_backend, pack
from outpace.model.attention import AttentionOptions
from outpace.model.cpu_backend import CpuBackend
from outpace.model.cpu_layout import lay_out
from outpace.model.torch_backend import TorchBackend
from outpace.tree import DraftTrees
from verify_support import make_tree

CPU = torch.device("cpu")
# The reference rounds scores to bfloat16 where there is a soft cap.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 0.06}
PLAIN = AttentionOptions(None, None, None)
MODULE = torch.nn.Identity()


class ManyThreads(Team):
    """As many threads as a test wants, whatever torch uses."""

    def __init__(self, number: int) -> None:
        super().__init__(team()._region)
        self.number = number

    @property
    def num_threads(self) -> int:
        return self.number if self.shares_threads else 1


@dataclass
class Case:
    """A step of a batch: of each sequence cached, pending and drafted tokens."""

    sizes: list[tuple[int, int, int]]
    layer: LayerKV
    group: int
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        layer, keys = self.layer, range(len(self.sizes))
        self.arena = KVArena([layer], max_rows=20_000, initial_rows=64)
        for b, (cached, pending, nodes) in enumerate(self.sizes):
            self.arena.open(b)
            if cached:
                self.arena.prepare(b, cached)
                self.arena.commit([b], [cached], None)
            self.arena.prepare(b, pending + nodes)
        for stored in self.arena.layer(0):
            stored.copy_(torch.randn(stored.shape, generator=generator))
        trees = [
            make_tree(list(range(nodes)), [int(rng.integers(-1, node)) for node in range(nodes)])
            for _, _, nodes in self.sizes
        ]
        self.plan = pack(
            pending=[np.full(pending, 5, np.int32) for _, pending, _ in self.sizes],
            first_positions=[cached for cached, _, _ in self.sizes],
            trees=DraftTrees.concatenate(trees),
            segments=[self.arena.segments(b) for b in keys],
            write_starts=[self.arena.write_start(b) for b in keys],
            wants_logits=[True for _ in keys],
        )
        shapes = (
            (layer.key_heads * self.group, layer.key_dim),
            (layer.key_heads, layer.key_dim),
            (layer.value_heads, layer.value_dim),
        )
        self.packed = [
            torch.randn((1, self.plan.num_tokens, *shape), generator=generator).to(layer.dtype).transpose(1, 2)
            for shape in shapes
        ]

    def run(self, backend: TorchBackend | CpuBackend, options: AttentionOptions = PLAIN) -> torch.Tensor:
        return backend.step(self.plan, self.arena).attend(MODULE, *self.packed, None, options)

    def compare(self, spec: MaskSpec, options: AttentionOptions = PLAIN, threads: Team | None = None) -> torch.Tensor:
        """Both backends' output is close, and what they write to the arena the same; the CPU backend's output."""
        before = [stored.clone() for stored in self.arena.layer(0)]
        expected = self.run(TorchBackend({id(MODULE): 0}, [spec]), options)
        written = [stored.clone() for stored in self.arena.layer(0)]
        for stored, old in zip(self.arena.layer(0), before, strict=True):
            stored.copy_(old)
        found = self.run(CpuBackend({id(MODULE): 0}, [spec], threads), options)
        torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE[self.layer.dtype], rtol=0.02)
        for stored, wanted in zip(self.arena.layer(0), written, strict=True):
            assert torch.equal(stored, wanted)
        return found


def layer(dtype: torch.dtype = torch.float32, key_heads: int = 2, key_dim: int = 32, value_dim: int = 32) -> LayerKV:
    return LayerKV(key_heads, key_dim, key_heads, value_dim, dtype, CPU)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_long_contexts_in_many_threads(dtype: torch.dtype, data: st.DataObject) -> None:
    sizes = st.tuples(st.sampled_from([0, 5, 130, 511, 512, 700, 1500]), st.integers(1, 3), st.sampled_from([0, 1, 20]))
    key_dim, value_dim = data.draw(st.sampled_from([(32, 32), (64, 64), (48, 24), (128, 32)]))
    case = Case(
        data.draw(st.lists(sizes, min_size=1, max_size=4)),
        layer(dtype, data.draw(st.integers(1, 3)), key_dim, value_dim),
        data.draw(st.sampled_from([1, 2, 3, 8])),
        data.draw(st.integers(0, 100)),
    )
    spec = data.draw(st.sampled_from([MaskSpec("full"), MaskSpec("window", 200), MaskSpec("chunk", 128)]))
    heads = case.layer.key_heads * case.group
    options = AttentionOptions(
        scaling=data.draw(st.sampled_from([None, 0.3])),
        softcap=data.draw(st.sampled_from([None, 20.0])),
        sinks=data.draw(st.sampled_from([None, torch.linspace(-2, 4, heads)])),
    )
    case.compare(spec, options, ManyThreads(data.draw(st.integers(1, 4))))


def test_a_long_context_is_split_and_merged_in_one_order() -> None:
    case = Case([(3000, 1, 0)], layer(torch.bfloat16, 1), 4)
    assert lay_out(case.plan, MaskSpec("full"), 1, 4, 4, 128).num_parts >= 4
    assert lay_out(case.plan, MaskSpec("full"), 1, 4, 1, 128).num_parts == 0
    backend = CpuBackend({id(MODULE): 0}, [MaskSpec("full")], ManyThreads(4))
    outputs = [case.run(backend) for _ in range(20)]
    assert all(torch.equal(outputs[0], other) for other in outputs)
    case.compare(MaskSpec("full"), threads=ManyThreads(4))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_long_prompts_go_the_way_of_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "MOST_TOKENS", 40)
    case = Case([(0, 100, 0), (300, 1, 7), (50, 41, 0), (10, 40, 0)], layer(dtype), 2)
    assert lay_out(case.plan, MaskSpec("full"), 2, 2, 1, 40).long == [0, 2]
    for spec in (MaskSpec("full"), MaskSpec("window", 30)):
        case.compare(spec)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_torchs_threads_one_does_it_all(dtype: torch.dtype) -> None:
    alone = Team(None)
    assert alone.num_threads == 1
    assert not alone.shares_threads
    Case([(700, 1, 0), (20, 2, 9)], layer(dtype), 2).compare(MaskSpec("full"), threads=alone)


def test_inputs_that_are_not_contiguous() -> None:
    case = Case([(40, 1, 3), (7, 2, 0)], layer(), 2)
    plain = case.compare(MaskSpec("full"))
    case.packed = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in case.packed]
    assert all(x.stride(3) != 1 for x in case.packed)
    assert torch.equal(case.compare(MaskSpec("full")), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_go_the_way_of_the_reference(dtype: torch.dtype) -> None:
    case = Case([(40, 1, 3)], layer(dtype), 2)
    expected = case.run(TorchBackend({id(MODULE): 0}, [MaskSpec("full")]))
    assert torch.equal(case.run(CpuBackend({id(MODULE): 0}, [MaskSpec("full")])), expected)


def test_two_kinds_of_layers_in_turns() -> None:
    """The parameter block is filled for one kind of layer, then for the other, then for another step."""
    wide, narrow = layer(key_dim=64), layer(key_dim=32, value_dim=16)
    modules = [torch.nn.Identity(), torch.nn.Identity()]
    specs = [MaskSpec("full"), MaskSpec("window", 9)]
    cases = [Case([(50, 1, 2)], wide, 2), Case([(50, 1, 2)], narrow, 2)]
    expected = [case.compare(spec) for case, spec in zip(cases, specs, strict=True)]
    backends = [CpuBackend({id(module): 0}, [spec]) for module, spec in zip(modules, specs, strict=True)]
    for _ in range(2):
        steps = [backend.step(case.plan, case.arena) for backend, case in zip(backends, cases, strict=True)]
        for _ in range(2):
            for step, module, case, wanted in zip(steps, modules, cases, expected, strict=True):
                assert torch.equal(step.attend(module, *case.packed, None, PLAIN), wanted)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("part", range(3), ids=["query", "key", "value"])
def test_nan_is_seen_and_stays_in_its_sequence(part: int, dtype: torch.dtype) -> None:
    case = Case([(40, 1, 0), (40, 1, 0)], layer(dtype), 2)
    case.packed[part][0, 0, 0, 3] = float("nan")
    found = case.run(CpuBackend({id(MODULE): 0}, [MaskSpec("full")]))
    assert torch.isnan(found[0, 0, 0]).any()
    assert torch.isfinite(found[0, 1]).all()
