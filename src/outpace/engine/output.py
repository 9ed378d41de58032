"""What a request gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.errors import OutpaceError
from outpace.verify import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Figures:
    """Counts and times of one sample.

    Attributes:
        steps: Verify steps: those that committed tokens after the first one. Prefill's step is not counted.
        tokens: Tokens committed in those steps, up to and including the one that ended the output.
        drafted_nodes: Nodes that the drafter proposed.
        verified_nodes: Nodes that were verified, roots excluded.
        accepted_nodes: Of those, the ones on accepted paths.
        prefill_tokens: Prompt tokens computed; more than the prompt holds if it was computed again.
        preemptions: Times that keys and values were given up for lack of memory and computed again.
        prefill_s: Seconds of the steps that worked on the prompt.
        decode_s: Seconds of the verify steps. Steps are shared by a batch, so these do not add up over requests.
        draft_s: Seconds of drafting within ``decode_s``, of the whole batch.
    """

    steps: int = 0
    tokens: int = 0
    drafted_nodes: int = 0
    verified_nodes: int = 0
    accepted_nodes: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: committed tokens a verify step, bonus token included; 1.0 is plain decoding, 0.0 if there was no step."""
        return self.tokens / self.steps if self.steps else 0.0

    def __add__(self, other: Figures) -> Figures:
        """Counts and times added up."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Figures(*(a + b for a, b in pairs))

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the mean accepted tokens."""
        return {**dataclasses.asdict(self), "mean_accepted_tokens": self.mean_accepted_tokens}


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One finished sample.

    Attributes:
        request_id: As `Engine.submit` gave it.
        prompt_index: Place of the prompt in the call of `Engine.generate`; 0 elsewhere.
        sample_index: 0 to ``n - 1``.
        prompt_token_ids: The prompt.
        token_ids: What was generated, including an end-of-sequence id that ended it.
        text: The same as text, special tokens left out and cut at a stop string; empty without a tokenizer.
        finish_reason: ``stop``, ``length`` (max_tokens or the context), ``abort`` or ``error``.
        stop_reason: The token id or the string that ended it, ``"context"``, or None.
        logprobs: One entry a token if asked for.
        seed: The seed that was used; None for greedy decoding.
        figures: Counts and times.
        error: What went wrong, if the reason is ``error``.
    """

    request_id: str
    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    seed: int | None
    figures: Figures
    error: OutpaceError | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        result = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        result["figures"] = self.figures.to_dict()
        result["error"] = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        if self.logprobs is not None:
            result["logprobs"] = [dataclasses.asdict(entry) for entry in self.logprobs]
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """What one step did for one sample.

    Attributes:
        request_id: As `Engine.submit` gave it.
        sample_index: 0 to ``n - 1``.
        token_ids: Committed in this step.
        origins: For each of them, the `outpace.tree.Origin` bits of the accepted node it came from; 0 for a bonus token.
        text: What can be shown now; whole characters only. Empty unless the request streams.
        output: The finished sample, in its last progress.
    """

    request_id: str
    sample_index: int
    token_ids: list[int]
    origins: list[int]
    text: str
    output: Output | None = None


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine since it was made.

    Attributes:
        total: Sum over all finished samples.
        finished: Samples by finish reason.
        active: Requests running or waiting.
        cached_rows: Arena rows in use.
        arena_rows: Rows of the arena.
    """

    total: Figures
    finished: dict[str, int] = field(default_factory=dict)
    active: int = 0
    cached_rows: int = 0
    arena_rows: int = 0


def total_figures(outputs: SequenceOf[Output]) -> Figures:
    """The figures of several samples added up."""
    return sum((output.figures for output in outputs), Figures())
