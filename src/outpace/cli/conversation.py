"""A conversation with a model: turns, the context's end, drafters that change, figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outpace.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from outpace.config import SamplingParams
    from outpace.engine import Engine, Figures, Progress

_LEAST_ANSWER = 64  # tokens of the context that are kept for an answer, or max_tokens if that is less
Message = dict[str, str]


@dataclass(slots=True)
class Tally:
    """What one turn or all of them came to.

    Attributes:
        answers: Answers counted, those that were stopped included.
        tokens: Tokens of them.
        origins: Tokens by the `outpace.tree.Origin` bits that they were accepted from; 0 is the model's own.
        figures: Counts and times.
    """

    answers: int = 0
    tokens: int = 0
    origins: Counter[int] = field(default_factory=Counter)
    figures: Figures | None = None  # None before the first answer

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of verify steps by their seconds; None if there was no such step."""
        figures = self.figures
        return figures.tokens / figures.decode_s if figures is not None and figures.decode_s else None

    @property
    def mean_accepted_tokens(self) -> float | None:
        """MAT; None if there was no verify step."""
        return self.figures.mean_accepted_tokens if self.figures is not None and self.figures.steps else None

    def add(self, other: Tally) -> None:
        """Count another one in."""
        self.answers += other.answers
        self.tokens += other.tokens
        self.origins += other.origins
        if other.figures is not None:
            self.figures = other.figures if self.figures is None else self.figures + other.figures


class Conversation:
    """Turns on one engine; text is made by the model's chat template.

    Args:
        engine: With a tokenizer that has a chat template.
        params: Of every answer.
        system: System message; kept whatever is dropped.

    Attributes:
        engine: Replaced when the drafter is.
        params: Of every answer.
        messages: The conversation so far, without the system message.
        last: Figures of the last answer.
        session: Figures of all answers.

    Raises:
        ConfigError: The model has no chat template.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        if getattr(engine.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "the model's tokenizer has no chat template, so it cannot hold a conversation; "
                "`outpace generate` continues text with it"
            )
        self.engine, self.params = engine, params
        self._system: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self.messages: list[Message] = []
        self.last = Tally()
        self.session = Tally()

    def ask(self, text: str, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Answer a message, and yield what every step brings; afterwards both are part of the conversation.

        Call `make_room` first: what does not fit is refused here.

        Args:
            text: The user's message.
            should_stop: Asked after every step; when true, the answer ends there and is kept as far as it came.

        Raises:
            OutpaceError: The message cannot be answered, and the conversation is as before.
        """
        prompt = [*self._system, *self.messages, {"role": "user", "content": text}]
        turn = Tally(answers=1)
        pieces: list[str] = []
        steps = self.engine.stream(prompt, self.params)
        before = self.engine.figures().total
        try:
            for progress in steps:
                turn.origins.update(progress.origins)
                turn.tokens += len(progress.token_ids)
                pieces.append(progress.text)
                yield progress
                if should_stop():
                    break
        finally:
            steps.close()  # type: ignore[attr-defined]  # a generator: ends the request
        turn.figures = _since(before, self.engine.figures().total)
        self.last = turn
        self.session.add(turn)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(pieces)}]

    def make_room(self, text: str) -> int:
        """Drop the oldest turns until the message and an answer fit into the context.

        Returns:
            How many turns were dropped.

        Raises:
            PromptError: The message alone does not fit.
        """
        context = self.engine.target.context_length
        if context is None:
            return 0
        wanted = _LEAST_ANSWER if self.params.max_tokens is None else min(_LEAST_ANSWER, self.params.max_tokens)
        kept, dropped = list(self.messages), 0
        while (size := self._size([*kept, {"role": "user", "content": text}])) + wanted > context:
            if not kept:
                raise PromptError(
                    f"the message takes {size} tokens, and with an answer of {wanted} it does not fit the model's context "
                    f"of {context}; shorten it"
                )
            kept, dropped = kept[2:], dropped + 1
        self.messages = kept
        return dropped

    def clear(self) -> None:
        """Forget the turns; the system message and the figures of the session stay."""
        self.messages = []

    def use_drafter(self, spec: str) -> None:
        """Let another drafter guess from now on.

        Raises:
            ConfigError: No such drafter or option; the one in use stays.
        """
        from outpace.engine import Engine

        config, adapter = self.engine.config, self.engine.adapter
        self.engine = Engine(
            self.engine.target,
            self.engine.tokenizer,
            drafter=spec,
            sources=self.engine.sources,
            max_nodes=config.max_nodes,
            max_batch_size=config.max_batch_size,
            guard=config.guard,
        )
        self.engine.adapter = adapter  # its name is known only to the engine that loaded it

    def _size(self, messages: list[Message]) -> int:
        """Tokens of a prompt."""
        from outpace.engine.prompts import to_token_ids

        prompt = [*self._system, *messages]
        return len(to_token_ids(prompt, self.engine.tokenizer, self.engine.target.num_embeddings))


def _since(before: Figures, after: Figures) -> Figures:
    """What was added between two totals of an engine."""
    names = (entry.name for entry in dataclasses.fields(after))
    return type(after)(**{name: getattr(after, name) - getattr(before, name) for name in names})
