from __future__ import annotations

import numpy as np
import pytest

from drafting import committed, draft_one, texts
from outpace.draft import Drafter, build_drafter
from outpace.draft.base import SignalNeeds, Signals
from outpace.draft.sam import SamDrafter
from outpace.draft.sources import Sources
from outpace.errors import ConfigError, DrafterError, InputError, LifecycleError
from outpace.suffix.memory import ResponseMemory
from outpace.tree import DraftTrees, Int32Array, Origin, Verdicts

CAP = np.array([40], np.int32)


class Auxiliary(Drafter):
    """Proposes 99, then 98 and 97 beside each other; notes what it is told."""

    name = "auxiliary"
    needs = SignalNeeds(top_k=3)

    def __init__(self) -> None:
        self.calls: list[object] = []

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        if len(tokens) == 1:
            raise InputError("too short for me")
        self.calls.append(("open", key, tokens.tolist(), namespace))

    def propose(self, keys: list[int], caps: Int32Array) -> DraftTrees:  # type: ignore[override]
        self.calls.append(("propose", list(keys), caps.tolist()))
        count = len(keys)
        return DraftTrees(
            np.arange(0, 3 * count + 1, 3, dtype=np.int32),
            np.tile(np.array([99, 98, 97], np.int32), count),
            np.tile(np.array([-1, 0, 0], np.int32), count),
            np.full(3 * count, -1, np.float32),
            np.full(3 * count, 8, np.uint32),
        )

    def observe(self, keys: list[int], verdicts: Verdicts, signals: Signals | None = None) -> None:  # type: ignore[override]
        self.calls.append(("observe", list(keys), signals))

    def close(self, key: int) -> None:
        self.calls.append(("close", key))

    def fork(self, key: int, new_key: int) -> None:
        self.calls.append(("fork", key, new_key))

    def recomputed(self, key: int) -> None:
        self.calls.append(("recomputed", key))


def memory_of(**responses: list[int]) -> Sources:
    memory = ResponseMemory(background=False)
    for namespace, tokens in responses.items():
        memory.remember(namespace, tokens)
    return Sources(memory)


def test_without_sources_and_auxiliary_it_drafts_as_suffix() -> None:
    for text in texts(40, seed=2):
        ours, theirs = draft_one("sam", text), draft_one("suffix", text)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.log_probs.tolist() == theirs.log_probs.tolist()
        assert ours.origins.tolist() == theirs.origins.tolist()


def test_the_auxiliary_sees_every_call_and_proposes_where_it_is_needed() -> None:
    auxiliary = Auxiliary()
    sam = SamDrafter(parts=[auxiliary])
    assert (sam.name, sam.needs) == ("sam[auxiliary]", SignalNeeds(top_k=3))
    loop = np.array([1, 2, 3, 4] * 4, np.int32)
    sam.open(1, loop, "mine")
    sam.open(2, np.array([5, 6], np.int32), "mine")
    sam.fork(1, 3)
    sam.recomputed(3)
    trees = sam.propose([2, 1, 3], np.array([9, 3, 2], np.int32)).validate()
    assert [trees.tree(b).tokens.tolist() for b in range(3)] == [[99, 98, 97], [1, 2, 3], [1, 2]]
    assert [trees.tree(b).parents.tolist() for b in range(3)] == [[-1, 0, 0], [-1, 0, 1], [-1, 0]]
    assert [trees.tree(b).origins.tolist() for b in range(3)] == [[8] * 3, [4] * 3, [4] * 2]
    signals = Signals(*(np.zeros(1, np.int32),) * 3, None, {})
    sam.observe([1, 2], committed([[7], [8]]), signals)
    assert sam.propose([1, 2], np.array([40, 40], np.int32)).tokens.tolist() == [99, 98, 97] * 2
    sam.close(1)
    assert auxiliary.calls == [
        ("open", 1, loop.tolist(), "mine"),
        ("open", 2, [5, 6], "mine"),
        ("fork", 1, 3),
        ("recomputed", 3),
        ("propose", [2], [9]),
        ("observe", [1, 2], signals),
        ("propose", [1, 2], [40, 40]),
        ("close", 1),
    ]


def test_an_auxiliary_that_refuses_leaves_nothing_open() -> None:
    sam = SamDrafter(parts=[Auxiliary()])
    for _ in range(2):
        with pytest.raises(InputError, match="too short for me"):
            sam.open(1, np.array([5], np.int32))
    sam.open(1, np.array([5, 6], np.int32))


