"""Drafters by name; `outpace.draft.spec` says how one is written down.

What a spec can say of a drafter are the parameters of its class. Two are never options: ``parts`` takes the drafters in
brackets, ``sources`` what was learned outside the request (`outpace.draft.sources.Sources`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outpace.draft.base import Drafter
from outpace.draft.llma import LlmaDrafter
from outpace.draft.lookup import LookupDrafter
from outpace.draft.merge import MOST_PARTS, MergeDrafter
from outpace.draft.none import NoneDrafter
from outpace.draft.oracle import Continuations, OracleDrafter
from outpace.draft.recycling import RecyclingDrafter
from outpace.draft.sam import SamDrafter
from outpace.draft.spec import DrafterSpec, parse_drafter
from outpace.draft.suffix import SuffixDrafter
from outpace.draft.suffix_tree import SuffixTreeDrafter
from outpace.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from outpace.draft.sources import Sources

__all__ = [
    "DrafterSpec",
    "available_drafters",
    "build_drafter",
    "drafters_with_sources",
    "parse_drafter",
    "uses_sources",
]

_INJECTED = ("continuations", "parts", "sources")  # parameters that no spec can name


@dataclass(frozen=True, slots=True)
class _Entry:
    """A drafter that a spec can name.

    Attributes:
        build: Makes it; its parameters are the options, but for those that are given by `build_drafter`.
        summary: One line on what it does.
        needs_continuations: Whether it can only draft what it was told.
        least: Fewest drafters that it can be made of.
        most: Most of them; 0 if it is not made of others.
        default_parts: Their specs where the brackets are left out.
    """

    build: Callable[..., Drafter]
    summary: str
    needs_continuations: bool = False
    least: int = 0
    most: int = 0
    default_parts: tuple[str, ...] = ()


_DRAFTERS = {
    "none": _Entry(NoneDrafter, "no drafts: plain autoregressive decoding"),
    "lookup": _Entry(LookupDrafter, "prompt lookup decoding: n-grams of 3 down to 1 tokens, first match, 10 tokens"),
    "llma": _Entry(LlmaDrafter, "LLMA: copies 7 tokens after a match of at least 2"),
    "suffix": _Entry(SuffixDrafter, "SAM-Decoding's automaton: the longest match in the request's own text, 40 tokens"),
    "suffix-tree": _Entry(
        SuffixTreeDrafter, "trees from every context in own text, memory and corpora, grown best-first"
    ),
    "recycling": _Entry(RecyclingDrafter, "Token Recycling: the model's own candidates after each token, a tree of 80"),
    "merge": _Entry(
        MergeDrafter,
        "unites the trees of several drafters, merge[suffix, recycling]",
        least=1,
        most=MOST_PARTS,
        default_parts=("suffix", "recycling"),
    ),
    "sam": _Entry(SamDrafter, "SAM-Decoding: own text, memory and corpora, or another's tree: sam[recycling]", most=1),
    "oracle": _Entry(OracleDrafter, "for tests: random trees that hold the known output, oracle(.3)", True),
}


def available_drafters(*, usable_only: bool = False) -> dict[str, str]:
    """Every drafter that a spec can name, with one line on what it does.

    Args:
        usable_only: Without those that must know the output before, such as ``oracle``: what an engine can be given by
            name.
    """
    return {
        name: entry.summary
        for name, entry in sorted(_DRAFTERS.items())
        if not (usable_only and entry.needs_continuations)
    }


def build_drafter(
    spec: str | Drafter | DrafterSpec, continuations: Continuations | None = None, sources: Sources | None = None
) -> Drafter:
    """Make the drafter that a spec describes, and those that it is made of.

    Args:
        spec: For instance ``"suffix(draft_size=20)"`` or ``"merge[suffix, lookup]"``. A drafter is returned as it is.
        continuations: For each prompt, as a tuple of token ids, what follows it. ``oracle`` needs it, and so can only
            be built where the output is known before: in a replay, in a test. Other drafters never see it.
        sources: Text outside the request, for the drafters that can use it; the same for all parts.

    Raises:
        UnknownNameError: No such drafter, or no such option of it.
        ConfigError: The spec cannot be read, or an option's value or the number of parts does not fit. Where a part is
            to blame, the message ends with the whole spec.
    """
    if isinstance(spec, Drafter):
        return spec
    if isinstance(spec, str):
        spec = parse_drafter(spec)
    given: object = spec  # callers may hand over a class, or anything else
    if not isinstance(given, DrafterSpec):
        found = given.__name__ if isinstance(given, type) else type(given).__name__
        raise ConfigError(f"drafter must be a name or an instance of Drafter, found {found}")
    injected = {"continuations": continuations, "sources": sources}
    if not spec.parts:
        return _build(spec, injected)
    try:
        return _build(spec, injected)
    except UnknownNameError as error:
        raise UnknownNameError(error.kind, error.name, error.known, f"In drafter '{spec}'.") from None
    except ConfigError as error:
        raise ConfigError(f"{error} (in drafter '{spec}')") from error


def drafters_with_sources() -> list[str]:
    """Names of the drafters that draft from memory and corpora, alone or as a part of another."""
    return [name for name, entry in sorted(_DRAFTERS.items()) if _takes_sources(entry)]


def uses_sources(spec: str | DrafterSpec) -> bool:
    """Whether a drafter, or one that it is made of, drafts from memory and corpora.

    Raises:
        UnknownNameError: No such drafter.
        ConfigError: The spec cannot be read.
    """
    if isinstance(spec, str):
        spec = parse_drafter(spec)
    if spec.name not in _DRAFTERS:
        raise UnknownNameError("drafter", spec.name, _DRAFTERS)
    entry = _DRAFTERS[spec.name]
    return _takes_sources(entry) or any(uses_sources(part) for part in _part_specs(spec, entry))


def _takes_sources(entry: _Entry) -> bool:
    return "sources" in inspect.signature(entry.build).parameters


def _build(spec: DrafterSpec, injected: dict[str, Any]) -> Drafter:
    """One drafter and its parts; ``injected`` holds what a spec cannot say."""
    if spec.name not in _DRAFTERS:
        raise UnknownNameError("drafter", spec.name, _DRAFTERS)
    entry = _DRAFTERS[spec.name]
    if entry.needs_continuations and injected["continuations"] is None:
        raise ConfigError(
            f"drafter {spec.name!r} drafts outputs that are known before; it works in `outpace replay` and in tests"
        )
    options: dict[str, Any] = _bind_options(spec, entry)
    parts = _part_specs(spec, entry)
    taken = inspect.signature(entry.build).parameters
    options |= {name: value for name, value in injected.items() if name in taken}
    if "parts" in taken:
        options["parts"] = [_build(part, injected) for part in parts]
    return entry.build(**options)


def _part_specs(spec: DrafterSpec, entry: _Entry) -> SequenceOf[DrafterSpec]:
    """The drafters in brackets, or those that stand for none."""
    if entry.most == 0 and spec.parts:
        raise ConfigError(f"drafter {spec.name!r} is not made of other drafters: leave out [{spec.parts[0]}...]")
    parts = spec.parts or tuple(map(parse_drafter, entry.default_parts))
    if not entry.least <= len(parts) <= entry.most:
        allowed = str(entry.most) if entry.least == entry.most else f"{entry.least} to {entry.most}"
        raise ConfigError(f"drafter {spec.name!r} is made of {allowed} others, in brackets; found {len(parts)}")
    return parts


def _bind_options(spec: DrafterSpec, entry: _Entry) -> dict[str, Any]:
    parameters = [p for p in inspect.signature(entry.build).parameters.values() if p.name not in _INJECTED]
    names = [p.name for p in parameters]
    if len(spec.positional) > len(names):
        takes = f"takes {len(names)} options ({', '.join(names)})" if names else "takes no options"
        raise ConfigError(f"drafter {spec.name!r} {takes}, found {len(spec.positional)}")
    bound: dict[str, Any] = dict(zip(names, spec.positional, strict=False))
    for name, value in spec.options:
        if name not in names:
            raise UnknownNameError(f"option of drafter {spec.name!r}", name, names)
        if name in bound:
            raise ConfigError(f"drafter {spec.name!r}: option {name} is given twice")
        bound[name] = value
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in bound:
            raise ConfigError(f"drafter {spec.name!r} needs option {parameter.name}, as in {spec.name}(.3)")
    return bound
