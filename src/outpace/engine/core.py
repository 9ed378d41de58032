"""The loop under the engine: one packed step for everybody, and who holds which memory."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

import torch

from outpace.config import EngineConfig
from outpace.draft import Drafter, Signals
from outpace.engine import step as parts
from outpace.engine.output import EngineFigures, Figures, Output, Progress
from outpace.engine.request import Request
from outpace.engine.scheduler import Batch, Scheduler
from outpace.errors import ArenaFullError, DrafterError, ModelError, OutpaceError
from outpace.model import KVArena, StepPlan, Target, available_rows
from outpace.reduce import Calibrator, Guard, select
from outpace.suffix.memory import ResponseMemory
from outpace.tree import DraftTrees, Int32Array, Verdicts
from outpace.verify import Verification, verify

logger = logging.getLogger(__name__)

_INITIAL_ROWS = 4096


class EngineCore:
    """Runs steps over `Request` objects; knows nothing of text, prompts or callers.

    Attributes:
        config: How the machine is shared.
        target: The model.
        drafter: Where drafts come from.
        memory: Where finished responses are remembered, or None.
        arena: Keys and values of all requests.
        scheduler: Who runs and who waits.
        requests: Active requests by their id, one entry for each sample.
        undelivered: What steps did for the requests, until somebody takes it.
    """

    def __init__(
        self, target: Target, drafter: Drafter, config: EngineConfig, memory: ResponseMemory | None = None
    ) -> None:
        self.config, self.target, self.drafter, self.memory = config, target, drafter, memory
        rows = config.kv_tokens or available_rows(target.layers)
        self.arena = KVArena(target.layers, max_rows=rows, initial_rows=min(_INITIAL_ROWS, rows))
        self.scheduler = Scheduler(
            self.arena, config.max_batch_size, config.max_step_tokens, target.rope_switch, self._tell_drafter
        )
        self.requests: dict[str, list[Request]] = {}
        self.undelivered: list[Progress] = []
        self._calibrator = Calibrator()
        self._guard = Guard() if config.guard else None
        self._next_key = 0
        self._total = Figures()
        self._finished: dict[str, int] = {}
        target.check_modules(drafter.needs.hidden_layers)
        # Drafts from outside are checked before they index anything; checking costs more than some of ours cost to make.
        self._checks_all_drafts = config.debug or not drafter.is_ours

    def new_key(self) -> int:
        """A number for a sequence that no other has."""
        self._next_key += 1
        return self._next_key - 1

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.arena.open(request.sequence.key)
        self.scheduler.waiting.append(request)
        self.requests.setdefault(request.request_id, []).append(request)

    def figures(self) -> EngineFigures:
        """Totals since the beginning."""
        active = sum(map(len, self.requests.values()))
        return EngineFigures(self._total, dict(self._finished), active, self.arena.num_used, self.arena.capacity)

    def step(self) -> None:
        """Draft, reduce, pack, forward, verify, commit: for every running request at once."""
        self.scheduler.admit()
        self._spread_samples()
        batch = self.scheduler.schedule()
        if batch.requests:
            self._run(batch)
        if self.config.debug:
            self.arena.check()

    def _run(self, batch: Batch) -> None:
        started = time.perf_counter()
        limits = parts.depth_limits(batch, self.target.rope_switch)
        drafted = self._draft(batch, limits)
        draft_seconds = time.perf_counter() - started

        trees = self._reduce(batch, drafted, limits)
        plan, trees = self._pack(batch, trees)
        if plan is None:
            return
        logits, signals = self._forward(batch, plan)
        verification = self._verify(batch, trees, plan, logits)
        committed = parts.commit(batch, plan, trees, verification, self.arena, self.scheduler.drop_cache)

        resumed = time.perf_counter()
        try:
            self._observe(batch, committed.verdicts, signals)
        finally:  # what is committed is delivered, whatever a drafter makes of it
            ended = time.perf_counter()
            draft_seconds += ended - resumed
            self._record(batch, plan, drafted, trees, committed.verdicts, ended - started, draft_seconds)
            self._deliver(batch, committed)

    def _draft(self, batch: Batch, depth_limits: Int32Array) -> DraftTrees:
        with self._naming_drafter("open"):
            for request in batch.requests:
                if request.params.speculate and not request.drafting:
                    sequence = request.sequence
                    self.drafter.open(sequence.key, sequence.tokens.copy(), sequence.namespace)
                    request.drafting = True
        checks = self._checks_all_drafts or self.drafter.has_foreign_text
        vocab_size = self.target.num_embeddings if checks else None
        with self._naming_drafter("propose"):
            return parts.draft(batch, self.drafter, depth_limits, self.config.max_nodes, vocab_size)

    def _reduce(self, batch: Batch, drafted: DraftTrees, depth_limits: Int32Array) -> DraftTrees:
        if drafted.num_nodes == 0:
            return drafted
        trees = select(self._calibrator.apply(drafted), self.config.max_nodes, max_depth=depth_limits)
        if self._guard is None:
            return trees
        return select(
            trees,
            self.config.max_nodes,
            total=self._guard.limit(trees, batch.decoding, beside_prefill=not batch.is_plain_decoding),
        )

    def _pack(self, batch: Batch, trees: DraftTrees) -> tuple[StepPlan | None, DraftTrees]:
        """Reserve room and write the step down; no plan if there was no room, and somebody had to give way."""
        error = parts.reserve(batch, trees, self.arena)
        if error is not None and trees.num_nodes:
            trees = DraftTrees.empty(trees.batch_size)
            error = parts.reserve(batch, trees, self.arena)
        if error is not None:
            self._give_way(error)
            return None, trees
        return parts.pack_step(batch, trees, self.arena, every_row=self.drafter.needs.top_k > 0), trees

    def _forward(self, batch: Batch, plan: StepPlan) -> tuple[torch.Tensor, Signals | None]:
        try:
            logits, hidden = self.target.run(plan, self.arena, self.drafter.needs.hidden_layers)
        except BaseException as error:
            for request in batch.requests:
                self.arena.release(request.sequence.key)
            if isinstance(error, OutpaceError) or not isinstance(error, Exception):
                raise
            if isinstance(error, torch.OutOfMemoryError):
                advice = "; lower max_step_tokens, max_batch_size or kv_tokens"
            else:
                advice = ""
            raise ModelError(
                f"the model failed in a pass over {plan.num_tokens} tokens with {type(error).__name__}: {error}{advice}"
            ) from error
        return logits, parts.gather_signals(self.drafter, plan, logits, hidden)

    def _verify(self, batch: Batch, trees: DraftTrees, plan: StepPlan, logits: torch.Tensor) -> Verification | None:
        requests, own_trees = parts.verifying(batch, trees)
        if not requests:
            return None
        if len(plan.verify_rows) != len(logits):
            logits = logits.index_select(0, torch.from_numpy(plan.verify_rows).to(logits.device))
        return verify([request.chooser for request in requests], own_trees, logits)

    def _observe(self, batch: Batch, verdicts: Verdicts, signals: Signals | None) -> None:
        keys, own_verdicts, own_signals = parts.drafting(batch, verdicts, signals)
        if keys:
            with self._naming_drafter("observe"):
                self.drafter.observe(keys, own_verdicts, own_signals)

    @contextmanager
    def _naming_drafter(self, call: str) -> Iterator[None]:
        """Whatever a drafter raises is said to be the drafter's."""
        try:
            yield
        except OutpaceError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise DrafterError(f"drafter {self.drafter.name!r}: {call} raised {kind}: {error}") from error

    def _record(
        self,
        batch: Batch,
        plan: StepPlan,
        drafted: DraftTrees,
        trees: DraftTrees,
        verdicts: Verdicts,
        seconds: float,
        draft_seconds: float,
    ) -> None:
        parts.update_figures(batch, drafted.sizes, trees.sizes, verdicts, seconds, draft_seconds)
        self._calibrator.record(drafted, verdicts)
        if self._guard is not None and batch.is_plain_decoding:
            self._guard.record_step(len(batch.requests), plan.num_tokens, seconds - draft_seconds, draft_seconds)

    def _deliver(self, batch: Batch, committed: parts.Committed) -> None:
        for b, request in enumerate(batch.requests):
            tokens = committed.verdicts.tokens_of(b).tolist()
            if request.finish_reason is not None:
                begin = int(committed.verdicts.token_offsets[b])
                self.retire(request, tokens, committed.origins[begin : begin + len(tokens)].tolist())
            elif tokens:
                begin = int(committed.verdicts.token_offsets[b])
                origins = committed.origins[begin : begin + len(tokens)].tolist()
                text = request.text.take() if request.streams else ""
                self.undelivered.append(Progress(request.request_id, request.sample_index, tokens, origins, text))

    # --- who holds what --------------------------------------------------------------------------------------------

    def _spread_samples(self) -> None:
        """Make the ``n`` samples of a prompt that is cached but for its last token, or that cannot be shared."""
        switch = self.target.rope_switch
        for request in list(self.scheduler.running):
            sequence = request.sequence
            cannot_split = switch is not None and switch.is_long(sequence.num_tokens)
            if request.num_samples == 1 or not (cannot_split or sequence.num_cached >= sequence.num_prompt - 1):
                continue
            samples, request.num_samples = request.num_samples, 1
            for index in range(1, samples):
                self.scheduler.running.append(
                    self.fork(request, request.request_id, index, request.chooser.seed + index)
                )

    def fork(self, request: Request, request_id: str, sample_index: int, seed: int) -> Request:
        """A copy of a request that shares its keys and values; the caller puts it into the scheduler's lists."""
        twin = request.fork(request_id, self.new_key(), sample_index, seed)
        self.arena.fork(request.sequence.key, twin.sequence.key)
        if request.drafting:
            self.drafter.fork(request.sequence.key, twin.sequence.key)
            twin.drafting = True
        self.requests.setdefault(request_id, []).append(twin)
        return twin

    def _give_way(self, error: ArenaFullError) -> None:
        """No room: one that holds rows while it waits gives them up, or the one that came last waits; alone, it fails."""
        running = self.scheduler.running
        holding = [request for request in self.scheduler.waiting if request.sequence.num_cached]
        if holding or len(running) > 1:
            self.scheduler.preempt(holding[-1] if holding else running[-1])
        else:
            running[0].fail(error)
            self.retire(running[0])

    @staticmethod
    def _unmade(request: Request, index: int) -> Output:
        """The output of a sample that was still to be made: nothing was done for it alone."""
        seed = None if request.params.greedy else request.chooser.seed + index
        return dataclasses.replace(request.output(), sample_index=index, seed=seed, figures=Figures())

    def retire(self, request: Request, tokens: SequenceOf[int] = (), origins: SequenceOf[int] = ()) -> None:
        """Free what a finished request holds, and deliver its output (one for each sample that was never made)."""
        self.scheduler.remove(request)
        self.requests[request.request_id].remove(request)
        if not self.requests[request.request_id]:
            del self.requests[request.request_id]
        self.arena.free(request.sequence.key)
        text = request.text.finish()
        for index in range(request.sample_index, request.sample_index + request.num_samples):
            output = request.output() if index == request.sample_index else self._unmade(request, index)
            self._total += output.figures
            self._finished[output.finish_reason] = self._finished.get(output.finish_reason, 0) + 1
            self.undelivered.append(
                Progress(
                    request.request_id, index, list(tokens), list(origins), text if request.streams else "", output
                )
            )
        if request.drafting:
            self.drafter.close(request.sequence.key)
        self._remember(request)

    def _remember(self, request: Request) -> None:
        """Learn from a response that came to its own end."""
        if self.memory is None or request.finish_reason not in ("stop", "length"):
            return
        try:
            self.memory.remember(request.sequence.namespace, request.sequence.output)
        except OutpaceError as error:  # drafts get worse; the response is none the less right
            if type(error) is OutpaceError:  # from the background, where what was taken in before is built in
                logger.warning(
                    "request %s found that an earlier response was not built in: %s", request.request_id, error
                )
            else:
                logger.warning("request %s is not remembered: %s", request.request_id, error)

    def _tell_drafter(self, request: Request) -> None:
        if request.drafting:
            self.drafter.recomputed(request.sequence.key)
