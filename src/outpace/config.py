"""What a caller can set. Every class checks itself; unknown names are refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from outpace.errors import ConfigError, UnknownNameError

BACKENDS = ("auto", "cpu", "torch")  # of attention, see `outpace.model.backends`

T = TypeVar("T")


@runtime_checkable
class Constraint(Protocol):
    """Restricts what may be generated, for instance to a grammar.

    A constraint is asked at the positions that the verification reaches, once each. States are opaque values that are
    never changed in place, since several continuations of one state may be looked at.
    """

    def start(self) -> Any:
        """State before the first generated token."""

    def allowed(self, state: Any) -> npt.NDArray[np.bool_]:
        """``bool[vocab]``: tokens that may come next. All False is an error of the constraint."""

    def advance(self, state: Any, token: int) -> Any:
        """State after ``token``, which was allowed in ``state``."""


def _names_checked(cls: type[T]) -> type[T]:
    """Let a dataclass refuse unknown names with what exists and what is close, where Python has a bare TypeError."""
    create: Any = cls.__init__

    @functools.wraps(create)
    def checked(self: T, *args: Any, **values: Any) -> None:
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise UnknownNameError(f"parameter of {cls.__name__}", name, known)
        create(self, *args, **values)

    cls.__init__ = checked  # type: ignore[method-assign,assignment]
    return cls


@_names_checked
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded and when it ends.

    The same seed gives the same tokens whatever the drafter, the batch and the machine's timing: at each position the
    token is the arg max of processed logits plus Gumbel noise keyed by (seed, position, token id).

    Attributes:
        max_tokens: Most tokens to generate, at least 1. None: until the model's context ends.
        temperature: 0 is greedy decoding.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with at least this probability; 1 keeps all.
        min_p: Drop tokens less likely than this share of the most likely one's probability; 0 drops none.
        repetition_penalty: Divides (positive) or multiplies (negative) the logits of tokens that occurred in the prompt or
            the output; 1 does nothing.
        presence_penalty: Subtracted once from the logit of every token that the output holds.
        frequency_penalty: Subtracted from a token's logit once for each time that the output holds it.
        logit_bias: Token id to a number added to its logit.
        seed: For sampling; None draws one. The output reports the seed that was used.
        n: Number of samples of the same prompt; sample ``i`` uses ``seed + i``.
        stop: Strings at which generation ends; needs a tokenizer. The text is cut before the string.
        include_stop: Keep the stop string in the text.
        stop_token_ids: Token ids at which generation ends, besides those of the model's generation config.
        ignore_eos: Do not end at the generation config's end-of-sequence ids.
        logprobs: None for none; otherwise log-probabilities (of the model's own distribution, before any processing) of
            every committed token and of this many most likely ones.
        constraint: Restricts the tokens, or None.
        processor: Changes the scores, or None: called with the text before the token to be chosen (``int32[n]``, prompt and
            output) and the scores after penalties (``float32[V]``, a tensor on the CPU that it may overwrite); returns the
            new scores, of the same shape. It is called at the positions that the verification reaches, in their order.
        speculate: False decodes this request without drafts.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None
    processor: Callable[[Any, Any], Any] | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: Naming the field, what was expected and what was found.
        """
        given: object = self.stop
        object.__setattr__(self, "stop", (given,) if isinstance(given, str) else tuple(self.stop))
        ids: object = self.stop_token_ids
        if not isinstance(ids, Iterable) or isinstance(ids, str):
            raise ConfigError(f"stop_token_ids must be a list of token ids, found {ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        _check_int("max_tokens", self.max_tokens, 1, optional=True)
        _check_int("top_k", self.top_k, 0)
        _check_int("n", self.n, 1)
        _check_int("logprobs", self.logprobs, 0, optional=True)
        _check_int("seed", self.seed, 0, 2**63 - 1, optional=True)
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, exclude_low=True)
        _check_number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _check_number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias token id", token, 0)
            if not isinstance(bias, int | float) or math.isnan(bias) or bias == math.inf:
                raise ConfigError(f"logit_bias of token {token} must be a number below infinity, found {bias!r}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop must hold non-empty strings, found {text!r}")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise ConfigError(
                f"constraint must have start, allowed and advance; found {type(self.constraint).__name__}"
            )
        if self.processor is not None and not callable(self.processor):
            raise ConfigError(f"processor must be callable, found {type(self.processor).__name__}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature == 0.0

    @property
    def plain_greedy(self) -> bool:
        """Whether the arg max of the model's own logits decides, with nothing to process."""
        return (
            self.greedy
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.logit_bias
            and self.constraint is None
            and self.processor is None
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine shares the machine among its requests.

    Attributes:
        max_batch_size: Most requests that run at a time; others wait.
        max_nodes: Most draft nodes of one sequence in one step.
        max_step_tokens: Most prompt tokens that one step computes; longer prompts are computed in chunks.
        kv_tokens: Most tokens whose keys and values are kept, over all requests. None: as many as half of the memory
            that is free when the engine is made can hold.
        context_length: Most tokens of a sequence, prompt and output together. None: what the model's config says.
        guard: Cut drafts that do not pay by the clock. The tokens are the same with and without it.
        backend: Attention backend: ``"cpu"``, one compiled call a layer (float32 and bfloat16); ``"torch"``, plain PyTorch
            on any device, the reference; ``"auto"``, the former where it applies, else the latter.
        pack_weights: Keep copies of the weights of linear layers in the layout of the CPU's matrix kernels, which doubles their
            memory and makes passes over a few tokens faster. None: where they fit into a quarter of the free memory.
        compile: Run the model through ``torch.compile`` (an option to try: it pays on some machines). It gives way by itself,
            with a warning, where it does not work.
        memory: Remember finished responses, each for its namespace and adapter, and draft from them. The text of one
            namespace never drafts for another. Aborted and failed requests are not remembered.
        memory_tokens: Most tokens that are remembered of each namespace, about 24 bytes a token; the oldest are dropped. At
            most 256 namespaces are kept: beyond, that which was used least recently is dropped.
        corpora: Folders that ``outpace corpus build`` wrote, with the model's own tokenizer, to draft from.
        skip_unusable_corpora: Go on, with a warning, without a corpus that is missing, damaged or of another tokenizer.
        debug: Check every drafted tree and audit the arena at every step (slow).
    """

    max_batch_size: int = 32
    max_nodes: int = 64
    max_step_tokens: int = 2048
    kv_tokens: int | None = None
    context_length: int | None = None
    guard: bool = True
    backend: str = "auto"
    pack_weights: bool | None = None
    compile: bool = False
    memory: bool = False
    memory_tokens: int = 2**22
    corpora: tuple[str, ...] = ()
    skip_unusable_corpora: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: Naming the field, what was expected and what was found.
        """
        _check_int("max_batch_size", self.max_batch_size, 1)
        _check_int("max_nodes", self.max_nodes, 0)
        _check_int("max_step_tokens", self.max_step_tokens, 1)
        _check_int("kv_tokens", self.kv_tokens, 1, optional=True)
        _check_int("context_length", self.context_length, 2, optional=True)
        _check_int("memory_tokens", self.memory_tokens, 1)
        given: object = self.corpora
        folders = (given,) if isinstance(given, str | os.PathLike) else given
        if not isinstance(folders, list | tuple) or not all(isinstance(f, str | os.PathLike) for f in folders):
            raise ConfigError(f"corpora must be a list of folders, found {given!r}")
        object.__setattr__(self, "corpora", tuple(map(os.fspath, folders)))
        if self.backend not in BACKENDS:
            raise UnknownNameError("attention backend", str(self.backend), BACKENDS)


def from_mapping(cls: type[T], values: Mapping[str, Any], kind: str) -> T:
    """Build a config dataclass from names and values, refusing unknown names.

    Args:
        cls: The dataclass.
        values: Field names and their values.
        kind: What a field is called in the error, for instance ``"sampling parameter"``.

    Raises:
        UnknownNameError: A name that is no field.
    """
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise UnknownNameError(kind, name, known)
    return cls(**values)


def _check_int(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be an integer {bounds}{' or None' if optional else ''}, found {value!r}")


def _check_number(name: str, value: object, low: float, high: float, *, exclude_low: bool = False) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    fits = is_number and low <= value <= high and math.isfinite(value) and not (exclude_low and value == low)  # type: ignore[operator,arg-type]
    if not fits:
        interval = f"{'above' if exclude_low else 'at least'} {low:g}" if math.isfinite(low) else ""
        if math.isfinite(high):
            interval += f"{' and ' if interval else ''}at most {high:g}"
        raise ConfigError(f"{name} must be a finite number{' ' + interval if interval else ''}, found {value!r}")
