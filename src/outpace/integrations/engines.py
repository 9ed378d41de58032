"""Engines that are kept between calls, one set for each model, for as long as the model lives.

Probing a model takes a few passes, so it is done once. What is kept must not keep the model alive, though: the probed
target holds a weak reference to it, and when the model goes, its entry goes. A changed model (another dtype or device,
other modules, other windows) is probed again. So is one with other weights: a target may keep copies of weights in
another layout, and a change through ``.data``, as when an adapter is merged, leaves no trace but the numbers.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from outpace.config import EngineConfig
from outpace.draft import Drafter, build_drafter
from outpace.engine import Engine
from outpace.model import Target, probe
from outpace.model.attention import attention_configs

_SAMPLED = 16  # numbers of each weight that are compared, or a few more
_MOST_ENGINES = 4  # kept for one model; each holds keys and values of its largest batch so far
_READ_AT_RUNTIME = (
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
    "max_position_embeddings",
    "rope_parameters",
)


@dataclass(eq=False)
class _Kept:
    """What is kept of one model.

    Attributes:
        lock: Held by the call that runs; taken again where a caller's own code, inside a call, calls once more.
        state: What the targets were probed for.
        targets: By attention backend.
        engines: By drafter and options, the least recently used first; one that runs is taken out.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    state: object = None
    targets: dict[str, Target] = field(default_factory=dict)
    engines: OrderedDict[object, Engine] = field(default_factory=OrderedDict)


_kept: weakref.WeakKeyDictionary[PreTrainedModel, _Kept] = weakref.WeakKeyDictionary()
_kept_lock = threading.Lock()


@contextmanager
def engine_for(model: PreTrainedModel, drafter: str | Drafter, options: dict[str, Any]) -> Iterator[Engine]:
    """Lend the model's engine for one call; calls from several threads on one model wait for each other.

    After an exception the engine is given up, since a step may have been left half way; the probed target stays.

    Args:
        model: A loaded causal model.
        drafter: Where drafts come from.
        options: Fields of `EngineConfig`.

    Raises:
        UnknownNameError: No such drafter, backend or option.
        UnsupportedModelError: The model cannot be run packed.
    """
    with _kept_lock:
        kept = _kept.setdefault(model, _Kept())
    with kept.lock:
        state = _state_of(model)
        if state != kept.state:
            kept.targets.clear()
            kept.engines.clear()
            kept.state = state
        key = (drafter if isinstance(drafter, str) else id(drafter), EngineConfig(**options))
        engine = kept.engines.pop(key, None) or _build(model, kept, drafter, options)
        try:
            yield engine
        except BaseException:
            _abandon(engine)
            raise
        kept.engines[key] = engine
        while len(kept.engines) > _MOST_ENGINES:
            kept.engines.popitem(last=False)


def release(model: PreTrainedModel | None = None) -> None:
    """Give up what is kept of a model (or of all): its engines with their memory for keys and values.

    The next call builds them anew, and probes the model again.

    Args:
        model: The model; None for all.
    """
    with _kept_lock:
        if model is None:
            _kept.clear()
        else:
            _kept.pop(model, None)


def _build(model: PreTrainedModel, kept: _Kept, drafter: str | Drafter, options: dict[str, Any]) -> Engine:
    # Names and values first: a refusal should not wait for the probe.
    build_drafter(drafter)
    backend = EngineConfig(**options).backend
    if backend not in kept.targets:
        target = probe(model, backend=backend)
        weak: Any = weakref.proxy(target.model)
        kept.targets[backend] = dataclasses.replace(target, model=weak)
    return Engine(kept.targets[backend], drafter=drafter, **options)


def _state_of(model: PreTrainedModel) -> object:
    """Equal as long as a probed target still describes the model."""
    configs = [
        tuple(repr(getattr(config, name, None)) for name in _READ_AT_RUNTIME) for config in attention_configs(model)
    ]
    parameters = [(id(p), p.dtype, p.device, p.shape) for p in model.parameters()]
    kind = model.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)  # changes what keys are stored in
    return model.training, autocast, configs, parameters, _sample(model)


@torch.no_grad()
def _sample(model: PreTrainedModel) -> list[bytes]:
    """A few numbers of each weight on the CPU, where copies may be kept, as bytes; one entry a dtype."""
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            step = max(1, parameter.numel() // _SAMPLED)
            parts.setdefault(parameter.dtype, []).append(parameter.view(-1)[::step])
    return [torch.cat(numbers).view(torch.uint8).numpy().tobytes() for numbers in parts.values()]


def _abandon(engine: Engine) -> None:
    """End what still runs, so that a drafter of the caller's holds no sequence of it."""
    for request_id in engine.active:
        with suppress(Exception):
            engine.abort(request_id)
