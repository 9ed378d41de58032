"""What comes next, from every context that the text shares with its sources.

Words:

- A **source** is a text that may tell how the present one goes on: the request's own text so far (a growing automaton),
  segments of earlier responses, shards of corpora (frozen automata).
- A **cursor** is where the text stands in a source: the state and the length of its longest suffix that occurs there. The
  suffix links from it lead through all its **contexts**, from the longest to the shortest. The **cursors** of a text are
  ``int64[S, 2]``, that in the request's own text first, then those of its row of the table (`outpace.draft.cursors`).
- The **posterior** of a next token blends what all contexts of all sources saw.

The blend is prediction by partial matching (Cleary and Witten 1984) with exclusion. Contexts are asked in the order of their
length, over all sources; where lengths are equal, the request's own first, and those of several earlier responses or of several
corpora as one, with their counts added. Each proposes the tokens that followed it and that no longer context proposed, by how
often they did, and together they get the share of the probability left that a context of this kind deserves
(`outpace.draft.escape`, in the place of an escape symbol); the rest is left for shorter contexts.

Example: the text ends in ``a b c``. Once before, ``b c`` was followed by ``d``; ``c`` was by ``d`` twice and by ``e`` once.
If contexts of the first kind know the next token in 60 of 100 cases, ``d`` gets 0.6. The context ``c`` has only ``e`` to add;
if its kind is right in 30 of 100 cases, ``e`` gets 0.4 * 0.3 = 0.12.
"""

from __future__ import annotations

from outpace._compile import inner
from outpace.draft import cursors as table
from outpace.draft.cursors import block_of, image_of
from outpace.draft.escape import CORPUS, MEMORY, OWN, Float64Array, class_of, record
from outpace.suffix import block as growing
from outpace.suffix import image as frozen
from outpace.suffix.block import matched, transfer_block
from outpace.suffix.image import count_of, step_frozen, text_at, word
from outpace.tree import Int32Array, Int64Array

STATE, LENGTH = range(2)  # columns of cursors
MOST_TOKENS = 24  # that one context proposes, and that a posterior has
_MOST_RANKS = 4  # contexts that propose something; more hardly add anything
_MOST_SILENT = 32  # contexts that do not: where text repeats itself without end, there are as many as it has tokens


@inner
def cursors_of(row: Int64Array, cursors: Int64Array) -> None:
    """Write the cursors of a sequence's text, as they stand in its row of the table, to ``int64[S, 2]``."""
    cursors[0, STATE], cursors[0, LENGTH] = 0, 0
    if row[table.BLOCK] != 0:
        cursors[0, STATE], cursors[0, LENGTH], _ = matched(block_of(row))
    for i in range(row[table.NUM_CURSORS]):
        begin = table.FIRST_CURSOR + i * table.CURSOR_SIZE
        cursors[1 + i, STATE], cursors[1 + i, LENGTH] = row[begin + table.STATE], row[begin + table.LENGTH]


@inner
def step(row: Int64Array, cursors: Int64Array, target: Int64Array, token: int) -> None:
    """Move all cursors by a token (Algorithm 1).

    Args:
        row: The sequence's row of the table.
        cursors: ``int64[S, 2]``, before the token.
        target: ``int64[S, 2]``, receives the cursors behind it.
        token: The token.
    """
    target[0, STATE], target[0, LENGTH] = 0, 0
    if row[table.BLOCK] != 0:
        state, length = transfer_block(block_of(row), cursors[0, STATE], cursors[0, LENGTH], token)
        target[0, STATE], target[0, LENGTH] = state, length
    for i in range(row[table.NUM_CURSORS]):
        state, length = step_frozen(image_of(row, i), cursors[1 + i, STATE], cursors[1 + i, LENGTH], token)
        target[1 + i, STATE], target[1 + i, LENGTH] = state, length


