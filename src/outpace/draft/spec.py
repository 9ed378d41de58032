"""How a drafter is written down.

A **spec** names a drafter and its options; a drafter that is made of others takes them in brackets::

    spec    = name [ "(" option { "," option } ")" ] [ "[" spec { "," spec } "]" ]
    option  = [ name "=" ] value                      # without a name: by position
    value   = number | "true" | "false" | word

Examples: ``suffix``, ``suffix(draft_size=20, full_draft=true)``, ``oracle(.3)``, ``merge[suffix, recycling(tree=60)]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outpace.errors import ConfigError

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


def parse_drafter(spec: str) -> DrafterSpec:
    """Read a spec without looking at which drafters exist.

    Raises:
        ConfigError: It does not follow the grammar; says where.
    """
    parser = _Parser(spec)
    parsed = parser.spec()
    parser.expect_end()
    return parsed


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
