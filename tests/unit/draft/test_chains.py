from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import suffixtwin
from drafting import committed, draft_one, texts
from outpace.draft import build_drafter
from outpace.draft.base import Drafter
from outpace.errors import ConfigError, InputError, LifecycleError
from outpace.tree import Origin

SPECS = ["none", "lookup", "llma", "suffix", "suffix(full_draft=true)"]
BY_TOKENS_ALONE = SPECS[1:]


def first_match_twin(text: Sequence[int], shortest: int, longest: int, size: int) -> list[int]:
    text = list(text)
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for begin in range(len(text) - n):
            if text[begin : begin + n] == text[-n:]:
                return text[begin + n : begin + n + size]
    return []


def suffix_twin(text: Sequence[int], size: int, full: bool) -> list[int]:
    text = list(text)
    length, end = suffixtwin.longest_match(text)
    while full and length > 1 and len(text) - 1 - end < size:
        length -= 1
        end = suffixtwin.longest_foreign_match(text, text[-length:])[1]
    return text[end + 1 : end + 1 + size] if length else []


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
def test_lookup_equals_transformers(ngram: int) -> None:
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    theirs = PromptLookupCandidateGenerator(num_output_tokens=10, max_matching_ngram_size=ngram, max_length=10_000)
    drafted = 0
    for text in texts(120, seed=ngram):
        ids = torch.from_numpy(text.astype(np.int64))[None]
        expected = theirs.get_candidates(ids)[0][0, len(text) :].tolist()
        assert draft_one(f"lookup(ngram={ngram})", text).tokens.tolist() == expected
        drafted += len(expected)
    assert drafted > 300


@pytest.mark.parametrize(("shortest", "copy", "longest"), [(2, 7, 5), (1, 3, 1), (3, 40, 4)])
def test_llma_equals_its_twin(shortest: int, copy: int, longest: int) -> None:
    spec = f"llma(match_length={shortest}, copy_length={copy}, longest_match={longest})"
    drafted = 0
    for text in texts(120, seed=7):
        expected = first_match_twin(text.tolist(), shortest, longest, copy)
        assert draft_one(spec, text).tokens.tolist() == expected
        drafted += len(expected)
    assert drafted > 100


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("size", [3, 40])
def test_suffix_equals_its_twin(full: bool, size: int) -> None:
    spec = f"suffix(draft_size={size}, full_draft={str(full).lower()})"
    drafted = 0
    for text in texts(100, seed=size):
        expected = suffix_twin(text.tolist(), size, full)
        assert draft_one(spec, text).tokens.tolist() == expected
        drafted += len(expected)
    assert drafted > 150


def test_full_draft_changes_a_loop() -> None:
    loop = np.array([1, 2, 3] * 20, np.int32)
    assert len(draft_one("suffix", loop).tokens) == 3  # the match ended one turn ago
    assert draft_one("suffix(full_draft=true)", loop).tokens.tolist() == ([1, 2, 3] * 14)[:40]


def test_min_match() -> None:
    text = np.array([5, 6, 7, 8, 5, 6], np.int32)
    assert draft_one("suffix(min_match=2)", text).tokens.tolist() == [7, 8, 5, 6]
    assert draft_one("suffix(min_match=3)", text).tokens.tolist() == []


@pytest.mark.parametrize("spec", BY_TOKENS_ALONE)
def test_observed_tokens_count_like_the_prompt(spec: str) -> None:
    for text in texts(20, seed=11):
        cut = len(text) // 3
        drafter = build_drafter(spec)
        drafter.open(4, text[:cut])
        at = cut
        while at < len(text):
            drafter.propose([4], np.array([40], np.int32))
            drafter.observe([4], committed([text[at : at + 3]]))
            at += 3
        got = drafter.propose([4], np.array([40], np.int32))
        assert got.tokens.tolist() == draft_one(spec, text).tokens.tolist()