def test_memory_is_that_of_the_namespace_when_the_sequence_was_opened() -> None:
    sources = memory_of(mine=[1, 2, 3, 4, 5, 6, 7, 8], other=[1, 2, 3, 4, 5, 6, 9, 9])
    assert sources.memory is not None
    sam = build_drafter("sam", None, sources)
    prompt = np.array([1, 2, 3, 4, 5, 6], np.int32)
    for key, namespace in enumerate(("mine", "other", "third")):
        sam.open(key, prompt, namespace)
    sources.memory.remember("mine", [2, 3, 4, 5, 6, 1, 1, 1])
    sources.memory.remember("third", [1, 2, 3, 4, 5, 6, 0])
    trees = sam.propose([0, 1, 2], np.full(3, 40, np.int32)).validate()
    assert [trees.tree(b).tokens.tolist() for b in range(3)] == [[7, 8], [9, 9], []]
    assert set(trees.origins.tolist()) == {int(Origin.MEMORY)}
    assert trees.tree(0).log_probs[0] == draft_one("suffix", [*prompt, 0, *prompt]).log_probs[0]


def test_a_foreign_match_must_be_longer_by_more_than_the_bias() -> None:
    sources = memory_of(mine=[*range(10, 19), 50])
    for own, expected in ((3, 50), (4, 19)):
        text = [*range(19 - own, 19), 19, *range(10, 19)]  # the dynamic match has `own` tokens, the memory's 9
        sam = build_drafter("sam", None, sources)
        sam.open(0, np.array(text, np.int32), "mine")
        assert sam.propose([0], CAP).tokens[0] == expected


def test_prompts_are_walked_from_near_their_end() -> None:
    sources = memory_of(mine=list(range(200)))
    sam = SamDrafter(sources=sources)
    sam.open(0, np.arange(150, dtype=np.int32), "mine")
    sam.open(1, np.array([], np.int32), "mine")
    assert sam.propose([0, 1], np.full(2, 4, np.int32)).tokens.tolist() == [150, 151, 152, 153]
    assert sam._cursors.match(0)[0][1] == 64


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("sam(l_bias=-1)", "l_bias must be an integer from 0"),
        ("sam(draft_size=0)", "draft_size must be an integer from 1"),
        ("sam(memory=7)", "memory must be true or false"),
        ("sam(static=false, dynamic=false, memory=false)", "nothing is left to draft from"),
        ("sam[lookup, llma]", "sam"),
    ],
)
def test_options_are_checked(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_drafter(spec)


def test_misuse_raises() -> None:
    sam = SamDrafter(sources=memory_of(mine=[1, 2]))
    sam.open(1, np.array([1], np.int32), "mine")
    with pytest.raises(LifecycleError, match="sequence 1 is already open"):
        sam.open(1, np.array([1], np.int32))
    for call in (lambda: sam.close(2), lambda: sam.fork(2, 3), lambda: sam.propose([2], CAP)):
        with pytest.raises(LifecycleError, match="sequence 2 is not open"):
            call()
    with pytest.raises(LifecycleError, match="already open"):
        sam.fork(1, 1)
    with pytest.raises(InputError, match="found -3"):
        sam.observe([1], committed([[4, -3]]))
    sam.close(1)
    with pytest.raises(LifecycleError, match="not open"):
        sam.propose([1], CAP)


class _Short(Auxiliary):
    """Proposes for fewer sequences than it was asked for; not one of Outpace's own."""

    def propose(self, keys: list[int], caps: Int32Array) -> DraftTrees:  # type: ignore[override]
        return DraftTrees.empty(0)


def test_what_an_auxiliary_drafter_proposes_is_checked() -> None:
    drafter = SamDrafter(parts=[_Short()])
    drafter.open(0, np.array([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 6], np.int32))  # retrieves
    drafter.open(1, np.array([1, 2], np.int32))  # does not
    with pytest.raises(DrafterError, match="expected one tree for each of 1 sequences, found 0"):
        drafter.propose([0, 1], np.full(2, 8, np.int32))


def test_text_from_elsewhere_is_known_to_be() -> None:
    """So that its ids are checked against the vocabulary."""
    assert not build_drafter("merge[sam, recycling]").has_foreign_text
    assert build_drafter("merge[sam[recycling], lookup]", sources=Sources(ResponseMemory())).has_foreign_text
