"""Text outside the requests that an engine drafts from: corpora and the memory of earlier responses."""

from __future__ import annotations

import logging
from typing import Any

from outpace.config import EngineConfig
from outpace.draft import Drafter
from outpace.draft.registry import drafters_with_sources, uses_sources
from outpace.draft.sources import Sources
from outpace.errors import ConfigError, CorpusError
from outpace.suffix.corpus import Corpus
from outpace.suffix.memory import ResponseMemory
from outpace.tokenizers import fingerprint

logger = logging.getLogger(__name__)

_LOADED = "default"  # PEFT's name of an adapter that was loaded without one
_SEPARATOR = "\x1f"  # between a namespace and the adapter's name


def check_sources(drafter: str | Drafter, config: EngineConfig, sources: Sources | None = None) -> None:
    """See that a drafter can use what the config gives it, and that it is not given by another engine as well.

    Raises:
        ConfigError: It can not, or it is.
    """
    if not (config.memory or config.corpora):
        return
    given = " and ".join(name for name in ("memory", "corpora") if getattr(config, name))
    if sources is not None:
        raise ConfigError(f"{given}: sources of another engine take their place; give one or the other")
    if isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter {drafter.name!r} was built before the engine and cannot be given {given}: name it, or build it with "
            "build_drafter(..., sources=...) and hand the same sources to the engine"
        )
    if not uses_sources(drafter):
        raise ConfigError(
            f"{given}: drafter {str(drafter)!r} drafts from the request's own text alone; those that use memory and corpora "
            f"are {', '.join(drafters_with_sources())}"
        )


def open_sources(config: EngineConfig, tokenizer: Any, vocab_size: int) -> Sources | None:
    """The corpora and the memory that a config asks for; None if it asks for neither.

    Args:
        config: What is wanted.
        tokenizer: The engine's, of Transformers, or None: then a corpus is taken to be of the right one.
        vocab_size: How many token ids the model knows.

    Raises:
        CorpusError: A corpus cannot be used, and the config does not say to go on without.
    """
    if not (config.memory or config.corpora):
        return None
    own = None
    if tokenizer is not None:
        try:
            own = fingerprint(tokenizer)
        except ConfigError:  # an object of the caller's that only looks like a tokenizer
            logger.warning("the tokenizer has no fingerprint; corpora and saved memories are not compared with it")
    corpora = []
    for folder in config.corpora:
        try:
            corpora.append(Corpus.open(folder, own, getattr(tokenizer, "name_or_path", None), vocab_size))
        except CorpusError as error:
            if not config.skip_unusable_corpora:
                raise
            logger.warning("going on without a corpus: %s", error)
    memory = ResponseMemory(config.memory_tokens, fingerprint=own) if config.memory else None
    return Sources(memory, tuple(corpora))


def check_vocabulary(sources: Sources, vocab_size: int) -> None:
    """See that a model knows all token ids of what another engine, or its caller, opened.

    Args:
        sources: Corpora and memory.
        vocab_size: How many token ids the model knows.

    Raises:
        CorpusError: It does not.
    """
    found = [(f"corpus {str(corpus.folder)!r}", corpus.manifest.largest_token) for corpus in sources.corpora]
    if sources.memory is not None:
        found.append(("the memory of earlier responses", sources.memory.largest_token()))
    for name, largest in found:
        if largest >= vocab_size:
            raise CorpusError(
                f"{name} holds token id {largest}, and the model knows {vocab_size} ids: it is another tokenizer's"
            )


def memory_of(sources: Sources | None) -> ResponseMemory:
    """The memory.

    Raises:
        ConfigError: There is none.
    """
    if sources is None or sources.memory is None:
        raise ConfigError("the engine keeps no memory of earlier responses; make it with memory=True")
    return sources.memory


def adapter_of(model: Any, option: str | None) -> str:
    """What changes the model's outputs besides its weights: the PEFT adapters that are switched on, or an empty string.

    The layers are asked, not a wrapper around the model: they are what computes.

    Args:
        model: The model, without or with such a wrapper.
        option: The adapter that the model was loaded with, which PEFT calls "default", or None.
    """
    found: dict[tuple[str, ...], None] = {}
    for module in model.modules():
        if not isinstance(getattr(type(module), "disable_adapters", None), property):
            continue  # no layer of PEFT's; in Transformers' models this is a method
        active = () if module.disable_adapters else getattr(module, "merged_adapters", ()) or module.active_adapters
        found[tuple(option if option and name == _LOADED else str(name) for name in active)] = None
    return "; ".join(", ".join(names) for names in found)  # several only where layers were switched one by one


def namespace_of(namespace: str, adapter: str) -> str:
    """Under which name something is learned: the caller's namespace, apart for each adapter.

    Without an adapter it is the namespace itself. No namespace can be chosen so that it names another one's.
    """
    own = namespace.replace(_SEPARATOR, 2 * _SEPARATOR)
    return f"{own}{_SEPARATOR}{adapter}" if adapter else own
