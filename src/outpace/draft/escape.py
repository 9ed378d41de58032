"""How likely it is that a context knows the next token, by what kind of context it is.

The words are those of `outpace.draft.contexts`. A **context** is a suffix of the text that also occurs elsewhere. It *knows*
the next token if the token followed there at least once. Contexts are asked from the longest to the shortest; each is judged by

- its **source**: the request's own text, an earlier response, a corpus;
- its length in tokens;
- how often something followed it that no longer context proposed (its **occurrences**), and how many different tokens did;
- how many contexts before it did propose something (its **rank**).

All are sorted into classes, and a class is a row of a table. The first estimate of each row is a logistic regression, fitted
to 155,000 tokens of Vicuna-7B's outputs on Spec-Bench and of Mistral-7B's on mixed prompts. What the rows see in use is
added to it: a text, a corpus or a model that is unlike those corrects the table within some hundred tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outpace._compile import inner

OWN, MEMORY, CORPUS = range(3)

_NUM_LENGTHS, _NUM_OCCURRENCES, _NUM_DIFFERENT, _NUM_RANKS = 10, 6, 4, 4
NUM_CLASSES = 3 * _NUM_LENGTHS * _NUM_OCCURRENCES * _NUM_DIFFERENT * _NUM_RANKS

# What a class stands for in the regression: its middle.
_LENGTHS = (1, 1, 2, 3, 4, 5, 6.5, 8.5, 13, 30)
_OCCURRENCES = (1, 2, 3.5, 6.5, 14, 60)
_DIFFERENT = (1, 2, 3.5, 9)
_CONSTANT = -0.492
_BY_SOURCE = (0.0, -1.442, -1.442)
_BY_LOG_LENGTH, _BY_LOG_OCCURRENCES, _BY_LOG_DIFFERENT = 0.907, 0.682, -0.735
_BY_RANK = (0.0, -0.833, -0.953, -0.994)
_WEIGHT = 20.0  # trials that the first estimate counts for
_MOST_TRIALS = 1000.0  # beyond which the past counts half

Float64Array = npt.NDArray[np.float64]


def first_trials() -> Float64Array:
    """What stands for the past before there is any.

    Returns:
        ``float64[classes, 2]``: contexts of each class that knew the next token, and contexts.
    """
    axes = np.meshgrid(
        _BY_SOURCE,
        _BY_LOG_LENGTH * np.log(_LENGTHS),
        _BY_LOG_OCCURRENCES * np.log(_OCCURRENCES),
        _BY_LOG_DIFFERENT * np.log(_DIFFERENT),
        _BY_RANK,
        indexing="ij",
    )
    logits = _CONSTANT + sum(axes)
    share = (1 / (1 + np.exp(-logits))).reshape(-1)
    return np.stack([_WEIGHT * share, np.full(NUM_CLASSES, _WEIGHT)], axis=1)


@inner
def class_of(source: int, length: int, occurrences: int, different: int, rank: int) -> int:
    """The row of a context."""
    if length <= 5:
        long = length
    elif length <= 10:
        long = 6 if length <= 7 else 7
    else:
        long = 8 if length <= 16 else 9
    if occurrences <= 4:
        often = min(occurrences - 1, 2)
    elif occurrences <= 8:
        often = 3
    else:
        often = 4 if occurrences <= 20 else 5
    many = different - 1 if different <= 2 else (2 if different <= 4 else 3)
    row = source * _NUM_LENGTHS + long
    row = row * _NUM_OCCURRENCES + often
    row = row * _NUM_DIFFERENT + many
    return row * _NUM_RANKS + min(rank, _NUM_RANKS - 1)


@inner
def record(trials: Float64Array, row: int, knew: bool) -> None:
    """Add a trial to a row."""
    trials[row, 1] += 1.0
    if knew:
        trials[row, 0] += 1.0
    if trials[row, 1] > _MOST_TRIALS:
        trials[row, 0] *= 0.5
        trials[row, 1] *= 0.5
