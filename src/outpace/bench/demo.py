"""Plain decoding against every drafter, on one model, interleaved.

One **run** is one prompt decoded by one drafter, alone, from the prompt's token ids to the text of the output; its
seconds are wall clock, with everything in them. A **round** is every prompt with every drafter, in an order that moves
on from prompt to prompt, so that whatever else the machine does hits all drafters alike. Rounds are repeated while
there is time; a figure is made of each prompt's median seconds.

- **tokens/s**: generated tokens by median seconds, summed over prompts.
- **speedup**: tokens/s by those of plain decoding, over the prompts that both have done.
- **spread**: how far repeated plain runs of one prompt lie apart, as a share of their median; None with one round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from outpace.bench.check import PromptCheck, compare, distinct_ngrams, tie_limit
from outpace.bench.heldout import HeldOut
from outpace.config import SamplingParams
from outpace.draft import build_drafter
from outpace.engine import Engine, Figures, Output, Progress
from outpace.engine.prompts import to_token_ids
from outpace.errors import PromptError
from outpace.tree import Int32Array

PLAIN = "none"
LOOPING = 0.6  # text with a smaller share of distinct 4-grams loops
_WARM_UP_TOKENS = 24
_WARM_UP_PROMPT = 96  # tokens; repeated, so that there is something to draft


@dataclass(slots=True)
class Cell:
    """What one drafter did with one prompt, over all rounds.

    Attributes:
        seconds: Of each run.
        outputs: Distinct outputs, by their tokens; more than one only where ties were decided differently.
        origins: Of the first run: for each token, the `outpace.tree.Origin` bits it was accepted from, 0 if the model's own.
        figures: Of all runs.
        checks: What each distinct output is beside that of plain decoding; filled by `Demo.compare`.
    """

    seconds: list[float] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    checks: list[PromptCheck] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Generated tokens of one run."""
        return len(self.outputs[0].token_ids)

    @property
    def result(self) -> str:
        """The worst of ``identical``, ``tie`` and ``divergence``; ``unknown`` before they were compared."""
        found = {check.result for check in self.checks}
        return next((kind for kind in ("divergence", "tie", "identical") if kind in found), "unknown")

    def add(self, output: Output, origins: list[int], seconds: float) -> None:
        """Take in one run."""
        self.seconds.append(seconds)
        self.figures += output.figures
        if not self.outputs:
            self.origins = origins
        if all(output.token_ids != other.token_ids for other in self.outputs):
            self.outputs.append(output)


@dataclass(frozen=True, slots=True)
class Row:
    """One drafter on several prompts.

    Attributes:
        drafter: Its name with options.
        prompts: Prompts done.
        tokens_per_s: None before the first run.
        mean_accepted_tokens: MAT over all runs.
        speedup: Over plain decoding; None where that is not known.
        results: How many prompts' outputs are ``identical``, ``tie``, ``divergence`` or ``unknown``.
        accepted_by_origin: Share of the tokens that were accepted from each combination of `outpace.tree.Origin` bits.
    """

    drafter: str
    prompts: int
    tokens_per_s: float | None
    mean_accepted_tokens: float
    speedup: float | None
    results: dict[str, int]
    accepted_by_origin: dict[int, float]