@inner
def _followers_in_block(block: Int32Array, state: int, tokens: Int32Array, counts: Int64Array) -> tuple[int, int, int]:
    """What followed a context in the request's own text, the latest branches first.

    Returns:
        How many were written, and the context's suffix link with its length.
    """
    capacity, state_capacity = word(block, growing.CAPACITY), word(block, growing.STATE_CAPACITY)
    states = growing.HEADER_SIZE + capacity
    edges = states + state_capacity * growing.STATE_SIZE
    count_begin = edges + capacity * (growing.EDGE_SIZE + 2)
    row = states + state * growing.STATE_SIZE
    written = 0
    target = word(block, row + growing.NEXT)
    if target != growing.ROOT:
        tokens[0] = block[growing.HEADER_SIZE + word(block, row + growing.MIN_ENDPOS) + 1]
        counts[0] = block[count_begin + target]
        written = 1
    edge = word(block, row + growing.EDGES)
    while edge != growing.NO_EDGE and written < MOST_TOKENS:
        at = edges + edge * growing.EDGE_SIZE
        tokens[written] = block[at + growing.TOKEN]
        counts[written] = block[count_begin + word(block, at + growing.TARGET)]
        written += 1
        edge = word(block, at + growing.SIBLING)
    link = word(block, row + growing.LINK)
    return written, link, word(block, states + link * growing.STATE_SIZE + growing.LENGTH)


@inner
def _followers_in_image(image: Int32Array, state: int, tokens: Int32Array, counts: Int64Array) -> tuple[int, int, int]:
    """What followed a context in a frozen automaton, the most frequent first; see `_followers_in_block`."""
    states = word(image, frozen.STATES_BEGIN)
    written = 0
    if state < 0:
        tokens[0], counts[0] = text_at(image, -state), 1
        written = 0 if tokens[0] < 0 else 1
        link = word(image, word(image, frozen.LINKS_BEGIN) - 1 - state)
    else:
        row = states + state * frozen.STATE_SIZE
        link = word(image, row + frozen.LINK)
        begin = word(image, row + frozen.EDGES)
        if begin == frozen.UNARY:
            tokens[0], counts[0] = text_at(image, word(image, row + frozen.ENDPOS) + 1), image[row + frozen.COUNT]
            written = 1
        elif begin != frozen.NOTHING:
            if begin <= frozen.INDEXED:
                begin = frozen.INDEXED - begin + 1
            edge = word(image, frozen.EDGES_BEGIN) + begin * frozen.EDGE_SIZE
            token = 0
            while token >= 0 and written < MOST_TOKENS:
                token = word(image, edge + frozen.TOKEN)
                tokens[written] = token if token >= 0 else -1 - token
                counts[written] = count_of(image, word(image, edge + frozen.TARGET))
                written += 1
                edge += frozen.EDGE_SIZE
    return written, link, word(image, states + link * frozen.STATE_SIZE + frozen.LENGTH)


@inner
def _source_of(row: Int64Array, i: int) -> int:
    """What kind of source cursor ``i`` stands in."""
    if i == 0:
        return OWN
    return CORPUS if i <= row[table.NUM_STATIC] else MEMORY


@inner
def _holds(tokens: Int32Array, num: int, token: int) -> bool:
    for k in range(num):  # noqa: SIM110 (Numba compiles no generators)
        if tokens[k] == token:
            return True
    return False


@inner
def _new_followers(
    row: Int64Array,
    i: int,
    at: Int64Array,
    seen: Int32Array,
    num_seen: int,
    tokens: Int32Array,
    counts: Int64Array,
    more_tokens: Int32Array,
    more_counts: Int64Array,
) -> tuple[int, int]:
    """Ask the present context of source ``i``, and those of as many tokens in the same kind of source; go on to shorter ones.

    Source ``i`` is the last one that has it.

    Returns:
        How many tokens they add to the ``num_seen`` that were proposed before, and how often these followed together.
    """
    length = at[i, LENGTH]
    if i == 0:
        found, at[i, STATE], at[i, LENGTH] = _followers_in_block(block_of(row), at[i, STATE], tokens, counts)
    else:
        found, at[i, STATE], at[i, LENGTH] = _followers_in_image(image_of(row, i - 1), at[i, STATE], tokens, counts)
    new, occurrences = 0, 0
    for k in range(found):
        if not _holds(seen, num_seen, tokens[k]):
            tokens[new], counts[new] = tokens[k], counts[k]
            occurrences += counts[k]
            new += 1
    kind = _source_of(row, i)
    for other in range(i - 1, 0, -1):
        if at[other, LENGTH] == length and _source_of(row, other) == kind:
            image = image_of(row, other - 1)
            found, at[other, STATE], at[other, LENGTH] = _followers_in_image(
                image, at[other, STATE], more_tokens, more_counts
            )
            for k in range(found):
                if _holds(seen, num_seen, more_tokens[k]):
                    continue
                place = 0
                while place < new and tokens[place] != more_tokens[k]:
                    place += 1
                if place == MOST_TOKENS:
                    continue
                if place == new:
                    tokens[new], counts[new] = more_tokens[k], 0
                    new += 1
                counts[place] += more_counts[k]
                occurrences += more_counts[k]
    return new, occurrences


