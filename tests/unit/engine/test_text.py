"""Text from tokens, piece by piece: whole characters, and stop strings wherever they fall."""

from __future__ import annotations

import random

import pytest
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from checkpoints import train_tokenizer
from outpace.engine.text import TextStream

TOKENIZER: hf.PreTrainedTokenizerFast = train_tokenizer()
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that a byte-level vocabulary writes as they are
_OTHERS = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_IDS = {
    byte: TOKENIZER.convert_tokens_to_ids(chr(byte if byte in _SHOWN else 256 + _OTHERS.index(byte)))
    for byte in range(256)
}
TEXTS = [
    "plain words",
    "café – crème brûlée",
    "日本語テキスト",
    "👩‍🚀🧑🏽‍🤝‍🧑🏿 ok 🇫🇷",
    "\u00a0\n\t\r\n mixed \x00 \x7f",
    "���real",
]


def as_bytes(text: str | bytes) -> list[int]:
    """One token a byte."""
    data = text.encode() if isinstance(text, str) else text
    return [BYTE_IDS[byte] for byte in data]


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(ids: list[int], sizes: list[int], **options: object) -> tuple[list[str], TextStream]:
    """The pieces that pushes of these sizes (the last one repeats) release."""
    stream = TextStream(TOKENIZER, **options)
    pieces, at, sizes = [], 0, list(sizes)
    while at < len(ids) and stream.stopped_by is None:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        stream.push(ids[at : at + size])
        pieces.append(stream.take())
        at += size
    pieces.append(stream.finish())
    return pieces, stream


def test_every_byte_has_a_token() -> None:
    assert len(set(BYTE_IDS.values())) == 256
    assert decode(as_bytes("日本é")) == "日本é"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_no_piece_ends_inside_a_character(text: str, size: int) -> None:
    pieces, stream = streamed(as_bytes(text), [size])
    assert "".join(pieces) == stream.text == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)
    if size == 1 and text.startswith("日"):
        assert pieces[:3] == ["", "", "日"]


def test_text_is_released_as_soon_as_it_is_whole() -> None:
    ids = as_bytes("aé")
    stream = TextStream(TOKENIZER)
    assert [stream.push([token]) and stream.take() for token in ids] == ["a", "", "é"]


def test_a_whole_prefix_is_released_before_an_unfinished_character() -> None:
    stream = TextStream(TOKENIZER)
    stream.push(as_bytes("abc日")[:-1])
    assert stream.take() == "abc"
    stream.push(as_bytes("日")[-1:])
    assert stream.take() == "日"


def test_the_end_may_be_an_unfinished_character() -> None:
    pieces, stream = streamed(as_bytes("ab日")[:-1], [1])
    assert "".join(pieces) == stream.text == decode(as_bytes("ab日")[:-1]) == "ab�"


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    stream = TextStream(TOKENIZER)
    released = 0
    for count in range(1, 41):
        stream.push(as_bytes(b"\xff"))
        released += len(stream.take())
        assert released >= count - 8
    assert stream.finish() == "�" * (40 - released)


def test_a_character_behind_many_broken_bytes_stays_whole() -> None:
    for broken in range(12):
        ids = as_bytes(b"\xff" * broken + "€x".encode())
        pieces, _ = streamed(ids, [1])
        assert "".join(pieces) == "�" * broken + "€x"


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=3).map(lambda t: t.encode("utf-8", "replace")))),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20),
)
def test_pieces_joined_are_the_decoded_text(parts: list[bytes], sizes: list[int]) -> None:
    ids = as_bytes(b"".join(parts))
    pieces, stream = streamed(ids, sizes)
    assert "".join(pieces) == stream.text == decode(ids)


def test_special_tokens_leave_no_text() -> None:
    ids = [TOKENIZER.eos_token_id, *as_bytes("a"), TOKENIZER.eos_token_id]
    pieces, _ = streamed(ids, [1])
    assert "".join(pieces) == "a"


# --- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_stop_string_over_tokens_and_steps(size: int) -> None:
    pieces, stream = streamed(as_bytes("one two STOP three"), [size], stop=["STOP"])
    assert stream.stopped_by == "STOP"
    assert "".join(pieces) == stream.text == "one two "


