"""SAM-Decoding's dynamic automaton (sections 3.1 and 3.2): copy what followed the longest match.

The longest suffix of the request's own text (prompt and output so far) that also occurred earlier is looked up where it
ended *first*, and the text after that position is the draft.
"""

from __future__ import annotations

from outpace._compile import compiled
from outpace.draft.chains import ChainDrafter, NodeArrays, log_probs_by_match, write_chain
from outpace.draft.sequences import check_count, check_switch
from outpace.suffix.block import NUM_TOKENS, ancestor_with_room, extended, matched, new_block, text_of
from outpace.tree import Float32Array, Int32Array, Origin, UInt32Array

_RESERVE = 256  # tokens of output that need no larger block


class SuffixDrafter(ChainDrafter[Int32Array]):
    """Drafts the text after the earliest end of the longest match.

    ``log_probs`` are a fit to Vicuna-7B's own outputs on Spec-Bench, by the length of the match (see
    `log_probs_by_match`).

    Args:
        draft_size: Most nodes of a tree.
        full_draft: Where the text ends before the draft is full (the match was recent, as in a loop), follow the links
            to shorter matches until one is full; if none is, take the shortest. So does the published code, not the
            paper; on recorded outputs it loses a little (the design's table).
        min_match: Least tokens that must match.

    Raises:
        ConfigError: An option is out of bounds.
    """

    name = "suffix"
    _by_match = log_probs_by_match(0.24, 0.76, 0.94)

    def __init__(self, draft_size: int = 40, full_draft: bool = False, min_match: int = 1) -> None:
        super().__init__(check_count(self.name, "draft_size", draft_size, 1, 4096))
        self.full_draft = check_switch(self.name, "full_draft", full_draft)
        self.min_match = check_count(self.name, "min_match", min_match, 1)
        self._full_size = self.draft_size if self.full_draft else 0

    def _start(self, tokens: Int32Array) -> Int32Array:
        return extended(new_block(len(tokens) + _RESERVE), tokens, 0, len(tokens))

    def _append(self, state: Int32Array, tokens: Int32Array, begin: int, end: int) -> Int32Array:
        return extended(state, tokens, begin, end)

    def _copy(self, state: Int32Array) -> Int32Array:
        return state.copy()

    def _draft(self, state: Int32Array, index: int, caps: Int32Array, nodes: NodeArrays) -> int:
        return _draft_longest_match(
            state, self.draft_size, self._full_size, self.min_match, self._by_match, index, caps, *nodes
        )


_ORIGIN = int(Origin.DYNAMIC)


@compiled
def _draft_longest_match(
    block: Int32Array,
    draft_size: int,
    full_size: int,
    min_match: int,
    by_match: Float32Array,
    index: int,
    caps: Int32Array,
    offsets: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    origins: UInt32Array,
) -> int:
    state, length, min_endpos = matched(block)
    if full_size > 0:
        state, length, min_endpos = ancestor_with_room(block, state, full_size, min_match)
    begin = min_endpos + 1
    end = begin
    if length >= min_match:
        end = min(block[NUM_TOKENS], begin + min(draft_size, caps[index]))
    return write_chain(
        text_of(block), begin, end, length, by_match, _ORIGIN, index, offsets, tokens, parents, log_probs, origins
    )
