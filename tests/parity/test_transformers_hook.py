"""`model.generate(..., custom_generate=outpace.generate)` returns what it returns without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import families
import outpace
from hooked import LENGTHS, assert_same, batch, both, oracle_of, padded

NEW = 40
FAMILIES = ("llama", "qwen3-moe", "gemma2", "gemma3", "opt", "gpt-neox", "gpt2", "gpt-oss", "phi3")


@pytest.fixture(scope="module")
def model() -> hf.PreTrainedModel:
    return families.build("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_of_every_kind_of_model(family: str) -> None:
    found = assert_same(families.build(family), batch(), max_new_tokens=NEW)
    assert found.shape == (len(LENGTHS), max(LENGTHS) + NEW)


@pytest.mark.parametrize("drafter", ["none", "lookup", "suffix"])
def test_drafters_by_name(model: hf.PreTrainedModel, drafter: str) -> None:
    plain = model.generate(**batch(), max_new_tokens=NEW)
    found = model.generate(**batch(), max_new_tokens=NEW, custom_generate=outpace.generate, drafter=drafter)
    assert found.tolist() == plain.tolist()


def test_ids_alone_and_lengths(model: hf.PreTrainedModel) -> None:
    [prompt] = families.prompts(families.VOCAB, seed=0, lengths=[9])
    alone = {"input_ids": torch.tensor([prompt])}
    assert assert_same(model, alone, max_new_tokens=1).shape == (1, 10)
    assert assert_same(model, alone, max_length=20).shape == (1, 20)
    assert assert_same(model, alone, max_new_tokens=NEW, use_cache=False).shape == (1, 9 + NEW)
    assert assert_same(model, alone).shape == model.generate(**alone).shape
    config = hf.GenerationConfig(max_new_tokens=7)
    assert assert_same(model, alone, generation_config=config).shape == (1, 16)


def test_masks_may_be_inferred_from_padding(model: hf.PreTrainedModel) -> None:
    assert_same(model, {"input_ids": batch()["input_ids"]}, max_new_tokens=NEW, pad_token_id=0)


@pytest.mark.parametrize("pad", [0, 3])
def test_rows_end_at_several_ids_and_are_padded(model: hf.PreTrainedModel, pad: int) -> None:
    length = max(LENGTHS)
    plain = model.generate(**batch(), max_new_tokens=NEW)
    eos = [int(plain[0, length + 4]), int(plain[1, length + 11]), int(plain[2, length + 20])]
    found = assert_same(model, batch(), max_new_tokens=NEW, eos_token_id=eos, pad_token_id=pad)
    assert found.shape[1] < length + NEW
    assert found[0, -1] == pad
    assert_same(model, batch(), max_new_tokens=NEW, eos_token_id=eos)  # the first of them is the padding then
    assert_same(model, batch(), max_new_tokens=NEW, eos_token_id=eos, min_new_tokens=15, pad_token_id=pad)
    assert_same(model, batch(), max_new_tokens=NEW, eos_token_id=eos, min_length=length + 9, pad_token_id=pad)


class Shift(hf.LogitsProcessor):
    """Depends on the order of the text and on its length, and changes scores in place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = (input_ids[:, -1:] * 7 + input_ids.shape[1]) % scores.shape[1]
        return scores.scatter_add_(1, wanted, torch.full_like(scores[:, :1], 3.0))


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2, "repetition_penalty": 0.8},
    "bad words": {"bad_words_ids": [[5], [6, 7], [31]], "eos_token_id": 9, "pad_token_id": 0},
    "suppressed": {"suppress_tokens": list(range(400)), "begin_suppress_tokens": [401, 402]},
    "forced ends": {"forced_bos_token_id": 4, "forced_eos_token_id": 8},
    "bias": {"sequence_bias": [[[11], 4.0], [[12, 13], 9.0]]},
    "decay": {"exponential_decay_length_penalty": (5, 1.2), "eos_token_id": 9, "pad_token_id": 0},
    "prompt": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "allowed by place": {
        "prefix_allowed_tokens_fn": lambda row, text: [t for t in range(512) if t % 5 != (int(text[-1]) + row) % 5]
    },
    "of the caller's own": {"logits_processor": hf.LogitsProcessorList([Shift()])},
    "normalised": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": hf.WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=3)},
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors(model: hf.PreTrainedModel, case: str) -> None:
    assert_same(model, batch(), max_new_tokens=24, **PROCESSORS[case])


def test_processors_see_padding_as_without_the_hook(model: hf.PreTrainedModel) -> None:
    """A penalty on the padding's id: it matters whether the processor takes padding for text."""
    inputs = padded(families.prompts(families.VOCAB, seed=0, lengths=LENGTHS), pad=3)
    boost = {"sequence_bias": [[[3], 8.0]], "max_new_tokens": 24}
    assert_same(model, inputs, repetition_penalty=3.0, **boost)
    processors = hf.LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(3.0)])
    assert_same(model, inputs, logits_processor=processors, **boost)


def test_drafts_are_accepted(model: hf.PreTrainedModel) -> None:
    """Otherwise the other tests would say little."""
    plain = model.generate(**batch(), max_new_tokens=NEW, repetition_penalty=1.3)
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    found = model.generate(
        **batch(), max_new_tokens=NEW, repetition_penalty=1.3, custom_generate=outpace.generate,
        drafter=oracle_of(batch(), plain), guard=False,
    )  # fmt: skip
    handle.remove()
    assert found.tolist() == plain.tolist()
    assert len(passes) < NEW / 2


