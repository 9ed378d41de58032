import numpy as np
import pytest

from outpace.verify import truncate, verdicts_of

VERDICTS = verdicts_of([[0, 3], [], [1]], [[7, 8, 9], [5], [4, 6]])


def test_building_from_lists():
    assert VERDICTS.path_offsets.tolist() == [0, 2, 2, 3]
    assert VERDICTS.token_offsets.tolist() == [0, 3, 4, 6]
    assert VERDICTS.path.tolist() == [0, 3, 1]
    assert VERDICTS.tokens.tolist() == [7, 8, 9, 5, 4, 6]
    assert {array.dtype for array in (VERDICTS.path, VERDICTS.tokens, VERDICTS.token_offsets)} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("keep", "paths", "tokens"),
    [
        ([2, 1, 2], [[0, 3], [], [1]], [[7, 8], [5], [4, 6]]),
        ([1, 0, 9], [[0], [], [1]], [[7], [], [4, 6]]),
        ([0, 9, 1], [[], [], [1]], [[], [5], [4]]),
    ],
)
def test_truncate_cuts_tokens_and_paths(keep, paths, tokens):
    cut = truncate(VERDICTS, np.array(keep, np.int32))
    assert [cut.path_of(b).tolist() for b in range(3)] == paths
    assert [cut.tokens_of(b).tolist() for b in range(3)] == tokens


def test_truncate_without_a_cut_is_the_same_object():
    assert truncate(VERDICTS, np.array([3, 1, 5], np.int32)) is VERDICTS
