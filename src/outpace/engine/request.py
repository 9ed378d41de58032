"""One sample of one request while it is active."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from outpace.config import SamplingParams
from outpace.engine.output import Figures, FinishReason, Output
from outpace.engine.text import TextStream
from outpace.errors import OutpaceError
from outpace.sequence import Sequence
from outpace.tree import Int32Array
from outpace.verify import Chooser, TokenLogprobs


class Request:
    """A sequence, how its tokens are chosen, when it ends, and what it will give back.

    Attributes:
        request_id: The caller's name for it.
        sample_index: 0 to ``n - 1``.
        prompt_index: Place in the call of `Engine.generate`.
        num_samples: Copies that are still to be made of it once the prompt is cached; 1 for none.
        streams: Whether text is released at every step.
        drafting: Whether the drafter knows it.
        skips_draft: Whether its next step goes without a draft, because the last one gave no finite logits.
    """

    def __init__(
        self,
        request_id: str,
        sequence: Sequence,
        params: SamplingParams,
        chooser: Chooser,
        text: TextStream,
        *,
        stop_tokens: Mapping[int, int | str],
        max_tokens: int,
        sample_index: int = 0,
        prompt_index: int = 0,
        streams: bool = False,
    ) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.params = params
        self.chooser = chooser
        self.text = text
        self.sample_index = sample_index
        self.prompt_index = prompt_index
        self.num_samples = params.n
        self.streams = streams
        self.drafting = False
        self.skips_draft = False
        self.figures = Figures()
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._stop_tokens = stop_tokens
        self._max_tokens = max_tokens
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: OutpaceError | None = None

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self._max_tokens - self.sequence.num_output

    @property
    def expected_rows(self) -> int:
        """Rows of keys and values that the request will probably need; a long allowance is not taken at its word."""
        return self.sequence.num_tokens + min(self.tokens_left, 512) + 64

    def accept(self, tokens: Int32Array) -> int:
        """Take committed tokens up to where the request ends.

        Returns:
            How many of them were taken.
        """
        allowed = tokens[: self.tokens_left].tolist()
        taken = next((i + 1 for i, token in enumerate(allowed) if token in self._stop_tokens), len(allowed))
        found = self._stop_tokens.get(allowed[taken - 1]) if taken else None
        kept = self.text.push(allowed[:taken])
        if self.text.stopped_by is not None:
            self.finish("stop", self.text.stopped_by)
        elif found is not None:
            self.finish("stop", found)
        self.sequence.append(tokens[:kept])
        if self.finish_reason is None and self.tokens_left <= 0:
            limited = self.params.max_tokens is None or self.params.max_tokens > self._max_tokens
            self.finish("length", "context" if limited else None)
        return kept

    def finish(self, reason: FinishReason, detail: int | str | None = None) -> None:
        """End the request; the engine frees what it holds."""
        self.finish_reason, self.stop_reason = reason, detail

    def fail(self, error: OutpaceError) -> None:
        """End the request with an error."""
        self.error = error
        self.finish("error")

    def fork(self, request_id: str, key: int, sample_index: int, seed: int) -> Request:
        """A copy that goes on by itself, with another seed."""
        twin = object.__new__(Request)
        twin.__dict__.update(self.__dict__)
        twin.request_id, twin.sample_index = request_id, sample_index
        twin.sequence = self.sequence.fork(key)
        twin.chooser = self.chooser.fork(seed)
        twin.text = self.text.fork()
        twin.figures = self.figures + Figures()
        twin.logprobs = None if self.logprobs is None else list(self.logprobs)
        twin.num_samples = 1
        twin.drafting = False
        return twin

    def output(self) -> Output:
        """What it gives back, once it has finished."""
        assert self.finish_reason is not None
        return Output(
            request_id=self.request_id,
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_token_ids=self.sequence.prompt.tolist(),
            token_ids=self.sequence.output.tolist(),
            text=self.text.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
            seed=None if self.params.greedy else self.chooser.seed,
            figures=self.figures,
            error=self.error,
        )


def keys_of(requests: SequenceOf[Request]) -> list[int]:
    """The sequences' numbers."""
    return [request.sequence.key for request in requests]