@pytest.mark.parametrize("spec", SPECS)
def test_batch_equals_single_sequences_and_caps_hold(spec: str) -> None:
    drafter = build_drafter(spec)
    prompts = texts(8, seed=5)
    for key, prompt in enumerate(prompts):
        drafter.open(key, prompt)
    keys, caps = [6, 0, 3, 7, 1], np.array([0, 1, 40, 5, 2], np.int32)
    trees = drafter.propose(keys, caps).validate()
    assert trees.batch_size == 5
    assert (trees.sizes <= caps).all()
    for b, key in enumerate(keys):
        alone = draft_one(spec, prompts[key])
        assert trees.tree(b).tokens.tolist() == alone.tokens[: caps[b]].tolist()
        assert trees.tree(b).log_probs.tolist() == alone.log_probs[: caps[b]].tolist()


@pytest.mark.parametrize(
    ("spec", "origin"), [("lookup", Origin.LOOKUP), ("llma", Origin.LLMA), ("suffix", Origin.DYNAMIC)]
)
def test_trees_are_chains_with_their_origin_and_honest_estimates(spec: str, origin: Origin) -> None:
    trees = draft_one(spec, np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], np.int32))
    assert len(trees.tokens) >= 7
    assert trees.parents.tolist() == list(range(-1, len(trees.tokens) - 1))
    assert set(trees.origins.tolist()) == {int(origin)}
    assert (np.diff(trees.log_probs) > 0).all()  # each accepted token makes the match longer
    longer = draft_one(spec, np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], np.int32))
    assert longer.log_probs[0] == trees.log_probs[1]
    far = draft_one(spec, np.arange(500, dtype=np.int32).repeat(2)[:999].tolist() * 2)
    assert far.log_probs.max() < 0


@pytest.mark.parametrize("spec", SPECS)
def test_forks_go_on_alone(spec: str) -> None:
    drafter = build_drafter(spec)
    prompt = np.array([1, 2, 3, 4, 1, 2], np.int32)
    drafter.open(1, prompt)
    drafter.fork(1, 2)
    drafter.observe([1, 2], committed([[3], [1, 2]]))
    trees = drafter.propose([1, 2], np.array([40, 40], np.int32))
    assert trees.tree(0).tokens.tolist() == draft_one(spec, [*prompt, 3]).tokens.tolist()
    assert trees.tree(1).tokens.tolist() == draft_one(spec, [*prompt, 1, 2]).tokens.tolist()
    drafter.close(1)
    drafter.propose([2], np.array([4], np.int32))


@pytest.mark.parametrize("spec", SPECS)
def test_misuse_raises(spec: str) -> None:
    drafter: Drafter = build_drafter(spec)
    prompt = np.array([1, 2, 1], np.int32)
    drafter.open(1, prompt)
    with pytest.raises(LifecycleError, match="sequence 1 is already open"):
        drafter.open(1, prompt)
    with pytest.raises(LifecycleError, match="sequence 2 is not open"):
        drafter.close(2)
    with pytest.raises(LifecycleError, match="not open"):
        drafter.fork(2, 3)
    with pytest.raises(LifecycleError, match="already open"):
        drafter.fork(1, 1)
    if spec != "none":
        with pytest.raises(LifecycleError, match="sequence 5 is not open"):
            drafter.propose([5], np.array([4], np.int32))
        with pytest.raises(LifecycleError, match="sequence 5 is not open"):
            drafter.observe([5], committed([[1]]))
    drafter.close(1)
    drafter.open(1, prompt)


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="found -1"):
        build_drafter("suffix").open(0, np.array([3, -1], np.int32))


@pytest.mark.parametrize(
    "spec",
    [
        "suffix(draft_size=0)",
        "suffix(draft_size=2.5)",
        "suffix(full_draft=7)",
        "suffix(min_match=0)",
        "lookup(ngram=0)",
        "lookup(draft_size=-1)",
        "llma(match_length=none)",
        "llma(copy_length=true)",
    ],
)
def test_options_are_checked(spec: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        build_drafter(spec)


def test_many_observed_tokens_need_no_reserve() -> None:
    drafter = build_drafter("suffix")
    drafter.open(0, np.array([1], np.int32))
    text = np.random.default_rng(0).integers(0, 3, 3000).astype(np.int32)
    for at in range(0, len(text), 7):
        drafter.observe([0], committed([text[at : at + 7]]))
    expected = draft_one("suffix", [1, *text])
    assert drafter.propose([0], np.array([40], np.int32)).tokens.tolist() == expected.tokens.tolist()
