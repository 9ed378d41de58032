"""LLMA, "Inference with Reference" (Yang et al., 2023): copy a short span after a short match.

Which match: the text's last 5 tokens if they occurred before, else the last 4, and so on down to the match length; of
several occurrences the *first*. So does the published code. The paper matches against documents that were retrieved or
given; here the reference is the request's own text, prompt and output so far, as in EMS-SD's measurements.
"""

from __future__ import annotations

from outpace.draft.chains import log_probs_by_match
from outpace.draft.lookup import FirstMatchDrafter
from outpace.draft.sequences import check_count
from outpace.tree import Origin


class LlmaDrafter(FirstMatchDrafter):
    """LLMA with the lengths of EMS-SD (section 4.1): match length 2, copy length 7.

    ``log_probs`` are a fit to Vicuna-7B's own outputs on Spec-Bench, by the length of the match (see
    `log_probs_by_match`).

    Args:
        match_length: Least tokens that must match.
        copy_length: Most tokens that are copied, each a node.
        longest_match: Most tokens that are compared; at least ``match_length``, which replaces it if greater.

    Raises:
        ConfigError: An option is out of bounds.
    """

    name = "llma"
    _origin = Origin.LLMA
    _by_match = log_probs_by_match(0.33, 0.77, 0.96)

    def __init__(self, match_length: int = 2, copy_length: int = 7, longest_match: int = 5) -> None:
        match_length = check_count(self.name, "match_length", match_length, 1, 64)
        longest_match = check_count(self.name, "longest_match", longest_match, 1, 64)
        copy_length = check_count(self.name, "copy_length", copy_length, 1, 4096)
        super().__init__(match_length, max(match_length, longest_match), copy_length)
