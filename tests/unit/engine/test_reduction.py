"""Reduction in the engine: estimates are calibrated before anything is cut, and learned from what was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.config import SamplingParams
from outpace.draft.none import NoneDrafter
from outpace.tree import DraftTrees, Int32Array, Origin


class Liar(NoneDrafter):
    """Under every root a token that is never right and is said to be sure, and one that is right and said to be unlikely."""

    def __init__(self, right: list[int], wrong: int) -> None:
        super().__init__()
        self.right, self.wrong, self.at = right, wrong, 0

    def propose(self, keys: Sequence[int], caps: Int32Array) -> DraftTrees:
        tokens = [self.wrong, self.right[self.at]] if self.at < len(self.right) else []
        return DraftTrees(
            np.array([0, len(tokens)], np.int32),
            np.array(tokens, np.int32),
            np.full(len(tokens), -1, np.int32),
            np.log([0.7, 0.2])[: len(tokens)].astype(np.float32),
            np.array([Origin.LOOKUP, Origin.LLMA], np.uint32)[: len(tokens)],
        )

    def observe(self, keys: Sequence[int], verdicts: Any, signals: Any = None) -> None:
        self.at += len(verdicts.tokens)


def test_selection_sees_calibrated_estimates(tiny: Any) -> None:
    prompt, params = tiny.prompts[0], SamplingParams(max_tokens=60, ignore_eos=True)
    plain = tiny.plain(prompt, params).token_ids
    wrong = next(token for token in range(100) if token not in plain)
    engine = tiny.engine(Liar(plain, wrong), guard=False, max_nodes=1)
    output = engine.generate([prompt], params)[0]
    assert output.token_ids == plain
    # At first the one node is the liar's choice; what it was worth is learned, though the other was never verified.
    assert output.figures.mean_accepted_tokens > 1.5
