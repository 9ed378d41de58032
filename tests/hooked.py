"""Helpers for tests of the Transformers hook: the same call with it and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf

import families
import outpace
from outpace.draft import OracleDrafter

LENGTHS = (5, 33, 16)
PAD = 0


def padded(prompts: Sequence[Sequence[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, padded on the left."""
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def batch(lengths: Sequence[int] = LENGTHS) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded."""
    return padded(families.prompts(families.VOCAB, seed=0, lengths=lengths))


def oracle_of(inputs: dict[str, torch.Tensor], sequences: torch.Tensor, accept: float = 0.7) -> OracleDrafter:
    """An oracle that knows these outputs."""
    length = inputs["input_ids"].shape[1]
    mask = inputs.get("attention_mask", inputs["input_ids"] != PAD)
    known = {}
    for index, row in enumerate(sequences.tolist()):
        source = index * len(inputs["input_ids"]) // len(sequences)
        skipped = int((mask[source] == 0).sum())
        known[tuple(row[skipped:length])] = row[length:]
    return OracleDrafter(accept, known, vocab_size=families.VOCAB)


def both(model: hf.PreTrainedModel, inputs: dict[str, torch.Tensor], **arguments: Any) -> tuple[Any, Any]:
    """What `generate` returns without the hook, and with it under drafts most of which are right."""
    plain = model.generate(**inputs, **arguments)
    sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
    oracle = oracle_of(inputs, sequences)
    return plain, model.generate(**inputs, **arguments, custom_generate=outpace.generate, drafter=oracle, guard=False)


def assert_same(model: hf.PreTrainedModel, inputs: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
    """Demands equal ids of equal shape and type; returns them."""
    plain, found = both(model, inputs, **arguments)
    assert found.dtype == plain.dtype
    assert found.device == plain.device
    assert found.tolist() == plain.tolist()
    return found
