from __future__ import annotations

import io
import itertools
import random

import pytest
from rich.console import Console

from checkpoints import SENTENCES, train_tokenizer
from outpace.cli.origins import OriginStream, Painter, has_colours, origin_name, pieces_of, printable, shares
from outpace.engine import Progress, TextStream
from outpace.tree import Origin

TOKENIZER = train_tokenizer()
OWN, LOOKUP = int(Origin.DYNAMIC), int(Origin.LOOKUP)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def test_pieces_join_to_the_text() -> None:
    ids = ids_of(SENTENCES[2])
    rng = random.Random(0)
    origins = [rng.choice((0, OWN, LOOKUP)) for _ in ids]
    pieces = pieces_of(TOKENIZER, ids, origins)
    assert "".join(text for text, _ in pieces) == SENTENCES[2]
    assert all(a[1] != b[1] for a, b in itertools.pairwise(pieces))
    assert {origin for _, origin in pieces} == {0, OWN, LOOKUP}


@pytest.mark.parametrize(
    ("origins", "found"),
    [([OWN] * 3, OWN), ([OWN, OWN, 0], 0), ([0, OWN, OWN], 0), ([OWN, LOOKUP, OWN], OWN | LOOKUP)],
)
def test_a_character_of_several_tokens_is_drafted_if_all_of_them_are(origins: list[int], found: int) -> None:
    ids = ids_of("語")
    assert len(ids) == 3
    stream = OriginStream(TOKENIZER)
    for token, origin in zip(ids, origins, strict=True):
        stream.push([token], [origin])
    assert stream.rest() == [("語", found)]


@pytest.mark.parametrize("stop", [(), ("stove",), ("the stove",)])
@pytest.mark.parametrize("step", [1, 3, 7])
def test_the_text_is_the_engines(stop: tuple[str, ...], step: int) -> None:
    """Steps of several tokens, characters over step ends, and text that is held back for a stop string."""
    ids = ids_of("語é 🚀 " + SENTENCES[0])
    engine, stream = TextStream(TOKENIZER, stop), OriginStream(TOKENIZER, stop)
    text, pieces = "", []
    for begin in range(0, len(ids), step):
        tokens = ids[begin : begin + step]
        kept = engine.push(tokens)
        fresh = engine.take()
        text += fresh
        pieces += stream.split(Progress("r", 0, tokens[:kept], [OWN] * kept, fresh))
        if engine.stopped_by is not None:
            break
    assert "".join(piece for piece, _ in pieces) == text
    assert {origin for _, origin in pieces} == {OWN}
    assert ("stove" in text) == (not stop)


def test_text_that_is_not_what_the_tokens_say_is_the_models_own() -> None:
    stream = OriginStream(TOKENIZER)
    assert stream.split(Progress("r", 0, ids_of("abc"), [OWN] * len(ids_of("abc")), "xyz")) == [("xyz", 0)]


def test_names_and_shares() -> None:
    assert origin_name(0) == "model"
    assert origin_name(OWN | LOOKUP) == "lookup+dynamic"
    assert shares({0: 5, OWN: 4, LOOKUP: 1}, 10) == "lookup 10%, dynamic 40%"
    assert shares({0: 5}, 5) == ""


def test_nothing_steers_the_terminal() -> None:
    assert printable("a\x1b[31mb\tc\n\r\x07\x7f\x9b") == "a␛[31mb\tc\n␍␇␡\ufffd"


def console(*, terminal: bool, colours: bool = True, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, force_terminal=terminal, color_system="standard", no_color=not colours, width=60)


def test_marks_without_colours() -> None:
    pieces = [("a ", 0), ("bc", OWN), (" d", 0)]
    for made in (console(terminal=False), console(terminal=True, colours=False)):
        assert not has_colours(made)
        painter = Painter(made)
        assert painter.text(pieces).plain == "a «bc» d"
        assert painter.text([*pieces, ("e", LOOKUP)]).plain == "a d«bc» dl«e»"
        assert painter.legend([0, OWN]).plain == "accepted drafts: «dynamic»; the rest is the model's own"
    assert Painter(console(terminal=False, encoding="ascii")).text(pieces).plain == "a <<bc>> d"


def test_colours() -> None:
    painter = Painter(console(terminal=True))
    text = painter.text([("a ", 0), ("bc", OWN), ("d", LOOKUP)])
    assert text.plain == "a bcd"
    assert [(span.start, span.end) for span in text.spans] == [(2, 4), (4, 5)]
    assert len({str(span.style) for span in text.spans}) == 2
    assert painter.legend([]).plain.startswith("accepted drafts: none")
