import math

import numpy as np
import pytest
import torch

from outpace.config import SamplingParams
from outpace.errors import ConfigError, ConstraintError, LifecycleError, ModelError, NonFiniteLogitsError
from outpace.tree import DraftTrees
from outpace.verify import Chooser, verify
from verify_support import NO_DRAFT, AlternatingConstraint, ToyTarget, make_tree

CHAIN = make_tree([2, 4, 6], [-1, 0, 1])


def rows_choosing(tokens, vocab_size=8):
    """Logits under which each row's best token is far above the others."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float() * 100


ROWS = rows_choosing([2, 4, 6, 1])
KINDS = {
    "greedy": SamplingParams(),
    "penalty": SamplingParams(presence_penalty=0.1),
    "sampled": SamplingParams(temperature=1.0, seed=1),
    "biased": SamplingParams(logit_bias={0: 0.5}, temperature=1.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_chain_is_accepted(kind):
    outcome = verify([Chooser(KINDS[kind], [0], 8)], CHAIN, ROWS)
    assert outcome.verdicts.path.tolist() == [0, 1, 2]
    assert outcome.verdicts.tokens.tolist() == [2, 4, 6, 1]
    assert outcome.errors == [None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bad", "words"), [(math.nan, "NaN"), (math.inf, r"\+infinity"), (-math.inf, "nothing but")])
def test_a_bad_root_ends_its_request_alone(kind, bad, words):
    rows = torch.cat([ROWS, ROWS, ROWS])
    rows[4] = bad
    choosers = [
        Chooser(KINDS[kind], [0, 0, 0], 8),
        Chooser(KINDS[kind], [0, 0, 0], 8),
        Chooser(SamplingParams(), [0], 8),
    ]
    outcome = verify(choosers, DraftTrees.concatenate([CHAIN, CHAIN, CHAIN]), rows)
    assert [type(error) for error in outcome.errors] == [type(None), NonFiniteLogitsError, type(None)]
    with pytest.raises(NonFiniteLogitsError, match=f"position 3 .*{words}"):
        raise outcome.errors[1]
    assert [outcome.verdicts.tokens_of(b).tolist() for b in range(3)] == [[2, 4, 6, 1], [], [2, 4, 6, 1]]
    assert outcome.verdicts.path_of(1).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_nan_in_a_row_is_enough(kind):
    rows = ROWS[:1].clone()
    rows[0, 5] = math.nan
    [error] = verify([Chooser(KINDS[kind], [0], 8)], NO_DRAFT, rows).errors
    assert isinstance(error, NonFiniteLogitsError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_below_the_root_waits_for_the_next_step(kind):
    """Plain decoding would give 2 and 4 before it fails; so does the walk, and the request may stop there."""
    rows = ROWS.clone()
    rows[2, 3] = math.nan
    chooser = Chooser(KINDS[kind], [0], 8)
    outcome = verify([chooser], CHAIN, rows)
    assert outcome.errors == [None]
    assert outcome.verdicts.path.tolist() == [0]
    assert outcome.verdicts.tokens.tolist() == [2, 4]
    chooser.commit(outcome.verdicts.tokens, outcome.states[0])
    [error] = verify([chooser], NO_DRAFT, rows[2:3]).errors
    assert isinstance(error, NonFiniteLogitsError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_that_is_not_reached_does_not_matter(kind):
    tree = make_tree([2, 5, 4], [-1, -1, 0])
    rows = ROWS.clone()
    rows[2] = math.nan
    outcome = verify([Chooser(KINDS[kind], [0], 8)], tree, rows)
    assert outcome.errors == [None]
    assert outcome.verdicts.tokens.tolist() == [2, 4, 1]


def test_a_constraint_is_asked_once_a_reached_node_and_advanced_once_a_token():
    constraint = AlternatingConstraint(8)
    chooser = Chooser(SamplingParams(constraint=constraint), [0], 8)
    tree = make_tree([2, 4, 3, 6], [-1, 0, 0, 2])
    rows = rows_choosing([2, 4, 0, 6, 7])
    rows[1, 3] = 50
    outcome = verify([chooser], tree, rows)
    # After 2 the model prefers 4, which is even: not allowed there. After 2, 3 it prefers 6. Then 7.
    assert outcome.verdicts.tokens.tolist() == [2, 3, 6, 7]
    assert outcome.verdicts.path.tolist() == [0, 2, 3]
    assert constraint.asked == [(), (2,), (2, 3), (2, 3, 6)]
    chooser.commit(outcome.verdicts.tokens[:3], outcome.states[0])
    assert verify([chooser], NO_DRAFT, rows[4:]).verdicts.tokens.tolist() == [7]
    assert constraint.advanced == [((), 2), ((2,), 3), ((2, 3), 6)]


def test_a_commit_without_states_gives_the_same_state():
    outputs = []
    for keep_states in (True, False):
        chooser = Chooser(SamplingParams(constraint=AlternatingConstraint(8)), [0], 8)
        outcome = verify([chooser], make_tree([2, 3], [-1, 0]), rows_choosing([2, 3, 4]))
        chooser.commit(outcome.verdicts.tokens, outcome.states[0] if keep_states else None)
        outputs.append(chooser.state())
    assert outputs == [(2, 3, 4), (2, 3, 4)]


class Moody(AlternatingConstraint):
    def __init__(self, fail_in, fail_at):
        super().__init__(8)
        self.fail_in, self.fail_at = fail_in, fail_at

    def start(self):
        if self.fail_in == "start":
            raise KeyError("no start")
        return ()

    def allowed(self, state):
        if self.fail_in == "allowed" and len(state) == self.fail_at:
            raise RuntimeError("lost")
        if self.fail_in == "nothing" and len(state) == self.fail_at:
            return np.zeros(8, np.bool_)
        return np.ones(8, np.bool_)

    def advance(self, state, token):
        if self.fail_in == "advance" and len(state) == self.fail_at:
            raise RuntimeError("lost")
        return (*state, token)


@pytest.mark.parametrize("fail_in", ["start", "allowed", "nothing"])
def test_a_constraint_that_fails_ends_its_request_alone(fail_in):
    choosers = [Chooser(SamplingParams(constraint=Moody(fail_in, 0)), [0], 8), Chooser(SamplingParams(), [0], 8)]
    outcome = verify(choosers, DraftTrees.empty(2), rows_choosing([1, 2]))
    assert isinstance(outcome.errors[0], ConstraintError)
    assert outcome.errors[1] is None
    assert outcome.verdicts.tokens.tolist() == [2]


@pytest.mark.parametrize("fail_in", ["allowed", "nothing", "advance"])
def test_a_constraint_that_fails_below_the_root_waits_for_the_next_step(fail_in):
    fail_at = 1 if fail_in == "advance" else 2
    chooser = Chooser(SamplingParams(constraint=Moody(fail_in, fail_at)), [0], 8)
    outcome = verify([chooser], CHAIN, ROWS)
    assert outcome.errors == [None]
    assert outcome.verdicts.tokens.tolist() == [2, 4]
    chooser.commit(outcome.verdicts.tokens, outcome.states[0])
    [error] = verify([chooser], NO_DRAFT, ROWS[2:3]).errors
    assert isinstance(error, ConstraintError)


def test_a_mask_of_the_wrong_length_is_that_requests_error():
    chooser = Chooser(SamplingParams(constraint=AlternatingConstraint(9)), [0], 8)
    [error] = verify([chooser], NO_DRAFT, ROWS[:1]).errors
    assert isinstance(error, ConstraintError)
    assert "bool[8]" in str(error)
    assert "bool[9]" in str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype_stay_unchanged(kind, dtype):
    params = SamplingParams(logit_bias={1: 3.0}, presence_penalty=1.0, temperature=0.5)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    before = rows.detach().clone()
    outcome = verify([Chooser(KINDS[kind], [0], 8, 1)], CHAIN, rows)
    verify([Chooser(params, [0], 8, 1)], CHAIN, rows)
    assert torch.equal(rows, before)
    assert len(outcome.verdicts.tokens) >= 1


def test_verify_leaves_the_chooser_as_it_was():
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5)
    chooser = Chooser(params, [0, 3], 8, seed=5)
    found = [verify([chooser], CHAIN, ROWS / 40).verdicts.tokens.tolist() for _ in range(5)]
    assert found == [found[0]] * 5
    assert chooser.position == 2


def test_forks_go_apart_and_equal_a_fresh_request():
    target, prompt = ToyTarget(8), [1, 2, 3]
    params = SamplingParams(temperature=1.5, frequency_penalty=0.7, constraint=AlternatingConstraint(8))

    def go_on(chooser, output, length):
        for _ in range(length):
            outcome = verify([chooser], NO_DRAFT, target.logits(prompt + output)[None])
            chooser.commit(outcome.verdicts.tokens, outcome.states[0])
            output = output + outcome.verdicts.tokens.tolist()
        return output

    parent = Chooser(params, prompt, 8, seed=7)
    shared = go_on(parent, [], 4)
    fork = parent.fork(8)
    first = go_on(parent, shared, 20)
    second = go_on(fork, shared, 20)
    assert first != second
    fresh = Chooser(params, prompt, 8, seed=8)
    fresh.commit(shared)
    assert go_on(fresh, shared, 20) == second


def test_the_seed_in_use_is_known():
    assert Chooser(SamplingParams(seed=4), [0], 8).seed == 4
    assert Chooser(SamplingParams(seed=4), [0], 8, seed=6).seed == 6
    drawn = {Chooser(SamplingParams(), [0], 8).seed for _ in range(5)}
    assert len(drawn) == 5
    with pytest.raises(ConfigError, match="seed must be at least 0, found -1"):
        Chooser(SamplingParams(), [0], 8, seed=-1)


def test_misuse_is_named():
    chooser = Chooser(SamplingParams(), [0], 8)
    with pytest.raises(LifecycleError, match="each of 2 trees, found 1"):
        verify([chooser], DraftTrees.empty(2), ROWS[:2])
    with pytest.raises(ModelError, match=r"shape \[4, vocabulary\], found torch.float32\[3, 8\]"):
        verify([chooser], CHAIN, ROWS[:3])
    with pytest.raises(ModelError, match=r"torch.int64\[4, 8\]"):
        verify([chooser], CHAIN, ROWS.long())
    with pytest.raises(ModelError, match="vocabulary of 8, the model returned 7"):
        verify([chooser], CHAIN, ROWS[:, :7])


def test_an_empty_batch():
    outcome = verify([], DraftTrees.empty(0), torch.empty(0, 8))
    assert outcome.verdicts.batch_size == 0
