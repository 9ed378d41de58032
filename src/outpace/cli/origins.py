"""Where each piece of a text came from, in colour, and without.

A **piece** is a run of characters with one origin: the `outpace.tree.Origin` bits that its tokens were accepted from, or 0
for what the model chose itself. A character made of several tokens belongs to a drafter only if all of them were drafted.

With colours, pieces are coloured, and what the model chose itself is plain. Without, they stand between marks::

    def «iterencode(self, o, _one_shot=False)»:

and a letter before the mark says which drafter it was, if there is more than one.
"""

from __future__ import annotations

import io
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from outpace.engine import Progress

_STYLES = {"dynamic": "cyan", "lookup": "green", "llma": "magenta", "static": "blue", "recycling": "yellow"}
_OTHER_STYLES = ("bright_blue", "bright_red", "bright_green", "bright_magenta", "bright_yellow")
_LETTERS = {"dynamic": "d", "lookup": "l", "llma": "m", "static": "s", "recycling": "r"}
Piece = tuple[str, int]


def origin_name(bits: int) -> str:
    """For instance ``dynamic``, or ``lookup+llma`` for what both proposed; ``model`` for 0."""
    return "+".join(_names(bits)) or "model"


def origin_style(bits: int) -> str:
    """The colour of a piece, as rich names it; several origins have the first one's, underlined."""
    from outpace.tree import Origin

    names = _names(bits)
    if not names:
        return ""
    others = [str(origin.name).lower() for origin in Origin if str(origin.name).lower() not in _STYLES]
    first = names[0]
    style = _STYLES.get(first) or _OTHER_STYLES[others.index(first) % len(_OTHER_STYLES)]
    return style if len(names) == 1 else f"{style} underline"


def _names(bits: int) -> list[str]:
    from outpace.tree import Origin

    return [str(origin.name).lower() for origin in Origin if bits & origin]


def has_colours(console: Console) -> bool:
    """Whether colours can be told apart there: a terminal that has them, and nobody has asked for none."""
    return console.is_terminal and not console.is_dumb_terminal and not console.no_color and bool(console.color_system)


