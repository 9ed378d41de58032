"""Looking a text up in a corpus: the longest match, where it stands, what comes after it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np

from outpace.errors import CorpusError
from outpace.suffix.corpus import SOURCES, Corpus
from outpace.suffix.frozen import FrozenAutomaton, continuations, count_of, endpos_of
from outpace.suffix.image import DOCUMENTS_BEGIN
from outpace.tree import Int32Array

_MOST_CONTINUATIONS = 2**16  # of one state that are read


@dataclass(frozen=True, slots=True)
class Found:
    """The longest end of a text that occurs in a corpus.

    Attributes:
        length: Its tokens.
        count: How often it occurs, in all shards.
        document: Number of the document where it occurs first.
        position: Its first token's place in that document, from 0.
        before: Tokens before it there, as many as were asked for.
        after: Tokens after it there: what would be drafted.
        next_tokens: The most frequent next tokens, each with how often it follows, most frequent first.
    """

    length: int
    count: int
    document: int
    position: int
    before: Int32Array
    after: Int32Array
    next_tokens: tuple[tuple[int, int], ...]


def look_up(corpus: Corpus, tokens: Int32Array, *, around: int = 24, most: int = 8) -> Found | None:
    """Find the longest end of a text that occurs in a corpus: the longest match of all shards, counts added.

    Args:
        corpus: The corpus.
        tokens: ``int32[n]``, the text.
        around: How many tokens before and after the match to take.
        most: How many next tokens to take.

    Returns:
        None if not even the last token occurs.
    """
    matches = [shard.match(tokens) for shard in corpus.shards]
    length = max((length for _, length in matches), default=0)
    if length == 0:
        return None
    count, first_document, place = 0, 0, None
    following: Counter[int] = Counter()
    for shard, (state, own) in zip(corpus.shards, matches, strict=True):
        if own == length:
            count += count_of(shard.image, state)
            following.update(_following(shard, state))
            place = place or (shard, first_document, endpos_of(shard.image, state))
        first_document += shard.num_documents
    assert place is not None
    shard, first_document, end = place
    # Documents lie in the text with a separator before each; positions count separators.
    begin = int(shard.image[DOCUMENTS_BEGIN])
    separators = shard.image[begin : begin + shard.num_documents]
    number = int(np.searchsorted(separators, end, "right")) - 1
    document = shard.document(number)
    after = int(end - separators[number])
    return Found(
        length,
        count,
        first_document + number,
        after - length,
        document[max(0, after - length - around) : after - length],
        document[after : after + around],
        tuple(following.most_common(most)),
    )


def source_of(corpus: Corpus, document: int) -> tuple[str, int] | None:
    """The file that a document was read from, and the document's number among those of that file, from 0.

    Returns:
        None where no file is known: the list of files is missing, or does not name the document.

    Raises:
        CorpusError: The list is there, and damaged.
    """
    path = corpus.folder / SOURCES
    try:
        with path.open(encoding="ascii") as lines:
            for line in lines:
                source = json.loads(line)
                if source["first"] <= document < source["first"] + source["documents"]:
                    return str(source["path"]), document - int(source["first"])
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorpusError(f"{path} is damaged ({error}); build the corpus again (outpace corpus build)") from error
    return None


def _following(shard: FrozenAutomaton, state: int) -> dict[int, int]:
    tokens, counts, states = (np.empty(_MOST_CONTINUATIONS, np.int32) for _ in range(3))
    number = continuations(shard.image, state, _MOST_CONTINUATIONS, tokens, counts, states)
    return dict(zip(tokens[:number].tolist(), counts[:number].tolist(), strict=True))