def test_include_stop_keeps_it_and_nothing_behind_it() -> None:
    token = TOKENIZER(" keeper")["input_ids"]
    assert len(token) == 1
    pieces, stream = streamed([*as_bytes("a"), *token, *as_bytes("!")], [1], stop=["eep"], include_stop=True)
    assert "".join(pieces) == stream.text == "a keep"
    pieces, stream = streamed([*as_bytes("a"), *token, *as_bytes("!")], [1], stop=["eep"])
    assert "".join(pieces) == stream.text == "a k"


def test_push_counts_the_token_that_completes_the_stop_string() -> None:
    stream = TextStream(TOKENIZER, ["cd"])
    assert stream.push(as_bytes("ab")) == 2
    assert stream.push(as_bytes("cxcdef")) == 4
    assert stream.text == "abcx"


@pytest.mark.parametrize(
    ("stop", "text", "expected", "by"),
    [
        (["abc", "b"], "xabc", "xa", "b"),  # the one that is complete first
        (["b", "abc"], "xabc", "xa", "b"),
        (["bc", "abc"], "xabc", "x", "abc"),  # complete at once: the longer one
        (["aab"], "aaab", "a", "aab"),  # overlaps itself
        (["abab"], "ababab", "", "abab"),
        (["aa", "ab"], "zab", "z", "ab"),
        (["end"], "en en e", "en en e", None),  # only ever begun
        (["é"], "caé!", "ca", "é"),
        (["日本"], "x日本", "x", "日本"),
    ],
)
def test_overlapping_stop_strings(stop: list[str], text: str, expected: str, by: str | None) -> None:
    for size in (1, 4):
        pieces, stream = streamed(as_bytes(text), [size], stop=stop)
        assert (stream.text, stream.stopped_by) == (expected, by)
        assert "".join(pieces) == expected


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_stop_strings_against_a_search(text: str, stop: list[str], include: bool, seed: int) -> None:
    rng = random.Random(seed)
    pieces, stream = streamed(as_bytes(text), [rng.randint(1, 5) for _ in range(30)], stop=stop, include_stop=include)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        assert (stream.text, stream.stopped_by) == (text, None)
    else:
        end, begin, found = min(ends)
        assert (stream.text, stream.stopped_by) == (text[: end if include else begin], found)
    assert "".join(pieces) == stream.text


def test_nothing_is_shown_that_may_begin_a_stop_string() -> None:
    stream = TextStream(TOKENIZER, ["STOP"])
    stream.push(as_bytes("go ST"))
    assert stream.take() == "go "
    stream.push(as_bytes("A"))
    assert stream.take() == "STA"


def test_copies_go_on_by_themselves() -> None:
    stream = TextStream(TOKENIZER, ["XY"])
    stream.push(as_bytes("aX"))
    twin = stream.fork()
    stream.push(as_bytes("Y"))
    twin.push(as_bytes("b"))
    assert (stream.text, stream.stopped_by) == ("a", "XY")
    assert twin.finish() == "aXb"
    assert twin.stopped_by is None


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert stream.push([1, 2]) == 2
    assert (stream.take(), stream.finish(), stream.text) == ("", "", "")


# --- vocabularies with a mark for spaces and bytes as a last resort ----------------------------------------------------


def _llama_like() -> hf.PreTrainedTokenizerFast:
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁word", "s", "▁é", "x"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


LLAMA_LIKE = _llama_like()


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["▁", "▁a", "▁word", "s", "▁é", "x", "日", "👩", "\n"]), max_size=12),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_spaces_and_byte_tokens(parts: list[str], sizes: list[int]) -> None:
    ids: list[int] = []
    for part in parts:
        known = LLAMA_LIKE.convert_tokens_to_ids(part)
        ids += [2 + byte for byte in part.encode()] if known is None else [known]
    stream = TextStream(LLAMA_LIKE)
    pieces, at, sizes = [], 0, list(sizes)
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        stream.push(ids[at : at + size])
        pieces.append(stream.take())
        at += size
    pieces.append(stream.finish())
    whole = LLAMA_LIKE.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == stream.text == whole
    assert not any("�" in piece for piece in pieces)
