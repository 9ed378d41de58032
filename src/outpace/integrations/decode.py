"""One call of `generate` on an engine: all rows at once, then the same shape as without it.

Rows speculate, so they are of different lengths between two steps. Whoever looks at the whole batch token by token (a
streamer, stopping criteria) is called in `generate`'s own order all the same: token ``t`` of the batch is **shown** once
every row that still counts has it. Rows that are ahead may compute tokens that are then thrown away.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outpace.config import SamplingParams
from outpace.engine import Engine, Output
from outpace.errors import ConstraintError
from outpace.integrations.rows import Row, for_row

logger = logging.getLogger(__name__)


class Decoding:
    """One call.

    Attributes:
        rows: One for each row of ``input_ids``.
        params: How each is decoded.
        pad: The id that fills up rows that have finished.
        rows_end: Whether they are filled up; without an end-of-sequence criterion `generate` lets rows that finished go on
            until all have.
        keeps_scores: Whether processed scores are kept.

    Args:
        engine: The model's engine, idle.
        input_ids: ``int64[B, L]``.
        padding: ``int64[B]``, padding on the left of each row.
        processors: As `generate` built them.
        criteria: As `generate` built them.
        config: As `generate` prepared it.
        streamer: Has got the prompt already, or None.
    """

    def __init__(
        self,
        engine: Engine,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.engine, self.input_ids = engine, input_ids
        self.criteria, self.streamer = criteria, streamer
        self._returns_dict = bool(config.return_dict_in_generate)
        self.keeps_scores = self._returns_dict and bool(config.output_scores)
        self._keeps_logits = self._returns_dict and bool(config.output_logits)
        pad: Any = config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.rows_end = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        sharing = {"keep_logits": self._keeps_logits, "keep_scores": self.keeps_scores}
        self.rows = [
            Row(row, int(skipped), for_row(processors, index, len(input_ids)), **sharing)
            for index, (row, skipped) in enumerate(zip(input_ids, padding, strict=True))
        ]
        self.params = self._parameters(bool(config.do_sample), bool(processors))

    def run(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode all rows.

        Returns:
            What `generate` returns.
        """
        try:
            lengths = sum(type(criterion) is MaxLengthCriteria for criterion in self.criteria)  # the engine knows one
            known = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in self.criteria)
            if self.streamer is None and known and lengths <= 1:
                outputs = self.engine.generate([row.prompt for row in self.rows], self.params)
                for row, output in zip(self.rows, outputs, strict=True):
                    row.tokens = output.token_ids
                    self.warn(output)
                length = max(len(row.tokens) for row in self.rows)
            else:
                length = _Shown(self).run()
        except ConstraintError as error:
            raise error.__cause__ or error from None  # a processor's own error, as without us
        return self._result(length)

    def _parameters(self, samples: bool, has_processors: bool) -> list[SamplingParams]:
        length = self.criteria.max_length
        max_tokens = None if length is None else max(1, length - self.input_ids.shape[1])
        # Ids below 0 are a habit: "no end of sequence".
        stops = {
            int(token)
            for criterion in self.criteria
            if type(criterion) is EosTokenCriteria
            for token in criterion.eos_token_id.tolist()
            if token >= 0
        }
        seeds: list[int | None] = [None] * len(self.rows)
        if samples:  # one for each row, so that torch.manual_seed settles them all
            seeds = torch.randint(2**63 - 1, (len(self.rows),)).tolist()
        processes = has_processors or self._keeps_logits or self.keeps_scores
        return [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0 if samples else 0.0,  # the temperature asked for is one of the processors
                seed=seed,
                stop_token_ids=tuple(sorted(stops)),
                ignore_eos=True,
                processor=row.process if processes else None,
            )
            for row, seed in zip(self.rows, seeds, strict=True)
        ]

    def warn(self, output: Output) -> None:
        """Say so where a row ended before its time."""
        if output.finish_reason == "length" and output.stop_reason == "context":
            logger.warning(
                "row %d ended after %d tokens, at the end of the model's context",
                output.prompt_index,
                len(output.token_ids),
            )

    def padded(self, length: int) -> torch.Tensor:
        """``int64[B, L + length]``: the prompts and so many tokens of each row, padded on the right where it has fewer."""
        prompt = self.input_ids
        new = torch.full((len(self.rows), length), self.pad, dtype=torch.int64)
        for place, row in zip(new, self.rows, strict=True):
            own = row.tokens[:length]
            place[: len(own)] = torch.tensor(own, dtype=torch.int64)
        return torch.cat([prompt, new.to(prompt.device)], dim=1)

    def stacked(self, place: int, kind: str) -> torch.Tensor:
        """``float32[B, V]``: ``"scores"`` or ``"logits"`` of token ``place`` of every row; 0 where a row has finished."""
        kept: list[list[torch.Tensor]] = [getattr(row, kind) for row in self.rows]
        model = next(rows[place] for rows in kept if place < len(rows))
        return torch.stack([
            rows[place] if place < min(len(rows), len(row.tokens)) else torch.zeros_like(model)
            for rows, row in zip(kept, self.rows, strict=True)
        ])  # fmt: skip

    def _result(self, length: int) -> GenerateDecoderOnlyOutput | torch.Tensor:
        sequences = self.padded(length)
        if not self._returns_dict:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=tuple(self.stacked(t, "scores") for t in range(length)) if self.keeps_scores else None,  # type: ignore[arg-type]
            logits=tuple(self.stacked(t, "logits") for t in range(length)) if self._keeps_logits else None,  # type: ignore[arg-type]
        )


