"""The engine: submit prompts, run steps, get the model's own tokens back, sooner."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outpace.config import EngineConfig, SamplingParams, from_mapping
from outpace.draft import Drafter, Signals, build_drafter
from outpace.engine import step as parts
from outpace.engine.output import EngineFigures, Figures, Output, Progress
from outpace.engine.prompts import Prompt, as_list, to_token_ids
from outpace.engine.request import Request
from outpace.engine.scheduler import Batch, Scheduler
from outpace.engine.text import TextStream
from outpace.errors import (
    ArenaFullError,
    ConfigError,
    LifecycleError,
    ModelError,
    OutpaceError,
    PromptError,
    UnknownNameError,
)
from outpace.model import KVArena, LoadOptions, StepPlan, available_rows, load_model, load_tokenizer, probe
from outpace.reduce import Guard, select
from outpace.sequence import Sequence
from outpace.tree import DraftTrees, Int32Array, Verdicts
from outpace.verify import Chooser, Verification, verify

_INITIAL_ROWS = 4096


class Engine:
    """Generates with speculation on any Hugging Face causal model, without changing what it generates.

    An engine is not thread-safe: one thread calls it. While a step runs, nobody else may use the model.

    Example::

        engine = Engine("path/or/hub-id", drafter="suffix")
        for output in engine.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.text, output.figures.mean_accepted_tokens)

    Args:
        model: A folder, a hub id, or a loaded model of Transformers (or PEFT), which is left as it was found.
        tokenizer: A folder, a hub id or a tokenizer. None: the one beside the model if ``model`` is a name; else there is
            none, and prompts must be token ids.
        drafter: Where drafts come from, see `outpace.available_drafters`.
        options: Fields of `EngineConfig` and, where ``model`` is a name, of `LoadOptions`.

    Raises:
        UnknownNameError: No such option or drafter.
        CheckpointError: The model cannot be loaded.
        UnsupportedModelError: It cannot be run packed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        drafter: str | Drafter = "suffix",
        **options: Any,
    ) -> None:
        self.config, load_options = _split_options(options, loads=not isinstance(model, torch.nn.Module))
        self.drafter = build_drafter(drafter)
        self._why_no_tokenizer = ""
        if isinstance(model, torch.nn.Module):
            module = model
        else:
            module = load_model(model, load_options)
            if tokenizer is None:
                tokenizer = self._tokenizer_beside(model, load_options)
        self.tokenizer: PreTrainedTokenizerBase | None = (
            load_tokenizer(tokenizer, load_options) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        )
        self.target = probe(module, backend=self.config.backend, context_length=self.config.context_length)
        rows = self.config.kv_tokens or available_rows(self.target.layers)
        self.arena = KVArena(self.target.layers, max_rows=rows, initial_rows=min(_INITIAL_ROWS, rows))
        self._scheduler = Scheduler(
            self.arena, self.config.max_batch_size, self.config.max_step_tokens, self.target.rope_switch
        )
        self._guard = Guard() if self.config.guard else None
        self._eos_ids = _eos_ids(self.target.model)
        self._undelivered: list[Progress] = []
        self._next_key = 0
        self._total = Figures()
        self._finished: dict[str, int] = {}

    # --- requests --------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: str = "",
        stream: bool = False,
        prompt_index: int = 0,
    ) -> str:
        """Queue a prompt; it may enter between any two steps.

        Args:
            prompt: Text, a list of messages, or token ids.
            params: How it is decoded; greedy by default.
            request_id: Made up if not given. All ``n`` samples share it.
            namespace: What drafters learn from this request serves only requests of the same namespace.
            stream: Release text at every step.
            prompt_index: Handed through to the outputs.

        Returns:
            The request's id.

        Raises:
            PromptError: Empty, too long for the context, or not encodable.
            ConfigError: Parameters that do not fit the model or the engine.
            LifecycleError: The id is in use.
        """
        params = params or SamplingParams()
        request_id = request_id or f"request-{self._next_key}"
        if any(request.request_id == request_id for request in self._scheduler.active):
            raise LifecycleError(f"request id {request_id!r} is in use")
        tokens = to_token_ids(prompt, self.tokenizer, self.target.vocab_size, self._why_no_tokenizer)
        if params.stop and self.tokenizer is None:
            raise ConfigError(f"stop strings need a tokenizer, and there is none{self._why_no_tokenizer}")
        if params.n > self.config.max_batch_size:
            raise ConfigError(f"n must be at most max_batch_size, {self.config.max_batch_size}, found {params.n}")
        request = Request(
            request_id,
            Sequence(self._new_key(), tokens, namespace),
            params,
            Chooser(params, tokens, self.target.vocab_size),
            TextStream(self.tokenizer, params.stop, params.include_stop),
            eos_ids=frozenset() if params.ignore_eos else self._eos_ids,
            max_tokens=self._allowance(len(tokens), params.max_tokens),
            prompt_index=prompt_index,
            streams=stream,
        )
        self.arena.open(request.sequence.key)
        self._scheduler.waiting.append(request)
        if request.tokens_left == 0:
            request.finish("length")
            self._retire(request)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request with all its samples; their outputs, as far as they came, are in the next step's progress.

        Raises:
            LifecycleError: No active request has this id.
        """
        for request in self._active(request_id):
            request.finish("abort")
            self._retire(request)

    def fork(self, request_id: str, *, new_request_id: str | None = None, seed: int | None = None) -> str:
        """Let a copy of a running request go on by itself from here; both share the keys and values so far.

        Args:
            request_id: An active request with one sample.
            new_request_id: Made up if not given.
            seed: Of the copy; one more than the original's by default.

        Raises:
            LifecycleError: No such active request, several samples, or the new id is in use.
        """
        originals = self._active(request_id)
        if len(originals) > 1 or originals[0].num_samples > 1:
            raise LifecycleError(f"request {request_id!r} has several samples; fork takes a request with one")
        new_id = new_request_id or f"request-{self._next_key}"
        if any(request.request_id == new_id for request in self._scheduler.active):
            raise LifecycleError(f"request id {new_id!r} is in use")
        original = originals[0]
        twin = self._fork(original, new_id, 0, original.chooser.seed + 1 if seed is None else seed)
        if original in self._scheduler.running:
            self._scheduler.running.append(twin)
        else:
            self._scheduler.waiting.append(twin)
        return new_id

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._scheduler.active or self._undelivered)

    def figures(self) -> EngineFigures:
        """Totals since the engine was made."""
        active = len(self._scheduler.active)
        return EngineFigures(self._total, dict(self._finished), active, self.arena.num_used, self.arena.capacity)

    # --- one step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Progress]:
        """Draft, reduce, pack, forward, verify, commit: for every running request at once.

        Returns:
            What each request that took part got; finished ones carry their output. A request that goes wrong finishes with
            its error, and the others go on.
        """
        self._spread_samples()
        batch = self._scheduler.schedule()
        if batch.requests:
            self._run(batch)
        if self.config.debug:
            self.arena.check()
        delivered, self._undelivered = self._undelivered, []
        return delivered

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
        committed = parts.commit(batch, plan, trees, verification, self.arena)

        resumed = time.perf_counter()
        self._observe(batch, committed.verdicts, signals)
        ended = time.perf_counter()
        draft_seconds += ended - resumed
        self._record(batch, plan, drafted, trees, committed.verdicts, ended - started, draft_seconds)
        self._deliver(batch, committed)

    def _draft(self, batch: Batch, depth_limits: Int32Array) -> DraftTrees:
        for request in batch.requests:
            if request.params.speculate and not request.drafting:
                sequence = request.sequence
                self.drafter.open(sequence.key, sequence.tokens.copy(), sequence.namespace)
                request.drafting = True
        trees = parts.draft(batch, self.drafter, depth_limits, self.config.max_nodes)
        return trees.validate(self.target.vocab_size) if self.config.debug else trees

    def _reduce(self, batch: Batch, drafted: DraftTrees, depth_limits: Int32Array) -> DraftTrees:
        if drafted.num_nodes == 0:
            return drafted
        trees = select(drafted, self.config.max_nodes, max_depth=depth_limits)
        if self._guard is None:
            return trees
        return select(trees, self.config.max_nodes, total=self._guard.limit(trees, sum(batch.chunks)))

    def _pack(self, batch: Batch, trees: DraftTrees) -> tuple[StepPlan | None, DraftTrees]:
        """Reserve room and write the step down; no plan if there was no room, and somebody had to give way."""
        error = parts.reserve(batch, trees, self.arena)
        if error is not None and trees.num_nodes:
            trees = DraftTrees.empty(trees.batch_size)
            error = parts.reserve(batch, trees, self.arena)
        if error is not None:
            self._give_way(error)
            return None, trees
        return parts.pack_step(batch, trees, self.arena, every_row=not self.drafter.needs.nothing), trees

    def _forward(self, batch: Batch, plan: StepPlan) -> tuple[torch.Tensor, Signals | None]:
        try:
            logits, hidden = self.target.run(plan, self.arena, self.drafter.needs.hidden_layers)
        except BaseException as error:
            for request in batch.requests:
                self.arena.release(request.sequence.key)
            if isinstance(error, torch.OutOfMemoryError):
                raise ModelError(
                    f"out of device memory in a pass over {plan.num_tokens} tokens; lower max_step_tokens, max_batch_size or "
                    f"kv_tokens ({error})"
                ) from error
            raise
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
            self.drafter.observe(keys, own_verdicts, own_signals)

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
        if self._guard is None:
            return
        if batch.is_plain_decoding:
            self._guard.record_step(len(batch.requests), plan.num_tokens, seconds - draft_seconds, draft_seconds)
        if drafted.num_nodes:
            self._guard.record_verdicts(drafted, verdicts)

    def _deliver(self, batch: Batch, committed: parts.Committed) -> None:
        for b, request in enumerate(batch.requests):
            tokens = committed.verdicts.tokens_of(b).tolist()
            if request.finish_reason is not None:
                begin = int(committed.verdicts.token_offsets[b])
                self._retire(request, tokens, committed.origins[begin : begin + len(tokens)].tolist())
            elif tokens:
                begin = int(committed.verdicts.token_offsets[b])
                origins = committed.origins[begin : begin + len(tokens)].tolist()
                text = request.text.take() if request.streams else ""
                self._undelivered.append(Progress(request.request_id, request.sample_index, tokens, origins, text))

    # --- who holds what --------------------------------------------------------------------------------------------

    def _spread_samples(self) -> None:
        """Make the ``n`` samples of a prompt that is cached but for its last token."""
        switch = self.target.rope_switch
        for request in list(self._scheduler.running):
            sequence = request.sequence
            cannot_split = switch is not None and switch.is_long(sequence.num_tokens)
            if request.num_samples == 1 or not (cannot_split or sequence.num_cached >= sequence.num_prompt - 1):
                continue
            samples, request.num_samples = request.num_samples, 1
            for index in range(1, samples):
                twin = self._fork(request, request.request_id, index, request.chooser.seed + index)
                self._scheduler.running.append(twin)

    def _fork(self, request: Request, request_id: str, sample_index: int, seed: int) -> Request:
        twin = request.fork(request_id, self._new_key(), sample_index, seed)
        self.arena.fork(request.sequence.key, twin.sequence.key)
        if request.drafting:
            self.drafter.fork(request.sequence.key, twin.sequence.key)
            twin.drafting = True
        return twin

    def _give_way(self, error: ArenaFullError) -> None:
        """No room: the request that came last waits until others have finished; alone, it fails."""
        running = self._scheduler.running
        if len(running) > 1:
            self._scheduler.preempt(running[-1])
        else:
            running[0].fail(error)
            self._retire(running[0])

    def _retire(self, request: Request, tokens: SequenceOf[int] = (), origins: SequenceOf[int] = ()) -> None:
        """Free what a finished request holds, and deliver its output (one for each sample that was never made)."""
        self._scheduler.remove(request)
        self.arena.free(request.sequence.key)
        if request.drafting:
            self.drafter.close(request.sequence.key)
        text = request.text.finish()
        for index in range(request.sample_index, request.sample_index + request.num_samples):
            output = dataclasses.replace(request.output(), sample_index=index)
            self._total += output.figures
            self._finished[output.finish_reason] = self._finished.get(output.finish_reason, 0) + 1
            self._undelivered.append(
                Progress(request.request_id, index, list(tokens), list(origins), text if request.streams else "", output)
            )

    def _active(self, request_id: str) -> list[Request]:
        found = [request for request in self._scheduler.active if request.request_id == request_id]
        if not found:
            known = sorted({request.request_id for request in self._scheduler.active})
            raise LifecycleError(f"request {request_id!r} is not active (active: {', '.join(known) or 'none'})")
        return found

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key - 1

    def _allowance(self, num_prompt: int, max_tokens: int | None) -> int:
        """Tokens that a request may generate before max_tokens or the context ends it."""
        context = self.target.context_length
        if context is not None and num_prompt >= context:
            raise PromptError(
                f"the prompt has {num_prompt} tokens, and the context of {context} tokens must also hold at least one "
                "generated token; shorten the prompt"
            )
        if num_prompt + 1 > self.arena.max_rows:
            raise ArenaFullError(
                num_prompt + 1, self.arena.max_rows, self.arena.max_rows, self.arena.row_bytes,
                "The prompt can never fit: shorten it, or raise kv_tokens.",
            )  # fmt: skip
        left = (context if context is not None else self.arena.max_rows) - num_prompt
        return left if max_tokens is None else min(max_tokens, left)

    def _tokenizer_beside(
        self, model: str | os.PathLike[str], options: LoadOptions
    ) -> PreTrainedTokenizerBase | None:
        try:
            return load_tokenizer(model, options)
        except OutpaceError as error:
            self._why_no_tokenizer = f" ({error})"
            return None

    # --- whole prompts ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        namespace: str = "",
        errors: Literal["raise", "return"] = "raise",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Output]:
        """Generate for any number of prompts, of any lengths, in one batch as far as the engine's limits allow.

        Args:
            prompts: Text, conversations (lists of messages) or token ids; one or several.
            params: For all, or one for each.
            namespace: See `submit`.
            errors: What becomes of a request that goes wrong, when all others have finished: ``"raise"`` raises the first
                error, with all outputs in its attribute ``outputs``; ``"return"`` returns outputs whose ``error`` is set.
            on_progress: Called with every step's progress of these requests, for instance by a progress bar.

        Returns:
            One output for each prompt and sample, in order of prompts, then samples.
        """
        listed = as_list(prompts)
        each = _params_for(params, len(listed))
        outputs: list[Output] = []
        ids: set[str] = set()
        for index, (prompt, own) in enumerate(zip(listed, each, strict=True)):
            try:
                ids.add(self.submit(prompt, own, namespace=namespace, prompt_index=index))
            except OutpaceError as error:
                outputs.append(_failed(index, error))
        for progress in self._drain(ids):
            if on_progress is not None:
                on_progress(progress)
            if progress.output is not None:
                outputs.append(progress.output)
        outputs.sort(key=lambda output: (output.prompt_index, output.sample_index))
        first = next((output.error for output in outputs if output.error is not None), None)
        if first is not None and errors == "raise":
            first.outputs = outputs
            raise first
        return outputs

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: str = ""
    ) -> Iterator[Progress]:
        """Generate for one prompt and yield what every step commits; leaving the loop early aborts the request.

        The texts of one sample, joined, are its output's text. A piece never ends inside a character, and nothing is shown
        that might turn out to begin a stop string.

        Raises:
            OutpaceError: What went wrong with the request, after what it generated was yielded.
        """
        request_id = self.submit(prompt, params, namespace=namespace, stream=True)
        for progress in self._drain({request_id}):
            yield progress
            if progress.output is not None and progress.output.error is not None:
                raise progress.output.error

    def _drain(self, ids: set[str]) -> Iterator[Progress]:
        """Run steps until these requests have finished; others' progress is kept for whoever calls `step` next."""
        others: list[Progress] = []
        try:
            while self._undelivered or any(request.request_id in ids for request in self._scheduler.active):
                for progress in self.step():
                    if progress.request_id in ids:
                        yield progress
                    else:
                        others.append(progress)
        finally:
            for request_id in ids & {request.request_id for request in self._scheduler.active}:
                self.abort(request_id)
            self._undelivered = [p for p in self._undelivered if p.request_id not in ids]
            self._undelivered = others + self._undelivered


def _split_options(options: dict[str, Any], *, loads: bool) -> tuple[EngineConfig, LoadOptions]:
    own = {field.name for field in dataclasses.fields(EngineConfig)}
    loading = {field.name for field in dataclasses.fields(LoadOptions)}
    for name in options:
        if name not in own | loading:
            raise UnknownNameError("engine option", name, own | loading)
        if name in loading and not loads:
            raise ConfigError(f"{name} is for loading a model by name, and the model given is already loaded")
    return (
        from_mapping(EngineConfig, {k: v for k, v in options.items() if k in own}, "engine option"),
        from_mapping(LoadOptions, {k: v for k, v in options.items() if k in loading}, "loading option"),
    )


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids of the generation config, else of the model's config."""
    generation: Any = getattr(model, "generation_config", None)
    found: Any = getattr(generation, "eos_token_id", None)
    if generation is None:
        found = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(int(token) for token in (found if isinstance(found, list | tuple) else [found]))


def _params_for(params: SamplingParams | SequenceOf[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"expected one SamplingParams for each of {count} prompts, found {len(params)}")
    return list(params)


def _failed(index: int, error: OutpaceError) -> Output:
    return Output(f"rejected-{index}", index, 0, [], [], "", "error", None, None, None, Figures(), error)
