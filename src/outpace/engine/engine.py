"""The engine: submit prompts, run steps, get the model's own tokens back, sooner."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from outpace.config import SamplingParams
from outpace.draft import Drafter, build_drafter
from outpace.draft.sources import Sources
from outpace.engine.core import EngineCore
from outpace.engine.learned import adapter_of, check_sources, check_vocabulary, memory_of, namespace_of, open_sources
from outpace.engine.output import EngineFigures, Output, Progress
from outpace.engine.prompts import Prompt, as_list, to_token_ids
from outpace.engine.request import Request
from outpace.engine.setup import eos_ids, failed_output, params_for, split_options, stop_tokens, tokenizer_beside
from outpace.engine.text import TextStream
from outpace.errors import (
    ArenaFullError,
    ConfigError,
    LifecycleError,
    OutpaceError,
    PromptError,
    UnknownNameError,
)
from outpace.model import KVArena, Target, load_model, load_tokenizer, probe
from outpace.sequence import Sequence
from outpace.verify import Chooser


class Engine:
    """Generates with speculation on any Hugging Face causal model, without changing what it generates.

    An engine is not thread-safe: one thread calls it. While a step runs, nobody else may use the model.

    Example::

        engine = Engine("path/or/hub-id", drafter="suffix")
        for output in engine.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.text, output.figures.mean_accepted_tokens)

    Args:
        model: A folder, a hub id, a loaded model of Transformers (or PEFT), which is left as it was found, or the target
            that `outpace.model.probe` made of one (``backend`` and ``context_length`` are then the target's).
        tokenizer: A folder, a hub id or a tokenizer. None: the one beside the model if ``model`` is a name; else there is
            none, and prompts must be token ids.
        drafter: Where drafts come from, see `outpace.available_drafters`.
        sources: Corpora and memory of another engine, to share them, in place of the options ``memory`` and ``corpora``.
        options: Fields of `EngineConfig` and, where ``model`` is a name, of `LoadOptions`.

    Raises:
        UnknownNameError: No such option or drafter.
        CheckpointError: The model cannot be loaded.
        UnsupportedModelError: It cannot be run packed.
        CorpusError: A corpus cannot be used, or sources hold token ids that the model does not know.
        ConfigError: ``memory`` or ``corpora`` besides ``sources``, or another value that does not fit.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module | Target,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        drafter: str | Drafter = "suffix",
        sources: Sources | None = None,
        **options: Any,
    ) -> None:
        self.config, load_options = split_options(options, loads=isinstance(model, str | os.PathLike))
        self.drafter = build_drafter(drafter)  # names and values first; with its sources once they are open
        check_sources(drafter, self.config, sources)
        if not isinstance(model, str | os.PathLike | torch.nn.Module | Target):
            raise ConfigError(f"model must be a folder, a hub id or a loaded model, found {type(model).__name__}")
        self._why_no_tokenizer = ""
        if isinstance(model, str | os.PathLike):
            name, model = model, load_model(model, load_options)
            if tokenizer is None:
                tokenizer, self._why_no_tokenizer = tokenizer_beside(name, load_options)
        self.tokenizer: PreTrainedTokenizerBase | None = (
            load_tokenizer(tokenizer, load_options) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        )
        if not isinstance(model, Target):
            config = self.config
            model = probe(
                model,
                backend=config.backend,
                context_length=config.context_length,
                pack_weights=config.pack_weights,
                compile_model=config.compile,
            )
        self.target = model
        if sources is None:
            sources = open_sources(self.config, self.tokenizer, self.target.num_embeddings)
        else:
            check_vocabulary(sources, self.target.num_embeddings)
        self.sources = sources
        if sources is not None:
            self.drafter = build_drafter(drafter, sources=sources)
        self._core = EngineCore(self.target, self.drafter, self.config, sources.memory if sources is not None else None)
        self.adapter = partial(adapter_of, self.target.model, load_options.adapter)  # callers may switch theirs
        self._eos_ids = eos_ids(self.target.model)
        self._boxes: dict[str, list[Progress]] = {}  # of requests that `generate` or `stream` waits for
        self._unclaimed: list[Progress] = []  # of all others, for whoever calls `step`

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
        request = self._build(prompt, params, request_id, namespace, stream, prompt_index)
        self._core.add(request)
        return request.request_id

    def _build(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        namespace: str = "",
        stream: bool = False,
        prompt_index: int = 0,
    ) -> Request:
        """A request that is ready to be queued; see `submit`."""
        params = params or SamplingParams()
        request_id = self._new_id(request_id)
        tokens = to_token_ids(prompt, self.tokenizer, self.target.num_embeddings, self._why_no_tokenizer)
        if params.stop and self.tokenizer is None:
            raise ConfigError(f"stop strings need a tokenizer, and there is none{self._why_no_tokenizer}")
        if params.n > self.config.max_batch_size:
            raise ConfigError(f"n must be at most max_batch_size, {self.config.max_batch_size}, found {params.n}")
        return Request(
            request_id,
            Sequence(self._core.new_key(), tokens, namespace_of(namespace, self.adapter())),
            params,
            Chooser(params, tokens, self.target.vocab_size),
            TextStream(self.tokenizer, params.stop, params.include_stop),
            stop_tokens=stop_tokens(params, self._eos_ids, self.tokenizer),
            max_tokens=self._allowance(len(tokens), params.max_tokens),
            prompt_index=prompt_index,
            streams=stream,
        )

    def _new_id(self, wanted: str | None) -> str:
        request_id = wanted or f"request-{self._core.new_key()}"
        if request_id in self._core.requests:
            raise LifecycleError(f"request id {request_id!r} is in use")
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request with all its samples; their outputs, as far as they came, are in the next step's progress.

        Raises:
            LifecycleError: No active request has this id.
        """
        for request in list(self._active(request_id)):
            request.finish("abort")
            self._core.retire(request)

    def fork(self, request_id: str, *, new_request_id: str | None = None, seed: int | None = None) -> str:
        """Let a copy of a running request go on by itself from here; both share the keys and values so far.

        Args:
            request_id: An active request with one sample.
            new_request_id: Made up if not given.
            seed: Of the copy; one more than the original's by default.

        Raises:
            LifecycleError: No such active request, several samples, or the new id is in use.
            ConfigError: A negative seed.
        """
        if seed is not None and seed < 0:
            raise ConfigError(f"seed must be at least 0, found {seed}")
        originals = self._active(request_id)
        if len(originals) > 1 or originals[0].num_samples > 1:
            raise LifecycleError(f"request {request_id!r} has several samples; fork takes a request with one")
        new_id = self._new_id(new_request_id)
        original = originals[0]
        twin = self._core.fork(original, new_id, 0, original.chooser.seed + 1 if seed is None else seed)
        self._core.scheduler.waiting.append(twin)
        return new_id

    @property
    def arena(self) -> KVArena:
        """Keys and values of all requests."""
        return self._core.arena

    @property
    def active(self) -> list[str]:
        """Ids of the requests that have not finished."""
        return list(self._core.requests)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._core.requests or self._core.undelivered or self._unclaimed)

    def figures(self) -> EngineFigures:
        """Totals since the engine was made."""
        return self._core.figures()

    # --- memory ----------------------------------------------------------------------------------------------------

    def save_memory(self, folder: str | os.PathLike[str]) -> None:
        """Write what is remembered of earlier responses; see `outpace.suffix.memory.ResponseMemory.save`."""
        memory_of(self.sources).save(os.fspath(folder))

    def load_memory(self, folder: str | os.PathLike[str]) -> None:
        """Take in what `save_memory` wrote; see `outpace.suffix.memory.ResponseMemory.load`."""
        memory_of(self.sources).load(os.fspath(folder), vocab_size=self.target.num_embeddings)

    # --- one step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Progress]:
        """Draft, reduce, pack, forward, verify, commit: for every running request at once.

        Returns:
            What each request that took part got; finished ones carry their output. A request that goes wrong finishes with
            its error, and the others go on.
        """
        self._pump()
        delivered, self._unclaimed = self._unclaimed, []
        return delivered

    def _pump(self) -> None:
        """Run one step, and put everybody's progress where they will look for it."""
        try:
            self._core.step()
        finally:
            self._sort_progress()

    def _sort_progress(self) -> None:
        delivered, self._core.undelivered = self._core.undelivered, []
        for progress in delivered:
            self._boxes.get(progress.request_id, self._unclaimed).append(progress)

    def _active(self, request_id: str) -> list[Request]:
        if request_id not in self._core.requests:
            known = list(self._core.requests)
            shown = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
            raise LifecycleError(f"request {request_id!r} is not active (active: {shown or 'none'})")
        return self._core.requests[request_id]

    def _allowance(self, num_prompt: int, max_tokens: int | None) -> int:
        """Tokens that a request may generate before max_tokens or the context ends it."""
        context = self.target.context_length
        if context is not None and num_prompt >= context:
            raise PromptError(
                f"the prompt has {num_prompt} tokens, and the context of {context} tokens must also hold at least one "
                "generated token; shorten the prompt"
            )
        if num_prompt + 1 > self._core.arena.max_rows:
            raise ArenaFullError(
                num_prompt + 1, self._core.arena.max_rows, self._core.arena.max_rows, self._core.arena.row_bytes,
                "The prompt can never fit: shorten it, or raise kv_tokens.",
            )  # fmt: skip
        left = (context if context is not None else self._core.arena.max_rows) - num_prompt
        return left if max_tokens is None else min(max_tokens, left)

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
        if errors not in ("raise", "return"):
            raise UnknownNameError("value of errors", errors, ["raise", "return"])
        listed = as_list(prompts)
        each = params_for(params, len(listed))
        outputs: list[Output] = []
        ids: set[str] = set()
        for index, (prompt, own) in enumerate(zip(listed, each, strict=True)):
            try:
                ids.add(self.submit(prompt, own, namespace=namespace, prompt_index=index))
            except OutpaceError as error:
                outputs.append(failed_output(index, error))
        for progress in self._drain(ids, ends_on_error=True):
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
        that might turn out to begin a stop string. Several streams may be read in turn; each step serves all of them.

        Args:
            prompt: Text, a list of messages, or token ids.
            params: How it is decoded; greedy by default.
            namespace: See `submit`.

        Raises:
            OutpaceError: Right away what `submit` would raise; while it is read, what went wrong with the request, after
                everything that it generated was yielded.
        """
        return self._stream(self._build(prompt, params, namespace=namespace, stream=True))

    def _stream(self, request: Request) -> Iterator[Progress]:
        self._core.add(request)
        error: OutpaceError | None = None
        for progress in self._drain({request.request_id}):
            yield progress
            if progress.output is not None:
                error = error or progress.output.error
        if error is not None:
            raise error

    def _drain(self, ids: set[str], *, ends_on_error: bool = False) -> Iterator[Progress]:
        """Run steps until these requests have finished, and yield their progress.

        Args:
            ids: The requests.
            ends_on_error: If a whole step goes wrong, end these requests with its error instead of raising it.
        """
        box: list[Progress] = []
        self._boxes.update(dict.fromkeys(ids, box))
        try:
            while box or not ids.isdisjoint(self._core.requests):
                if not box:
                    try:
                        self._pump()
                    except OutpaceError as error:
                        if not ends_on_error:
                            raise
                        self._fail(ids, error)
                while box:
                    yield box.pop(0)
        finally:
            for request_id in ids & set(self._core.requests):
                self.abort(request_id)
            self._sort_progress()
            for request_id in ids:
                del self._boxes[request_id]

    def _fail(self, ids: set[str], error: OutpaceError) -> None:
        for request_id in ids & set(self._core.requests):
            for request in list(self._core.requests[request_id]):
                request.fail(error)
                self._core.retire(request)
        self._sort_progress()
