"""Prompt lookup decoding: copy what followed the first occurrence of the last few tokens.

Example: the text ends in ``[..., 5, 6, 7]``. If ``5 6 7`` occurred before, what followed its *first* occurrence is
drafted; else what followed the first ``6 7``; else the first ``7``; else nothing.
"""

from __future__ import annotations

from outpace._compile import compiled
from outpace.draft.chains import ChainDrafter, NodeArrays, log_probs_by_match, write_chain
from outpace.draft.sequences import TokenBuffer, check_count
from outpace.errors import ConfigError
from outpace.tree import Float32Array, Int32Array, Origin, UInt32Array


class FirstMatchDrafter(ChainDrafter[TokenBuffer]):
    """Copies what followed the first occurrence of the text's longest n-gram within bounds.

    An occurrence may overlap the text's end, but is not the end itself.

    Args:
        shortest: Least tokens that must match.
        longest: Most tokens that are compared.
        draft_size: Most tokens that are copied.
    """

    _origin: Origin
    _by_match: Float32Array  # [lengths]

    def __init__(self, shortest: int, longest: int, draft_size: int) -> None:
        super().__init__(draft_size)
        if shortest > longest:
            raise ConfigError(f"{self.name}: the shortest match ({shortest}) exceeds the longest ({longest})")
        self.shortest, self.longest = shortest, longest

    def _start(self, tokens: Int32Array) -> TokenBuffer:
        return TokenBuffer(tokens)

    def _append(self, state: TokenBuffer, tokens: Int32Array, begin: int, end: int) -> TokenBuffer:
        state.append(tokens[begin:end])
        return state

    def _copy(self, state: TokenBuffer) -> TokenBuffer:
        return state.copy()

    def _draft(self, state: TokenBuffer, index: int, caps: Int32Array, nodes: NodeArrays) -> int:
        return _draft_first_match(
            state.array,
            state.length,
            self.shortest,
            self.longest,
            self.draft_size,
            self._by_match,
            int(self._origin),
            index,
            caps,
            *nodes,
        )


class LookupDrafter(FirstMatchDrafter):
    """Prompt lookup decoding as Transformers' ``prompt_lookup_num_tokens`` does it.

    Candidates equal those of its ``PromptLookupCandidateGenerator``, except that end-of-sequence tokens stay in the
    draft: verification ends a sequence there by itself.

    ``log_probs`` are a fit to Vicuna-7B's own outputs on Spec-Bench, by the length of the match (see
    `log_probs_by_match`); tokens of one request may be far from it, which calibration corrects.

    Args:
        ngram: Most tokens that are compared, then one less down to one.
        draft_size: Most tokens that are copied.

    Raises:
        ConfigError: An option is out of bounds.
    """

    name = "lookup"
    _origin = Origin.LOOKUP
    _by_match = log_probs_by_match(0.22, 0.64, 0.90)

    def __init__(self, ngram: int = 3, draft_size: int = 10) -> None:
        ngram = check_count(self.name, "ngram", ngram, 1, 64)
        super().__init__(1, ngram, check_count(self.name, "draft_size", draft_size, 1, 4096))


@compiled
def first_match(text: Int32Array, length: int, longest: int) -> tuple[int, int]:
    """The longest suffix of at most ``longest`` tokens that also ended earlier, and where it ended first.

    Args:
        text: ``int32[>= length]``.
        length: Tokens of the text.
        longest: Most tokens that are compared.

    Returns:
        Length and end position of the match; ``0, -1`` if there is none.
    """
    best, best_end = 0, -1
    last = length - 1
    for end in range(last):
        if text[end] != text[last]:
            continue
        size = 1
        while size < longest and size <= end and text[end - size] == text[last - size]:
            size += 1
        if size > best:
            best, best_end = size, end
            if best == longest:
                break
    return best, best_end


@compiled
def _draft_first_match(
    text: Int32Array,
    length: int,
    shortest: int,
    longest: int,
    draft_size: int,
    by_match: Float32Array,
    origin: int,
    index: int,
    caps: Int32Array,
    offsets: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    log_probs: Float32Array,
    origins: UInt32Array,
) -> int:
    match_length, match_end = first_match(text, length, longest)
    begin = match_end + 1
    end = begin
    if match_length >= shortest:
        end = min(length, begin + min(draft_size, caps[index]))
    return write_chain(
        text, begin, end, match_length, by_match, origin, index, offsets, tokens, parents, log_probs, origins
    )