@inner
def _longest(at: Int64Array, num_sources: int) -> int:
    """The source whose present context is the longest; -1 if all are empty. Of equals the text's own, then the latest."""
    best, length = -1, 0
    for i in range(num_sources - 1, 0, -1):
        if at[i, LENGTH] > length:
            best, length = i, at[i, LENGTH]
    return 0 if at[0, LENGTH] > 0 and at[0, LENGTH] >= length else best


@inner
def posterior(
    row: Int64Array,
    cursors: Int64Array,
    trials: Float64Array,
    least: float,
    at: Int64Array,
    tokens: Int32Array,
    probs: Float64Array,
    kinds: Int64Array,
    new_tokens: Int32Array,
    new_counts: Int64Array,
) -> int:
    """Next tokens and their estimated probabilities.

    Args:
        row: The sequence's row of the table.
        cursors: ``int64[S, 2]``.
        trials: ``float64[classes, 2]``, see `outpace.draft.escape.first_trials`.
        least: Contexts are asked until less than this is left.
        at: ``int64[S, 2]``, scratch.
        tokens: ``int32[MOST_TOKENS]``, receives the tokens.
        probs: ``float64[MOST_TOKENS]``, receives their probabilities.
        kinds: ``int64[MOST_TOKENS]``, receives the source of each.
        new_tokens: ``int32[2, MOST_TOKENS]``, scratch.
        new_counts: ``int64[2, MOST_TOKENS]``, scratch.

    Returns:
        How many tokens there are.
    """
    num_sources = 1 + row[table.NUM_CURSORS]
    for i in range(num_sources):
        at[i, STATE], at[i, LENGTH] = cursors[i, STATE], cursors[i, LENGTH]
    num, rank, silent, left = 0, 0, 0, 1.0
    while left >= least and num < MOST_TOKENS and rank < _MOST_RANKS and silent < _MOST_SILENT:
        i = _longest(at, num_sources)
        if i < 0:
            break
        length, source = at[i, LENGTH], _source_of(row, i)
        new, occurrences = _new_followers(
            row, i, at, tokens, num, new_tokens[0], new_counts[0], new_tokens[1], new_counts[1]
        )
        if occurrences == 0:
            silent += 1
            continue
        kind = class_of(source, length, occurrences, new, rank)
        rank += 1
        share = trials[kind, 0] / trials[kind, 1]
        for k in range(min(new, MOST_TOKENS - num)):
            tokens[num] = new_tokens[0, k]
            probs[num] = left * share * new_counts[0, k] / occurrences
            kinds[num] = source
            num += 1
        left *= 1.0 - share
    return num


@inner
def learn(
    row: Int64Array,
    cursors: Int64Array,
    trials: Float64Array,
    actual: int,
    at: Int64Array,
    seen: Int32Array,
    new_tokens: Int32Array,
    new_counts: Int64Array,
) -> None:
    """Take note of which contexts knew that ``actual`` comes next: those longer than the one that did had not.

    Args are those of `posterior`; ``seen`` is scratch.
    """
    num_sources = 1 + row[table.NUM_CURSORS]
    for i in range(num_sources):
        at[i, STATE], at[i, LENGTH] = cursors[i, STATE], cursors[i, LENGTH]
    num, rank, silent = 0, 0, 0
    while num < MOST_TOKENS and rank < _MOST_RANKS and silent < _MOST_SILENT:
        i = _longest(at, num_sources)
        if i < 0:
            return
        length, source = at[i, LENGTH], _source_of(row, i)
        new, occurrences = _new_followers(
            row, i, at, seen, num, new_tokens[0], new_counts[0], new_tokens[1], new_counts[1]
        )
        if occurrences == 0:
            silent += 1
            continue
        knew = False
        for k in range(new):
            if new_tokens[0, k] == actual:
                knew = True
            if num < MOST_TOKENS:
                seen[num] = new_tokens[0, k]
                num += 1
        record(trials, class_of(source, length, occurrences, new, rank), knew)
        rank += 1
        if knew:
            return
