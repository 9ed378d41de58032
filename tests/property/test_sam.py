"""SAM-Decoding's choice (Algorithm 2) against brute force, and its cursors against matches found anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import committed
from outpace.draft import build_drafter
from outpace.draft.cursors import WALKED, Cursors
from outpace.draft.sources import Sources
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.memory import ResponseMemory
from outpace.tree import Origin
from suffixtwin import longest_foreign_match, longest_match

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=30)
CAP = np.array([1000], np.int32)


def frozen(texts: list[list[int]]) -> FrozenAutomaton:
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    return FrozenAutomaton.build(np.concatenate([np.array(text, np.int32) for text in texts]), offsets)


def sources(shards: list[list[list[int]]], memory: dict[str, list[list[int]]]) -> Sources:
    remembered = ResponseMemory(background=False)
    for name, texts in memory.items():
        for text in texts:
            remembered.remember(name, text)
    corpus: Any = SimpleNamespace(shards=tuple(frozen(texts) for texts in shards))
    return Sources(remembered, (corpus,))


def best_of(shards: list[list[list[int]]], text: list[int]) -> tuple[int, list[int]]:
    """Longest match of the shards, the last of equal ones; what follows its first end there."""
    best: tuple[int, list[int]] = (0, [])
    for texts in shards:
        found = [longest_foreign_match(own, text) for own in texts]
        length = max(f[0] for f in found)
        if length and length >= best[0]:
            first = next(i for i, f in enumerate(found) if f[0] == length)
            best = length, texts[first][found[first][1] + 1 :]
    return best


def choice(
    text: list[int],
    shards: list[list[list[int]]],
    memory: list[list[list[int]]],
    bias: int,
    threshold: int,
    switches: dict[str, bool],
) -> tuple[list[int], int] | None:
    """Tokens and origin of the draft; None to leave the step to the auxiliary drafter."""
    own, end = longest_match(text) if switches["dynamic"] else (0, -1)
    static = best_of(shards if switches["static"] else [], text)
    remembered = best_of(memory if switches["memory"] else [], text)
    foreign, after = remembered if remembered[0] >= static[0] else static
    origin = Origin.MEMORY if remembered[0] >= static[0] else Origin.STATIC
    if foreign > own + (bias if switches["dynamic"] else 0) and foreign >= threshold and after:
        return after[:40], int(origin)
    return (text[end + 1 :][:40], int(Origin.DYNAMIC)) if own and own >= threshold else None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(TEXT, min_size=1, max_size=6),
    st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=3),
    st.lists(TEXT, max_size=4),
    st.integers(0, 4),
    st.integers(0, 6),
    st.fixed_dictionaries({name: st.booleans() for name in ("static", "dynamic", "memory")}),
    st.booleans(),
)
def test_algorithm_2(
    steps: list[list[int]],
    shards: list[list[list[int]]],
    memory: list[list[int]],
    bias: int,
    threshold: int,
    switches: dict[str, bool],
    has_auxiliary: bool,
) -> None:
    has_auxiliary = has_auxiliary or not any(switches.values())
    known = sources(shards, {"mine": memory, "other": [[0, 1, 2] * 9]})
    assert known.memory is not None
    segments = [[d.tolist() for d in s.documents()] for s in known.memory_segments("mine")]
    options = ", ".join(f"{name}={str(value).lower()}" for name, value in switches.items())
    auxiliary = "[lookup]" if has_auxiliary else ""
    drafter = build_drafter(f"sam(l_bias={bias}, l_threshold={threshold}, {options}){auxiliary}", None, known)
    alone = build_drafter("lookup")
    text = list(steps[0])
    drafter.open(3, np.array(text, np.int32), "mine")
    alone.open(3, np.array(text, np.int32))
    for step in [*steps[1:], []]:
        trees = drafter.propose([3], CAP).validate()
        expected = choice(text, shards, segments, bias, threshold if has_auxiliary else 0, switches)
        if expected is None:
            wanted = alone.propose([3], CAP)
            assert trees.tokens.tolist() == (wanted.tokens.tolist() if has_auxiliary else [])
        else:
            assert (trees.tokens.tolist(), set(trees.origins.tolist())) == (expected[0], {expected[1]})
            assert trees.parents.tolist() == list(range(-1, len(expected[0]) - 1))
        drafter.observe([3], committed([step]))
        alone.observe([3], committed([step]))
        text += step


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_batches_of_sequences_that_come_and_go(data: st.DataObject) -> None:
    automata = [frozen(texts) for texts in data.draw(st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=10))]
    cursors = Cursors()
    texts: dict[int, list[int]] = {}
    begins: dict[int, int] = {}
    own: dict[int, tuple[list[FrozenAutomaton], list[FrozenAutomaton]]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["open", "fork", "close", "advance"]))
        new = len(begins)
        if action == "open" or not texts:
            prompt = data.draw(st.lists(st.integers(0, 2), max_size=100))
            cut = data.draw(st.integers(0, len(automata)))
            own[new] = automata[:cut], automata[cut:] if data.draw(st.booleans()) else []
            cursors.open(new, np.array(prompt, np.int32), *own[new])
            texts[new], begins[new] = prompt, max(len(prompt) - WALKED, 0)
        elif action == "fork":
            old = data.draw(st.sampled_from(sorted(texts)))
            cursors.fork(old, new)
            texts[new], begins[new], own[new] = list(texts[old]), begins[old], own[old]
        elif action == "close":
            old = data.draw(st.sampled_from(sorted(texts)))
            cursors.close(old)
            del texts[old]
        else:
            keys = data.draw(st.lists(st.sampled_from(sorted(texts)), unique=True, min_size=1))
            added = [data.draw(st.lists(st.integers(0, 3), max_size=200)) for _ in keys]
            verdicts = committed(added)
            cursors.advance(keys, verdicts.token_offsets, verdicts.tokens)
            for key, tokens in zip(keys, added, strict=True):
                texts[key] += tokens
        for key, text in texts.items():
            static, memory = own[key]
            expected = [automaton.match(text[begins[key] :]) for automaton in (*static, *memory)]
            assert cursors.match(key) == expected
            assert cursors.text(key).tolist() == text
