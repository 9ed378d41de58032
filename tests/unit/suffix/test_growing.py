from __future__ import annotations

import numpy as np
import pytest

from outpace.errors import InputError
from outpace.suffix import GrowingAutomaton, Match
from outpace.suffix import block as layout
from suffixtwin import ADVERSARIAL, fibonacci_word, longest_foreign_match, longest_match


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_match_equals_brute_force_after_every_token(name: str) -> None:
    text = ADVERSARIAL[name]
    automaton = GrowingAutomaton()
    for i, token in enumerate(text):
        automaton.extend([token])
        automaton.check()
        match = automaton.match
        assert (match.length, match.min_endpos) == longest_match(text[: i + 1])


def test_worked_example() -> None:
    automaton = GrowingAutomaton([7, 8, 9, 7, 8])
    assert automaton.match[1:] == (2, 1)
    assert automaton.text[automaton.match.min_endpos + 1 :].tolist() == [9, 7, 8]


def test_no_text_and_no_match() -> None:
    assert GrowingAutomaton().match == Match(0, 0, -1)
    assert GrowingAutomaton([4]).match == Match(0, 0, -1)
    assert GrowingAutomaton([4, 5, 6]).match == Match(0, 0, -1)
    GrowingAutomaton().check()


def test_chunks_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 4, 700).astype(np.int32)
    whole = GrowingAutomaton(text)
    parts = GrowingAutomaton()
    at = 0
    while at < len(text):
        step = int(rng.integers(1, 50))
        parts.extend(text[at : at + step])
        at += step
    parts.check()
    assert parts.match == whole.match
    assert parts.num_states == whole.num_states
    assert parts.text.tolist() == whole.text.tolist() == text.tolist()


def test_grows_past_every_capacity() -> None:
    rng = np.random.default_rng(2)
    text = np.concatenate([rng.integers(0, 2, 3000), rng.integers(0, 200_000, 3000)]).astype(np.int32)
    automaton = GrowingAutomaton()
    first = automaton.nbytes
    automaton.extend(text)
    assert automaton.nbytes > 10 * first
    automaton.check()


def test_most_states_a_text_can_need_fit() -> None:
    # a b b b ...: 2 n - 1 states, more than the first guess of 1.5 states a token leaves room for
    automaton = GrowingAutomaton([1] + [2] * 63)
    assert automaton.num_states == 2 * 64 - 1
    assert automaton.block[layout.CAPACITY] == 64
    automaton.check()


def test_high_degree_root() -> None:
    text = np.random.default_rng(3).permutation(200_000)[:20_000].astype(np.int32)
    automaton = GrowingAutomaton(text)
    assert automaton.match.length == 0
    for position in (0, 1, 7777, 19_999):
        state, length = automaton.transfer(0, 0, int(text[position]))
        assert (automaton.min_endpos(state), length) == (position, 1)
    assert automaton.transfer(0, 0, 200_001) == (0, 0)


def test_long_loops_need_one_state_a_token() -> None:
    automaton = GrowingAutomaton(np.full(50_000, 3, np.int32))
    assert automaton.num_states == 50_001
    assert automaton.match[1:] == (49_999, 49_998)
    word = GrowingAutomaton(fibonacci_word(5000))
    assert word.num_states == 5001


def test_transfer_follows_another_text() -> None:
    rng = np.random.default_rng(4)
    text, other = rng.integers(0, 3, 60).tolist(), rng.integers(0, 4, 80).tolist()
    automaton = GrowingAutomaton(text)
    state = length = 0
    for i, token in enumerate(other):
        state, length = automaton.transfer(state, length, token)
        assert (length, automaton.min_endpos(state)) == longest_foreign_match(text, other[: i + 1])


def test_fork_is_independent() -> None:
    automaton = GrowingAutomaton([1, 2, 3, 1, 2])
    twin = automaton.fork()
    twin.extend([3, 1])
    automaton.extend([9])
    automaton.check()
    twin.check()
    assert automaton.text.tolist() == [1, 2, 3, 1, 2, 9]
    assert automaton.match.length == 0
    assert twin.text.tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert twin.match[1:] == (4, 3)


def test_negative_token_is_refused_and_what_came_before_is_kept() -> None:
    automaton = GrowingAutomaton([1, 2])
    with pytest.raises(InputError, match="at least 0, found -5"):
        automaton.extend([1, -5, 2])
    automaton.check()
    assert automaton.text.tolist() == [1, 2, 1]


FIELDS = {
    "length": (layout.LENGTH, 1),
    "link": (layout.LINK, 1),
    "min_endpos": (layout.MIN_ENDPOS, -1),
    "next": (layout.NEXT, 1),
    "edges": (layout.EDGES, 1),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("state", [2, 5, 9])
def test_audit_finds_a_changed_state(field: str, state: int) -> None:
    automaton = GrowingAutomaton([1, 2, 1, 2, 3, 1, 1, 2, 3, 3, 2, 1, 2])
    automaton.check()
    column, change = FIELDS[field]
    layout.views(automaton.block)[1][state, column] += change
    with pytest.raises((AssertionError, IndexError)):
        automaton.check()


def test_audit_finds_changed_edges_index_and_text() -> None:
    text = [1, 2, 1, 2, 3, 1, 1, 2, 3, 3, 2, 1, 2]
    for region, index in [(2, (0, layout.TARGET)), (2, (1, layout.TOKEN)), (2, (2, layout.SOURCE)), (0, (3,))]:
        automaton = GrowingAutomaton(text)
        layout.views(automaton.block)[region][index] += 1
        with pytest.raises(AssertionError):
            automaton.check()
    automaton = GrowingAutomaton(text)
    slots = layout.views(automaton.block)[3]
    slots[np.flatnonzero(slots)[0]] = 0
    with pytest.raises(AssertionError, match="hash index"):
        automaton.check()
