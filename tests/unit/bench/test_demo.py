"""The measurement of the demo: who runs when, what is counted, what becomes of outputs that differ."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import outpace.bench.demo
from checkpoints import SENTENCES, write_checkpoint
from outpace import Engine
from outpace.bench.demo import Demo
from outpace.bench.heldout import HeldOut
from outpace.errors import PromptError, UnknownNameError

PROMPTS = [
    HeldOut("c", "completion", SENTENCES[3]),
    HeldOut("e", "editing", [{"role": "user", "content": SENTENCES[3]}]),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("demo") / "llama"), drafter="none")


def test_drafters_take_turns(engine: Engine) -> None:
    demo = Demo(engine, PROMPTS, ["suffix", "none", "lookup", "suffix"], 8)
    assert demo.drafters == ["none", "suffix", "lookup"]
    order: list[tuple[str, str]] = []
    demo._run = lambda prompt, spec, _: order.append((prompt.id, spec))  # type: ignore[method-assign,assignment,func-returns-value]
    assert list(demo.measure(seconds=1e9, most_rounds=2)) == list(range(1, 13))
    assert order[:6] == [("c", s) for s in demo.drafters] + [("e", s) for s in ("suffix", "lookup", "none")]
    assert order[6] == ("c", "suffix")
    assert demo.rounds == 2


def test_when_time_is_up_the_prompt_ends_and_no_other_begins(engine: Engine) -> None:
    demo = Demo(engine, [PROMPTS[0], dataclasses.replace(PROMPTS[0], id="c2"), PROMPTS[1]], ["suffix"], 4)
    assert [prompt.id for prompt in demo._kinds_in_turn()] == ["c", "e", "c2"]
    assert len(list(demo.measure(seconds=0.0, most_rounds=9))) == 2
    assert (demo.rounds, list(demo.cells)) == (0, [("c", "none"), ("c", "suffix")])
    assert demo.row("none", demo.prompts).prompts == 1


def test_figures(engine: Engine) -> None:
    demo = Demo(engine, PROMPTS, ["suffix"], 16)
    demo.warm_up()
    assert not demo.cells
    list(demo.measure(seconds=1e9, most_rounds=2))
    demo.compare()
    plain, drafted = demo.row("none", demo.prompts), demo.row("suffix", demo.prompts)
    assert (plain.speedup, plain.mean_accepted_tokens) == (1.0, 1.0)
    assert drafted.results == {"identical": 2}
    assert drafted.tokens_per_s is not None
    assert plain.tokens_per_s is not None
    assert drafted.speedup == pytest.approx(drafted.tokens_per_s / plain.tokens_per_s)
    cell = demo.cells["c", "suffix"]
    assert (len(cell.seconds), len(cell.outputs), cell.tokens, len(cell.origins)) == (2, 1, 16, 16)
    assert demo.spread() is not None
    assert demo.divergences() == 0
    found = demo.to_dict()
    assert list(found["kinds"]) == ["completion", "editing"]
    assert found["all"]["suffix"]["results"] == {"identical": 2}
    assert [(run["id"], run["drafter"]) for run in found["runs"]][:2] == [("c", "none"), ("c", "suffix")]
    assert found["runs"][1]["token_ids"] == cell.outputs[0].token_ids


def test_outputs_that_differ(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(engine, PROMPTS, ["suffix"], 8)
    list(demo.measure(seconds=1e9, most_rounds=1))
    cell = demo.cells["c", "suffix"]
    wrong = [*cell.outputs[0].token_ids]
    wrong[3] = (wrong[3] + 1) % 400
    cell.outputs = [dataclasses.replace(cell.outputs[0], token_ids=wrong)]
    demo.compare(measure_noise=False)
    assert (cell.result, demo.divergences()) == ("unknown", 0)
    demo.compare()
    assert (cell.result, demo.divergences()) == ("divergence", 1)
    assert demo.row("suffix", demo.prompts).results == {"divergence": 1, "identical": 1}
    monkeypatch.setattr(outpace.bench.demo, "tie_limit", lambda *_: 1e6)
    demo.compare()
    assert (cell.result, demo.divergences()) == ("tie", 0)


def test_interrupted(engine: Engine) -> None:
    """Only prompts that plain decoding has run count; nothing is left in the engines."""
    demo = Demo(engine, PROMPTS, ["suffix"], 8)
    steps = 0

    def stop() -> None:
        nonlocal steps
        steps += 1
        if len(demo.cells) == 3:  # the second prompt's turn begins with suffix; plain decoding is cut off
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(demo.measure(seconds=1e9, most_rounds=1, on_step=stop))
    assert list(demo.cells) == [("c", "none"), ("c", "suffix"), ("e", "suffix")]
    assert demo.row("suffix", demo.prompts).prompts == 1
    assert demo.rounds == 0
    assert not any(own.has_work for own in demo._engines.values())


def test_what_does_not_fit_is_left_out(engine: Engine) -> None:
    long = HeldOut("long", "completion", SENTENCES[0] * 40)
    demo = Demo(engine, [long, *PROMPTS], ["suffix"], 8)
    assert ([p.id for p in demo.prompts], [p.id for p in demo.left_out]) == (["c", "e"], ["long"])
    with pytest.raises(PromptError, match="no prompt to run: prompt long has"):
        Demo(engine, [long], ["suffix"], 8)


def test_unknown_drafter(engine: Engine) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'suffix'"):
        Demo(engine, PROMPTS, ["sufix"], 8)


def test_messages_without_a_template_are_bare_text(engine: Engine, tmp_path: Path) -> None:
    bare = shutil.copytree(engine.tokenizer.name_or_path, tmp_path / "bare")  # type: ignore[union-attr]
    (bare / "chat_template.jinja").unlink()
    demo = Demo(Engine(bare, drafter="none"), PROMPTS, [], 4)
    assert demo._ids["c"].tolist() == demo._ids["e"].tolist()