class _Shown:
    """Shows a batch token by token to a streamer and to stopping criteria.

    Attributes:
        ids: ``int64[B, L + shown]``.
    """

    def __init__(self, call: Decoding) -> None:
        self._call, self._engine, self._rows = call, call.engine, call.rows
        self.ids = call.input_ids.to(torch.int64)
        self._shown = 0
        self._unfinished = torch.ones(len(self._rows), dtype=torch.int64, device=self.ids.device)
        self._scores: tuple[torch.Tensor, ...] | None = () if call.keeps_scores else None
        self._active: dict[str, int] = {}  # request id to row
        self._cut: list[int | None] = [None] * len(self._rows)  # tokens at which a row finished

    def run(self) -> int:
        """Decode until every row has finished; returns how many tokens were shown."""
        for index, row in enumerate(self._rows):
            self._active[self._engine.submit(row.prompt, self._call.params[index], prompt_index=index)] = index
        finished = False
        while not finished:
            for progress in self._engine.step():
                self._take(progress.request_id, progress.token_ids, progress.output)
            while not finished and self._is_next_there():
                finished = self._show()
            finished = finished or (not self._active and not self._is_next_there())
        for request_id in list(self._active):
            self._engine.abort(request_id)
        if self._engine.has_work:
            self._engine.step()  # takes the aborted requests' last progress
        for row, cut in zip(self._rows, self._cut, strict=True):
            del row.tokens[self._shown if cut is None else cut :]
        if self._call.streamer is not None:
            self._call.streamer.end()  # type: ignore[no-untyped-call]
        return self._shown

    def _take(self, request_id: str, tokens: list[int], output: Output | None) -> None:
        if request_id not in self._active:
            return
        self._rows[self._active[request_id]].tokens.extend(tokens)
        if output is not None:
            del self._active[request_id]
            if output.error is not None:
                raise output.error
            self._call.warn(output)

    def _is_next_there(self) -> bool:
        """Whether every row that still counts has the next token; one that the context ended counts no more."""
        running = set(self._active.values())
        there = False
        for index, row in enumerate(self._rows):
            if self._cut[index] is not None:
                continue
            if len(row.tokens) > self._shown:
                there = True
            elif index in running:
                return False
        return there

    def _show(self) -> bool:
        """Show one token of every row, in `generate`'s order; returns whether the batch has finished."""
        place = self._shown
        tokens = [
            row.tokens[place] if cut is None and place < len(row.tokens) else self._call.pad
            for row, cut in zip(self._rows, self._cut, strict=True)
        ]
        next_tokens = torch.tensor(tokens, dtype=torch.int64)
        self.ids = torch.cat([self.ids, next_tokens.to(self.ids.device)[:, None]], dim=1)
        self._shown += 1
        if self._scores is not None:
            self._scores = (*self._scores, self._call.stacked(place, "scores"))
        stops: Any = self._call.criteria(self.ids, self._scores)
        self._unfinished = self._unfinished & ~stops
        if self._call.streamer is not None:
            self._call.streamer.put(next_tokens)  # type: ignore[no-untyped-call]
        if bool(self._unfinished.max() == 0):
            return True
        if self._call.rows_end:
            self._end_rows()
        return False

    def _end_rows(self) -> None:
        names = {index: request_id for request_id, index in self._active.items()}
        for index, going in enumerate(self._unfinished.tolist()):
            if not going and self._cut[index] is None:
                self._cut[index] = self._shown
                if index in names:
                    self._engine.abort(names[index])
                    del self._active[names[index]]
