from __future__ import annotations

import pytest

from checkpoints import SENTENCES, write_checkpoint
from outpace import Engine, SamplingParams
from outpace.cli.conversation import Conversation
from outpace.errors import ConfigError, PromptError, UnknownNameError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("chat") / "llama"), drafter="suffix", guard=False)


def answer(talk: Conversation, text: str, **options: object) -> str:
    return "".join(progress.text for progress in talk.ask(text, **options))  # type: ignore[arg-type]


def test_turns_go_through_the_template(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(max_tokens=12), system="Be brief.")
    first = answer(talk, "How many?")
    second = answer(talk, "Sure?")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Sure?"},
    ]
    [expected] = engine.generate(messages, SamplingParams(max_tokens=12))  # type: ignore[arg-type]
    assert second == expected.text
    assert (talk.session.answers, talk.session.tokens, talk.last.tokens) == (2, 24, 12)
    assert talk.session.figures is not None
    assert talk.session.figures.tokens == 22
    assert talk.session.origins.total() == 24
    talk.clear()
    assert answer(talk, "How many?") == first


def test_an_answer_that_is_stopped_is_kept(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(max_tokens=50))
    answer(talk, "How many?", should_stop=lambda: True)
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert talk.last.tokens < 50
    assert not engine.has_work
    assert answer(talk, "Go on.")
    assert len(talk.messages) == 4


def test_the_oldest_turns_give_way(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(max_tokens=8), system="Be brief.")
    dropped = []
    for _ in range(12):
        dropped.append(talk.make_room(SENTENCES[0] * 3))
        answer(talk, SENTENCES[0] * 3)
    assert sum(dropped) > 0
    assert len(talk.messages) // 2 == 12 - sum(dropped)
    assert talk.messages[0]["role"] == "user"
    before = list(talk.messages)
    with pytest.raises(PromptError, match="does not fit the model's context of 512; shorten it"):
        talk.make_room(SENTENCES[0] * 40)
    assert talk.messages == before


def test_a_refused_message_changes_nothing(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(max_tokens=8))
    with pytest.raises(PromptError):
        answer(talk, SENTENCES[0] * 40)
    assert (talk.messages, talk.session.answers) == ([], 0)


def test_another_drafter_writes_the_same(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(max_tokens=24))
    first = answer(talk, "How many?")
    with pytest.raises(UnknownNameError):
        talk.use_drafter("nix")
    assert talk.engine is engine
    talk.use_drafter("lookup")
    assert talk.engine.drafter.name.startswith("lookup")
    assert talk.engine.adapter is engine.adapter  # memory goes on under the same names
    talk.clear()
    assert answer(talk, "How many?") == first


def test_a_model_without_a_template_is_refused(engine: Engine) -> None:
    bare = Engine(engine.target)
    with pytest.raises(ConfigError, match="outpace generate"):
        Conversation(bare, SamplingParams())
