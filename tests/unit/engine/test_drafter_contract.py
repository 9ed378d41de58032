"""What the engine shows a drafter, and what becomes of a drafter that breaks the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine_support import assert_idle, plain_logits, run_to_end
from outpace.config import SamplingParams
from outpace.draft import Drafter, NoneDrafter, OracleDrafter, SignalNeeds, Signals
from outpace.engine import Engine
from outpace.errors import DrafterError, ModelError, UnknownNameError
from outpace.reduce import select
from outpace.tree import DraftTrees, Int32Array, Verdicts

LAYER, LAST = "model.layers.1", "model.norm"


class Watching(OracleDrafter):
    """An oracle that asks for signals and keeps what it sees, sequence by sequence."""

    needs = SignalNeeds(top_k=3, hidden_layers=(LAYER, LAST))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.opened: dict[int, tuple[list[int], str]] = {}
        self.seen: list[dict[str, Any]] = []
        self.proposed: dict[int, DraftTrees] = {}
        self.closed: list[int] = []

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        super().open(key, tokens, namespace)
        self.opened[key] = (tokens.tolist(), namespace)

    def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
        trees = super().propose(keys, caps)
        self.proposed = {key: trees.tree(i) for i, key in enumerate(keys)}
        return trees

    def observe(self, keys: Sequence[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        super().observe(keys, verdicts, signals)
        assert signals is not None
        assert signals.row_offsets[0] == 0
        assert len(keys) == verdicts.batch_size == len(signals.row_offsets) - 1
        for b, key in enumerate(keys):
            rows = slice(int(signals.row_offsets[b]), int(signals.row_offsets[b + 1]))
            self.seen.append(
                {
                    "key": key,
                    "tokens": signals.input_tokens[rows].tolist(),
                    "top": signals.top_ids[rows],
                    "hidden": {name: states[rows] for name, states in signals.hidden.items()},
                    "tree": self.proposed.get(key),
                    "path": verdicts.path_of(b).tolist(),
                    "committed": verdicts.tokens_of(b).tolist(),
                }
            )
        self.proposed = {}

    def close(self, key: int) -> None:
        super().close(key)
        self.closed.append(key)


@torch.no_grad()
def plain_hidden(model: Any, text: list[int]) -> dict[str, torch.Tensor]:
    found = {}
    modules = dict(model.named_modules())
    handles = [
        modules[name].register_forward_hook(
            lambda _m, _a, out, name=name: found.__setitem__(name, (out[0] if isinstance(out, tuple) else out)[0])
        )
        for name in (LAYER, LAST)
    ]
    model(torch.tensor([text]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("mixed", [False, True])
def test_signals_have_the_rows_of_pending_tokens_then_nodes(tiny: Any, mixed: bool) -> None:
    known = {tuple(p): tiny.plain(p, SamplingParams(max_tokens=40)).token_ids for p in tiny.prompts}
    drafter = Watching(0.7, known, vocab_size=tiny.model.config.vocab_size, max_nodes=10)
    engine = tiny.engine(drafter, max_step_tokens=11)
    params = [SamplingParams(max_tokens=24, speculate=not (mixed and i % 2)) for i in range(5)]
    outputs = engine.generate(tiny.prompts, params)
    assert [o.token_ids for o in outputs] == [known[tuple(p)][:24] for p in tiny.prompts]
    watched = [i for i in range(5) if params[i].speculate]
    assert sorted(tokens for tokens, _ in drafter.opened.values()) == sorted(tiny.prompts[i] for i in watched)
    assert sorted(drafter.closed) == sorted(drafter.opened)
    num_nodes = 0
    for key, (prompt, _) in drafter.opened.items():
        steps = [step for step in drafter.seen if step["key"] == key]
        text = list(prompt) + [t for step in steps for t in step["committed"]]
        assert text == prompt + known[tuple(prompt)][:24]
        cached = 0
        for step in steps:
            tree = step["tree"]
            # The engine may cut a tree; what was verified are the rows behind the pending ones.
            end = len(prompt) + sum(len(s["committed"]) for s in steps[: steps.index(step)])
            pending = text[cached : end if step["committed"] else cached + len(step["tokens"])]
            assert 0 < len(pending) <= 11
            assert step["tokens"][: len(pending)] == pending
            nodes = step["tokens"][len(pending) :]
            num_nodes += len(nodes)
            if nodes:
                assert tree is not None
                if len(nodes) < tree.num_nodes:  # cut where the output would end
                    tree = select(tree, 99, max_depth=np.array([len(prompt) + 24 - end - 1], np.int32))
                assert nodes == tree.tokens.tolist()
            hidden = plain_hidden(tiny.model, text[: cached + len(pending)])
            logits = plain_logits(tiny.model, text[: cached + len(pending)])
            wanted = np.argsort(-logits[cached:], axis=1, kind="stable")[:, :3]
            np.testing.assert_array_equal(step["top"][: len(pending)], wanted)
            for name in (LAYER, LAST):
                assert step["hidden"][name].shape == (len(step["tokens"]), 64)
                torch.testing.assert_close(
                    step["hidden"][name][: len(pending)], hidden[name][cached:], atol=1e-4, rtol=1e-4
                )
            for node in range(len(nodes)):  # each node sees the text and its ancestors
                path, at = [], node
                while at >= 0:
                    path.append(nodes[at])
                    at = int(tree.parents[at])
                logits = plain_logits(tiny.model, [*text[: cached + len(pending)], *reversed(path)])[-1]
                assert step["top"][len(pending) + node].tolist() == np.argsort(-logits, kind="stable")[:3].tolist()
            cached += len(pending) + len(step["path"])
    assert num_nodes > 60
    assert_idle(engine)


def test_namespaces_reach_the_drafter(tiny: Any) -> None:
    drafter = Watching(0.5, {tuple(tiny.prompts[0]): [1] * 99}, vocab_size=tiny.model.config.vocab_size)
    engine = tiny.engine(drafter)
    engine.submit(tiny.prompts[0], SamplingParams(max_tokens=3), namespace="alice")
    engine.generate(tiny.prompts[0], SamplingParams(max_tokens=3), namespace="bob")
    run_to_end(engine)
    assert sorted(space for _, space in drafter.opened.values()) == ["alice", "bob"]


def test_a_module_that_does_not_exist(tiny: Any) -> None:
    class Asking(NoneDrafter):
        needs = SignalNeeds(hidden_layers=("model.layers.77",))

    with pytest.raises(UnknownNameError, match=r"model\.layers\.77"):
        tiny.engine(Asking())


def test_requests_without_speculation_get_no_drafts(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle())
    on, off = engine.generate(
        tiny.prompts[:2], [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, speculate=False)]
    )
    assert off.token_ids == tiny.plain(tiny.prompts[1], SamplingParams(max_tokens=30)).token_ids
    assert (off.figures.drafted_nodes, off.figures.mean_accepted_tokens) == (0, 1.0)
    assert on.figures.mean_accepted_tokens > 2


def test_no_node_limit_is_plain_decoding(tiny: Any) -> None:
    engine = tiny.engine(tiny.oracle(), max_nodes=0)
    [output] = engine.generate(tiny.prompts[0], SamplingParams(max_tokens=20))
    assert (output.figures.drafted_nodes, output.figures.mean_accepted_tokens) == (0, 1.0)
    [few] = tiny.engine(tiny.oracle(accept=1.0), max_nodes=2).generate(tiny.prompts[0], SamplingParams(max_tokens=30))
    assert 1.0 < few.figures.mean_accepted_tokens <= 3.0
    assert few.figures.verified_nodes <= 2 * few.figures.steps


def trees(
    tokens: list[int], parents: list[int], log_prob: float = -1.0, offsets: list[int] | None = None
) -> DraftTrees:
    return DraftTrees(
        np.array(offsets or [0, len(tokens)], np.int32),
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.full(len(tokens), log_prob, np.float32),
        np.ones(len(tokens), np.uint32),
    )


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        (trees([1, 1], [-1, -1]), "sibling"),
        (trees([1, 2], [1, -1]), "parent must come before"),
        (trees([1, 2], [-1, 5]), "parent must come before"),
        (trees([1, 999_999], [-1, 0]), "not in the vocabulary"),
        (trees([-4], [-1]), "not in the vocabulary"),
        (trees([1], [-1], 0.5), "at most 0"),
        (trees([1], [-1], float("nan")), "at most 0"),
        (trees([1, 2], [-1, 0], offsets=[0, 1]), "offsets"),
        (trees([1, 2], [-1, -1], offsets=[0, 1, 2]), "one tree for each of 1 sequences, found 2"),
    ],
)
def test_malformed_trees(tiny: Any, proposed: DraftTrees, message: str) -> None:
    class Careless(NoneDrafter):
        def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
            return proposed

    engine = tiny.engine(Careless())
    with pytest.raises(DrafterError, match=message):
        engine.generate(tiny.prompts[0], SamplingParams(max_tokens=5))
    assert_idle(engine)


def test_a_drafter_that_raises_leaves_the_engine_clean(tiny: Any) -> None:
    class Broken(NoneDrafter):
        broken = True

        def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
            if self.broken:
                raise ZeroDivisionError("oops")
            return super().propose(keys, caps)

    drafter = Broken()
    engine = tiny.engine(drafter)
    with pytest.raises(DrafterError, match="ZeroDivisionError: oops"):
        engine.generate(tiny.prompts, SamplingParams(max_tokens=5))
    assert_idle(engine)
    drafter.broken = False
    assert len(engine.generate(tiny.prompts, SamplingParams(max_tokens=5))) == 5
    assert isinstance(drafter, Drafter)


def test_a_pass_that_fails_leaves_the_engine_clean(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = tiny.engine("suffix")
    run = type(engine.target).run

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("device lost")

    engine.submit(tiny.prompts[1], SamplingParams(max_tokens=9), request_id="other")
    engine.step()
    monkeypatch.setattr(type(engine.target), "run", fail)
    with pytest.raises(ModelError, match="with RuntimeError: device lost") as caught:
        engine.generate(tiny.prompts[0], SamplingParams(max_tokens=5))
    assert [output.finish_reason for output in caught.value.outputs or []] == ["error"]
    engine.arena.check()
    monkeypatch.setattr(type(engine.target), "run", run)
    outputs = run_to_end(engine)  # the other request goes on where it was
    assert outputs["other", 0].token_ids == tiny.plain(tiny.prompts[1], SamplingParams(max_tokens=9)).token_ids
    assert_idle(engine)


def test_the_guard_cuts_drafts_and_changes_no_token(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [tiny.plain(p, SamplingParams(max_tokens=40)).token_ids for p in tiny.prompts]
    params = SamplingParams(max_tokens=40)
    for share in (0.0, 0.3, None):
        engine = tiny.engine(tiny.oracle(), guard=True)
        if share is not None:
            monkeypatch.setattr(
                engine._core._guard, "limit", lambda trees, *_, share=share, **__: int(share * trees.num_nodes)
            )
        outputs = engine.generate(tiny.prompts, params)
        assert [o.token_ids for o in outputs] == expected
        figures = engine.figures().total
        assert figures.drafted_nodes > 0
        if share is not None:
            assert figures.verified_nodes <= share * figures.drafted_nodes
            assert (figures.verified_nodes > 0) == (share > 0)