class Demo:
    """The measurement; everything measured so far can be read at any time.

    Args:
        engine: With the model and its tokenizer; its own drafter is not used.
        prompts: What is decoded.
        drafters: Specs; plain decoding is always there, and first.
        max_tokens: Most tokens of a run.

    Attributes:
        drafters: Specs, plain decoding first.
        prompts: Those that fit into the model's context.
        left_out: The others.
        cells: By prompt id and drafter; only what was run.
        rounds: Rounds that came to their end.

    Raises:
        PromptError: No prompt fits.
        ConfigError: No such drafter or option of it.
    """

    def __init__(
        self, engine: Engine, prompts: SequenceOf[HeldOut], drafters: SequenceOf[str], max_tokens: int
    ) -> None:
        self.target, self.tokenizer = engine.target, engine.tokenizer
        self.max_tokens = max_tokens
        self.drafters = [PLAIN, *dict.fromkeys(spec for spec in drafters if spec != PLAIN)]
        self._chat = getattr(engine.tokenizer, "chat_template", None) is not None
        self.prompts: list[HeldOut] = []
        self.left_out: list[HeldOut] = []
        self._ids: dict[str, Int32Array] = {}
        problem = "there is none"
        for prompt in prompts:
            try:
                self._ids[prompt.id] = self._encode(prompt)
                self.prompts.append(prompt)
            except PromptError as error:
                self.left_out.append(prompt)
                problem = str(error)
        if not self.prompts:
            raise PromptError(f"no prompt to run: {problem}")
        self._engines = self._build()
        self.cells: dict[tuple[str, str], Cell] = {}
        self.rounds = 0

    @property
    def runs_in_round(self) -> int:
        """Runs of one round."""
        return len(self.prompts) * len(self.drafters)

    def warm_up(self, on_drafter: Callable[[str], None] = lambda drafter: None) -> None:
        """Let everything compile and allocate; on engines of its own, so that no measured one has learned from it."""
        ids = self._ids[self.prompts[0].id][:_WARM_UP_PROMPT]
        room = (self.target.context_length or len(ids) * 3 + _WARM_UP_TOKENS) - _WARM_UP_TOKENS
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        for spec, engine in self._build(guard=False).items():
            on_drafter(spec)
            engine.generate(np.tile(ids, 3)[: max(room, 1)], params)

    def measure(self, *, seconds: float, most_rounds: int, on_step: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Run rounds; yields the number of runs done after each of them.

        Args:
            seconds: No round begins that would not end in this time, judged by the one before, and no prompt when it is
                over; the first prompt always runs, and the first round takes one prompt of each kind before others.
            most_rounds: Upper limit.
            on_step: Called after every step of the engine; what it raises ends the measurement.
        """
        started = time.perf_counter()
        done = 0
        for index in range(most_rounds):
            begun = time.perf_counter()
            for place, prompt in enumerate(self._kinds_in_turn()):
                if done and time.perf_counter() - started > seconds:
                    return
                turn = (place + index) % len(self.drafters)
                for spec in self.drafters[turn:] + self.drafters[:turn]:
                    self._run(prompt, spec, on_step)
                    done += 1
                    yield done
            self.rounds += 1
            now = time.perf_counter()
            if now - started + (now - begun) > seconds:
                return

    def compare(self, *, measure_noise: bool = True) -> None:
        """Compare every output with that of plain decoding.

        Args:
            measure_noise: Where some differ, measure the noise floor, to tell ties from divergences. Off, their result stays
                ``unknown``.
        """
        limit: float | None = None
        for (name, spec), cell in self.cells.items():
            plain = self.cells.get((name, PLAIN))
            if spec == PLAIN or plain is None or not cell.outputs:
                continue
            expected = plain.outputs[0].token_ids
            cell.checks = []
            for output in cell.outputs:
                if output.token_ids != expected:
                    if not measure_noise:
                        cell.checks = []
                        break
                    limit = tie_limit(self.target, self._texts()) if limit is None else limit
                cell.checks.append(compare(self.target, output, expected, limit or 0.0))

    def row(self, spec: str, prompts: SequenceOf[HeldOut]) -> Row:
        """One drafter on those of these prompts that it and plain decoding have run."""
        own = {p.id: cell for p in prompts if (p.id, PLAIN) in self.cells and (cell := self.cells.get((p.id, spec)))}
        speed = _tokens_per_s(own.values())
        plain = _tokens_per_s(self.cells[name, PLAIN] for name in own)
        speedup = speed / plain if speed and plain else None
        figures = sum((cell.figures for cell in own.values()), Figures())
        results = [cell.result for cell in own.values()]
        return Row(
            spec, len(own), speed, figures.mean_accepted_tokens, speedup,
            {result: results.count(result) for result in dict.fromkeys(results)}, origin_shares(own.values()),
        )  # fmt: skip

    def kinds(self) -> dict[str, list[HeldOut]]:
        """Prompts by kind, in order."""
        found: dict[str, list[HeldOut]] = {}
        for prompt in self.prompts:
            found.setdefault(prompt.kind, []).append(prompt)
        return found

    def spread(self) -> float | None:
        """See the module; the median over prompts."""
        times = [cell.seconds for (_, spec), cell in self.cells.items() if spec == PLAIN and len(cell.seconds) > 1]
        return statistics.median((max(t) - min(t)) / statistics.median(t) for t in times) if times else None

    def looping(self) -> list[str]:
        """Ids of prompts whose plain output loops, which flatters every drafter."""
        return [
            name
            for (name, spec), cell in self.cells.items()
            if spec == PLAIN and distinct_ngrams([cell.outputs[0].token_ids]) < LOOPING
        ]

    def divergences(self) -> int:
        """Prompts and drafters whose output is not the model's: errors of ours."""
        return sum(cell.result == "divergence" for cell in self.cells.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON: conditions, figures by kind and drafter, and every prompt with every drafter."""
        return {
            "max_tokens": self.max_tokens,
            "dtype": str(next(self.target.model.parameters()).dtype).removeprefix("torch."),
            "device": str(self.target.device),
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "rounds": self.rounds,
            "spread": self.spread(),
            "looping": self.looping(),
            "left_out": [prompt.id for prompt in self.left_out],
            "drafters": self.drafters,
            "kinds": {kind: self._rows(prompts) for kind, prompts in self.kinds().items()},
            "all": self._rows(self.prompts),
            "runs": [
                self._cell_dict(prompt, spec, cell)
                for prompt in self.prompts
                for spec in self.drafters
                if (cell := self.cells.get((prompt.id, spec))) is not None
            ],
        }

    def _rows(self, prompts: list[HeldOut]) -> dict[str, Any]:
        rows = {spec: self.row(spec, prompts) for spec in self.drafters}
        return {
            spec: {
                "prompts": row.prompts,
                "tokens_per_s": row.tokens_per_s,
                "mean_accepted_tokens": row.mean_accepted_tokens,
                "speedup": row.speedup,
                "results": row.results,
            }
            for spec, row in rows.items()
            if row.prompts
        }

    def _cell_dict(self, prompt: HeldOut, spec: str, cell: Cell) -> dict[str, Any]:
        output = cell.outputs[0]
        return {
            "id": prompt.id,
            "kind": prompt.kind,
            "source": prompt.source,
            "drafter": spec,
            "seconds": cell.seconds,
            "prompt_tokens": len(output.prompt_token_ids),
            "token_ids": output.token_ids,
            "origins": cell.origins,
            "text": output.text,
            "result": None if spec == PLAIN else cell.result,
            "distinct_4grams": distinct_ngrams([output.token_ids]),
            "figures": cell.figures.to_dict(),
        }

    def _kinds_in_turn(self) -> list[HeldOut]:
        """The first prompt of each kind, then the second of each, and so on."""
        groups = list(self.kinds().values())
        return [group[i] for i in range(max(map(len, groups))) for group in groups if i < len(group)]

    def _build(self, *, guard: bool = True) -> dict[str, Engine]:
        """One engine a drafter, all on the same model."""
        return {
            spec: Engine(self.target, self.tokenizer, drafter=build_drafter(spec), guard=guard, max_batch_size=1)
            for spec in self.drafters
        }

    def _encode(self, prompt: HeldOut) -> Int32Array:
        """Token ids; a message's bare text where the model has no chat template.

        Raises:
            PromptError: Not encodable, or no room for ``max_tokens`` behind it.
        """
        bare = not self._chat and not isinstance(prompt.prompt, str) and prompt.text
        ids = to_token_ids(prompt.text if bare else prompt.prompt, self.tokenizer, self.target.num_embeddings)
        context = self.target.context_length
        if context is not None and len(ids) + self.max_tokens > context:
            raise PromptError(
                f"prompt {prompt.id} has {len(ids)} tokens, and with {self.max_tokens} generated ones they do not fit "
                f"the context of {context}"
            )
        return ids

    def _run(self, prompt: HeldOut, spec: str, on_step: Callable[[], None]) -> None:
        origins: list[int] = []

        def note(progress: Progress) -> None:
            origins.extend(progress.origins)
            on_step()

        params = SamplingParams(max_tokens=self.max_tokens)
        begun = time.perf_counter()
        [output] = self._engines[spec].generate(self._ids[prompt.id], params, on_progress=note)
        self.cells.setdefault((prompt.id, spec), Cell()).add(output, origins, time.perf_counter() - begun)

    def _texts(self) -> list[Int32Array]:
        return [
            np.concatenate([self._ids[name], np.array(cell.outputs[0].token_ids, np.int32)])
            for (name, spec), cell in self.cells.items()
            if spec == PLAIN
        ]


def _tokens_per_s(cells: Any) -> float | None:
    each = [(cell.tokens, statistics.median(cell.seconds)) for cell in cells if cell.seconds]
    seconds = sum(own for _, own in each)
    return sum(tokens for tokens, _ in each) / seconds if seconds else None


def origin_shares(cells: Any) -> dict[int, float]:
    """Share of tokens by `outpace.tree.Origin` bits; the model's own (0) are left out."""
    origins = [origin for cell in cells for origin in cell.origins]
    return {bits: origins.count(bits) / len(origins) for bits in sorted(set(origins)) if bits}