def test_a_processor_with_a_state_is_called_as_often_as_there_are_tokens(model: hf.PreTrainedModel) -> None:
    class Turn(hf.LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return scores.roll(self.calls, dims=1)

    inputs = batch([9])
    plain = model.generate(**inputs, max_new_tokens=NEW, logits_processor=[Turn()])
    mine = Turn()
    found = model.generate(
        **inputs, max_new_tokens=NEW, logits_processor=[mine], custom_generate=outpace.generate,
        drafter=oracle_of(inputs, plain), guard=False,
    )  # fmt: skip
    assert found.tolist() == plain.tolist()
    assert mine.calls == NEW


def test_scores_and_logits(model: hf.PreTrainedModel) -> None:
    length = max(LENGTHS)
    first = model.generate(**batch(), max_new_tokens=NEW)
    eos = [int(first[0, length + 4]), int(first[1, length + 11]), int(first[2, length + 20])]
    plain, found = both(
        model, batch(), max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0, repetition_penalty=1.2,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    assert type(found) is type(plain)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.past_key_values is None
    assert found.attentions is None
    ends = [next((i for i, t in enumerate(row) if t in eos), NEW) for row in plain.sequences[:, length:].tolist()]
    assert len(set(ends)) > 1
    for kind in ("scores", "logits"):
        assert len(found[kind]) == len(plain[kind]) == plain.sequences.shape[1] - length
        for t, (mine, theirs) in enumerate(zip(found[kind], plain[kind], strict=True)):
            assert mine.shape == theirs.shape == (len(LENGTHS), families.VOCAB)
            assert mine.dtype == theirs.dtype == torch.float32
            for row, end in enumerate(ends):
                if t <= end:
                    torch.testing.assert_close(mine[row], theirs[row], rtol=0, atol=2e-4)
                else:
                    assert not mine[row].any(), "finished rows are 0"


def test_a_dict_without_scores(model: hf.PreTrainedModel) -> None:
    plain, found = both(model, batch(), max_new_tokens=3, return_dict_in_generate=True)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.scores is None
    assert found.logits is None


SAMPLING: dict[str, dict[str, Any]] = {
    "default": {},
    "warm": {"temperature": 0.7, "top_k": 0},
    "nucleus": {"top_k": 0, "top_p": 0.7},
    "min-p": {"top_k": 0, "min_p": 0.05, "temperature": 1.2},
    "typical": {"top_k": 0, "typical_p": 0.6},
    "cutoffs": {"top_k": 0, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    "penalised": {"top_k": 20, "repetition_penalty": 1.3},
}
SAMPLES = 400


@pytest.mark.parametrize("case", SAMPLING)
def test_samples_follow_the_distribution(model: hf.PreTrainedModel, case: str) -> None:
    inputs = batch([9])
    keep = {"return_dict_in_generate": True, "output_scores": True}
    scores = model.generate(**inputs, do_sample=True, max_new_tokens=1, **keep, **SAMPLING[case]).scores[0][0]
    expected = SAMPLES * torch.softmax(scores.double(), -1)
    torch.manual_seed(1)
    found = model.generate(
        **inputs, do_sample=True, max_new_tokens=1, num_return_sequences=SAMPLES, custom_generate=outpace.generate,
        kv_tokens=20_000, **SAMPLING[case],
    )  # fmt: skip
    assert found.shape == (SAMPLES, 10)
    counts = torch.bincount(found[:, -1], minlength=families.VOCAB).double()
    assert not counts[expected == 0].any()
    likely = expected >= 5
    parts = [(counts[likely], expected[likely]), (counts[~likely].sum()[None], expected[~likely].sum()[None])]
    statistic = sum(float(((c - e) ** 2 / e.clamp_min(1e-9)).sum()) for c, e in parts if float(e.sum()) > 1)
    freedom = int(likely.sum())
    assert statistic < freedom + 4.5 * (2 * max(freedom, 1)) ** 0.5, (statistic, freedom)


def test_seeds_reproduce_samples_whatever_is_drafted(model: hf.PreTrainedModel) -> None:
    arguments = {**batch(), "do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 2}

    def sample(seed: int, **own: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(**arguments, custom_generate=outpace.generate, guard=False, **own)

    first = sample(3, drafter="none")
    assert first.shape == (2 * len(LENGTHS), max(LENGTHS) + NEW)
    assert first[0].tolist() != first[1].tolist()
    assert sample(3, drafter="suffix").tolist() == first.tolist()
    assert sample(3, drafter=oracle_of(batch(), first[::2])).tolist() == first.tolist()
    assert sample(4, drafter="none").tolist() != first.tolist()


def test_more_rows_than_an_engine_takes_by_default(model: hf.PreTrainedModel) -> None:
    prompts = families.prompts(families.VOCAB, seed=2, lengths=[4 + i % 7 for i in range(40)])
    plain = model.generate(**padded(prompts), max_new_tokens=6)
    found = model.generate(**padded(prompts), max_new_tokens=6, custom_generate=outpace.generate)
    assert found.tolist() == plain.tolist()
