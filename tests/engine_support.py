"""Helpers for tests that run the engine on tiny models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers as hf

import families
from outpace.draft import OracleDrafter
from outpace.engine import Engine, Output
from outpace.engine.output import Progress

TIE = 1e-5  # logits


@dataclass
class Tally:
    """Tokens compared, and ties among the first differences."""

    tokens: int = 0
    ties: int = 0

    def compare(self, model: hf.PreTrainedModel, prompt: Sequence[int], found: list[int], expected: list[int]) -> None:
        """Demands equal outputs; the only excuse is that the two best logits are closer than `TIE`."""
        assert expected, "an empty expectation compares nothing"
        self.tokens += len(expected)
        if found == expected:
            return
        assert len(found) == len(expected), f"{len(found)} tokens, expected {len(expected)}"
        place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        gap = top_gap(model, [*prompt, *expected[:place]])
        assert gap < TIE, (
            f"token {place} is {found[place]}, expected {expected[place]}; the best two are {gap:.2e} apart"
        )
        self.ties += 1

    def check(self) -> None:
        """Ties must be rarer than 1 in 10,000 tokens."""
        assert self.tokens > 0
        assert self.ties * 10_000 < self.tokens, f"{self.ties} ties in {self.tokens} tokens"


@torch.no_grad()
def top_gap(model: hf.PreTrainedModel, text: Sequence[int]) -> float:
    """How far the best logit leads after `text`, in a plain pass."""
    best = model(torch.tensor([list(text)])).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def oracle_for(reference: families.Reference, accept: float, **options: int) -> OracleDrafter:
    """An oracle that knows the family's greedy continuations."""
    known = {tuple(p): c for p, c in zip(reference.prompts, reference.continuations, strict=True)}
    return OracleDrafter(accept, known, vocab_size=families.VOCAB, **options)


def run_to_end(engine: Engine) -> dict[tuple[str, int], Output]:
    """Steps until nothing is left; outputs by request id and sample."""
    return collect(progress for _ in steps(engine) for progress in _)


def steps(engine: Engine) -> Iterable[list[Progress]]:
    """The progress of each step until nothing is left."""
    for _ in range(10_000):
        if not engine.has_work:
            return
        yield engine.step()
    raise AssertionError("the engine does not come to an end")


def collect(progress: Iterable[Progress]) -> dict[tuple[str, int], Output]:
    """Finished outputs by request id and sample; each must be delivered once."""
    found: dict[tuple[str, int], Output] = {}
    for one in progress:
        if one.output is not None:
            key = (one.request_id, one.sample_index)
            assert key not in found, f"{key} was delivered twice"
            found[key] = one.output
    return found


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request: no row, no sequence in the arena or the drafter, no progress."""
    assert not engine.has_work
    engine.arena.check()
    assert engine.arena.num_used == 0
    assert engine.arena.num_available == engine.arena.max_rows
    sequences = getattr(engine.drafter, "_sequences", {})
    assert not sequences, f"the drafter still has {sorted(sequences)}"


def plain_logits(model: hf.PreTrainedModel, text: Sequence[int]) -> np.ndarray:
    """`float32[len(text), vocab]` of a plain pass."""
    with torch.no_grad():
        return model(torch.tensor([list(text)])).logits[0].float().numpy()
