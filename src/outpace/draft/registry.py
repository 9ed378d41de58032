"""Drafters by name.

A **spec** names a drafter and its options; a drafter that is made of others takes them in brackets::

    spec    = name [ "(" option { "," option } ")" ] [ "[" spec { "," spec } "]" ]
    option  = [ name "=" ] value                      # without a name: by position
    value   = number | "true" | "false" | word

Examples: ``suffix``, ``suffix(draft_size=20, full_draft=true)``, ``oracle(.3)``; and, once there are drafters that take
others, ``sam[recycling]`` or ``merge[a, b(x=1)]``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from outpace.draft.base import Drafter
from outpace.draft.llma import LlmaDrafter
from outpace.draft.lookup import LookupDrafter
from outpace.draft.none import NoneDrafter
from outpace.draft.oracle import Continuations, OracleDrafter
from outpace.draft.suffix import SuffixDrafter
from outpace.errors import ConfigError, UnknownNameError

Value = int | float | bool | str

_TOKEN = re.compile(r"\s*(?:([A-Za-z0-9_.+\-/]+)|([()\[\],=]))")


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed spec; ``str`` gives its canonical form.

    Attributes:
        name: The drafter's name.
        positional: Options without a name, in order.
        options: Options by name.
        parts: Specs of the drafters in brackets.
    """

    name: str
    positional: tuple[Value, ...] = ()
    options: tuple[tuple[str, Value], ...] = ()
    parts: tuple[DrafterSpec, ...] = ()

    def __str__(self) -> str:
        shown = [_show(value) for value in self.positional] + [f"{name}={_show(value)}" for name, value in self.options]
        options = f"({', '.join(shown)})" if shown else ""
        parts = f"[{', '.join(map(str, self.parts))}]" if self.parts else ""
        return self.name + options + parts


@dataclass(frozen=True, slots=True)
class _Entry:
    """A drafter that a spec can name.

    Attributes:
        build: Makes it; its parameters are the options.
        summary: One line on what it does.
        needs_continuations: Whether it can only draft what it was told.
    """

    build: Callable[..., Drafter]
    summary: str
    needs_continuations: bool = False


_DRAFTERS = {
    "none": _Entry(NoneDrafter, "no drafts: plain autoregressive decoding"),
    "lookup": _Entry(LookupDrafter, "prompt lookup decoding: n-grams of 3 down to 1 tokens, first match, 10 tokens"),
    "llma": _Entry(LlmaDrafter, "LLMA: copies 7 tokens after a match of at least 2"),
    "suffix": _Entry(SuffixDrafter, "SAM-Decoding's automaton: the longest match in the request's own text, 40 tokens"),
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


def build_drafter(spec: str | Drafter | DrafterSpec, continuations: Continuations | None = None) -> Drafter:
    """Make the drafter that a spec describes.

    Args:
        spec: For instance ``"suffix(draft_size=20)"``. A drafter is returned as it is.
        continuations: For each prompt, as a tuple of token ids, what follows it. ``oracle`` needs it, and so can only
            be built where the output is known before: in a replay, in a test. Other drafters never see it.

    Raises:
        UnknownNameError: No such drafter, or no such option of it.
        ConfigError: The spec cannot be read, or an option's value does not fit.
    """
    if isinstance(spec, Drafter):
        return spec
    if isinstance(spec, str):
        spec = parse_drafter(spec)
    given: object = spec  # callers may hand over a class, or anything else
    if not isinstance(given, DrafterSpec):
        found = given.__name__ if isinstance(given, type) else type(given).__name__
        raise ConfigError(f"drafter must be a name or an instance of Drafter, found {found}")
    if spec.name not in _DRAFTERS:
        raise UnknownNameError("drafter", spec.name, _DRAFTERS)
    entry = _DRAFTERS[spec.name]
    if spec.parts:
        raise ConfigError(f"drafter {spec.name!r} is not made of other drafters: leave out [{spec.parts[0]}...]")
    if entry.needs_continuations and continuations is None:
        raise ConfigError(
            f"drafter {spec.name!r} drafts outputs that are known before; it works in `outpace replay` and in tests"
        )
    options = _bind_options(spec, entry)
    if entry.needs_continuations and continuations is not None:
        options["continuations"] = continuations
    return entry.build(**options)


def parse_drafter(spec: str) -> DrafterSpec:
    """Read a spec without looking at which drafters exist.

    Raises:
        ConfigError: It does not follow the grammar; says where.
    """
    parser = _Parser(spec)
    parsed = parser.spec()
    parser.expect_end()
    return parsed


def _bind_options(spec: DrafterSpec, entry: _Entry) -> dict[str, Value | Continuations]:
    parameters = [p for p in inspect.signature(entry.build).parameters.values() if p.name != "continuations"]
    names = [p.name for p in parameters]
    if len(spec.positional) > len(names):
        takes = f"takes {len(names)} options ({', '.join(names)})" if names else "takes no options"
        raise ConfigError(f"drafter {spec.name!r} {takes}, found {len(spec.positional)}")
    bound: dict[str, Value | Continuations] = dict(zip(names, spec.positional, strict=False))
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


def _show(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(word: str) -> Value:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word


class _Parser:
    """Recursive descent over one spec."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def spec(self) -> DrafterSpec:
        name = self._word("the name of a drafter")
        positional: list[Value] = []
        options: list[tuple[str, Value]] = []
        if self._take("("):
            while not self._take(")"):
                if positional or options:
                    self._need(",", "',' or ')'")
                word = self._word("an option")
                if self._take("="):
                    options.append((word, _value(self._word("a value"))))
                elif options:
                    raise self._problem("an option with a name (options by position come first)")
                else:
                    positional.append(_value(word))
        parts: list[DrafterSpec] = []
        if self._take("["):
            parts.append(self.spec())
            while not self._take("]"):
                self._need(",", "',' or ']'")
                parts.append(self.spec())
        return DrafterSpec(name, tuple(positional), tuple(options), tuple(parts))

    def expect_end(self) -> None:
        if self.text[self.at :].strip():
            raise self._problem("nothing more")

    def _next(self) -> tuple[str | None, str | None, int]:
        """The next word or sign, and where it ends."""
        match = _TOKEN.match(self.text, self.at)
        return (match[1], match[2], match.end()) if match else (None, None, self.at)

    def _take(self, sign: str) -> bool:
        _, found, end = self._next()
        if found == sign:
            self.at = end
        return found == sign

    def _need(self, sign: str, wanted: str) -> None:
        if not self._take(sign):
            raise self._problem(wanted)

    def _word(self, wanted: str) -> str:
        word, _, end = self._next()
        if word is None:
            raise self._problem(wanted)
        self.at = end
        return word

    def _problem(self, wanted: str) -> ConfigError:
        rest = self.text[self.at :].strip()
        found = repr(rest) if rest else "the end"
        return ConfigError(f"drafter {self.text!r}: expected {wanted}, found {found}")