def printable(text: str) -> str:
    """``text`` without what would steer a terminal: control characters but tab and newline are shown as symbols."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= {0x7F: "␡", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}


class OriginStream:
    """Splits a request's text into pieces as it comes.

    The text is the engine's own, character for character; this class only says where each character came from, by
    decoding the same tokens one at a time.

    Args:
        tokenizer: Of the engine.
        stop: Stop strings of the request: what may begin one is held back there, and here.
    """

    def __init__(self, tokenizer: Any, stop: SequenceOf[str] = (), *, include_stop: bool = False) -> None:
        from outpace.engine import TextStream

        self._stream = TextStream(tokenizer, tuple(stop), include_stop)
        self._waiting: list[int] = []  # origins of tokens whose text has not come yet
        self._known: deque[Piece] = deque()  # decoded here, not shown by the engine yet

    def split(self, progress: Progress) -> list[Piece]:
        """The pieces of what this step shows."""
        self.push(progress.token_ids, progress.origins)
        if progress.output is not None:
            self._take(self._stream.finish())
        return self._match(progress.text)

    def push(self, token_ids: Iterable[int], origins: Iterable[int]) -> None:
        """Decode tokens."""
        for token, origin in zip(token_ids, origins, strict=True):
            if self._stream.stopped_by is not None:
                return
            self._waiting.append(origin)
            self._stream.push([token])
            self._take(self._stream.take())

    def rest(self) -> list[Piece]:
        """All pieces that were decoded; nothing can follow."""
        self._take(self._stream.finish())
        pieces, self._known = list(self._known), deque()
        return _joined(pieces)

    def _take(self, text: str) -> None:
        if text:
            drafted = all(self._waiting)
            bits = 0
            for origin in self._waiting:
                bits |= origin
            self._known.append((text, bits if drafted else 0))
            self._waiting = []

    def _match(self, text: str) -> list[Piece]:
        """Origins for ``text``; where it differs from what was decoded here, the model's own is the safe answer."""
        pieces: list[Piece] = []
        while text and self._known:
            known, origin = self._known.popleft()
            size = min(len(known), len(text))
            if known[:size] != text[:size]:
                self._known.clear()
                break
            pieces.append((text[:size], origin))
            text = text[size:]
            if known[size:]:
                self._known.appendleft((known[size:], origin))
        if text:
            pieces.append((text, 0))
        return _joined(pieces)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one origin as one piece."""
    found: list[Piece] = []
    for text, origin in pieces:
        if found and found[-1][1] == origin:
            found[-1] = (found[-1][0] + text, origin)
        elif text:
            found.append((text, origin))
    return found


def pieces_of(tokenizer: Any, token_ids: SequenceOf[int], origins: SequenceOf[int]) -> list[Piece]:
    """The pieces of a finished output."""
    stream = OriginStream(tokenizer)
    stream.push(token_ids, origins)
    return stream.rest()


class Painter:
    """Pieces and their legend for one console: in colours if it has them, else between marks.

    Args:
        console: Where they will be printed.
    """

    def __init__(self, console: Console) -> None:
        self.colours = has_colours(console)
        self._marks = ("«", "»") if console.encoding.lower().startswith("utf") else ("<<", ">>")

    def text(self, pieces: Iterable[Piece]) -> Text:
        """The pieces in a row."""
        from rich.text import Text

        listed = list(pieces)
        several = len({origin for _, origin in listed if origin}) > 1
        text = Text(tab_size=4)
        for piece, origin in listed:
            shown = printable(piece)
            if origin and not self.colours:
                shown = self._marked(shown, origin, several)
            text.append(shown, origin_style(origin) if self.colours else "")
        return text

    def legend(self, origins: Iterable[int]) -> Text:
        """What the colours or marks of these origins mean."""
        from rich.text import Text

        drafted = sorted({origin for origin in origins if origin})
        text = Text("accepted drafts: ")
        for place, origin in enumerate(drafted):
            name = origin_name(origin)
            text.append(", " if place else "")
            text.append(
                name if self.colours else self._marked(name, origin, len(drafted) > 1),
                origin_style(origin) if self.colours else "",
            )
        return text.append("; the rest is the model's own" if drafted else "none; all of it is the model's own")

    def _marked(self, text: str, origin: int, several: bool) -> str:
        letter = "+".join(_LETTERS.get(name, name[:2]) for name in _names(origin)) if several else ""
        return f"{letter}{self._marks[0]}{text}{self._marks[1]}"


def shares(counts: Mapping[int, float], total: float) -> str:
    """For instance ``dynamic 41%, lookup 3%``; empty where no draft was accepted.

    Args:
        counts: Tokens by origin bits; those of 0 do not matter.
        total: All tokens.
    """
    named = [(origin_name(bits), count) for bits, count in sorted(counts.items()) if bits and count]
    return ", ".join(f"{name} {100 * count / total:.0f}%" for name, count in named)


class OriginWriter:
    """Writes streamed text to standard output: in colours where it is a terminal that has them, as it is where it is not.

    Args:
        tokenizer: Of the engine.
        stop: Stop strings of the request.
    """

    def __init__(self, tokenizer: Any, stop: SequenceOf[str] = ()) -> None:
        console = out_console()
        self._is_terminal = console.is_terminal
        self._stream = OriginStream(tokenizer, stop) if has_colours(console) else None

    def write(self, progress: Progress) -> None:
        """Show what a step brought."""
        if self._stream is not None:
            shown = "".join(_painted(printable(text), origin) for text, origin in self._stream.split(progress))
        else:
            shown = printable(progress.text) if self._is_terminal else progress.text
        if shown:
            sys.stdout.write(shown)
            sys.stdout.flush()


def _painted(text: str, origin: int) -> str:
    """``text`` between the codes of its colour."""
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(origin_style(origin)).render(text, color_system=ColorSystem.STANDARD) if origin else text


def out_console(*, stderr: bool = False) -> Console:
    """A console whose width is kept; what is printed is shown as it is, and what its encoding lacks as question marks."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)
