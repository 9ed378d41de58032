from __future__ import annotations

import numpy as np

from outpace.sequence import Sequence


def test_tokens_stand_in_order_however_often_the_buffer_grows() -> None:
    sequence = Sequence(1, np.arange(5, dtype=np.int32), "space")
    expected = list(range(5))
    for size in (1, 300, 2, 1000):
        sequence.append(np.arange(size, dtype=np.int32))
        expected += range(size)
    assert sequence.tokens.tolist() == expected
    assert sequence.prompt.tolist() == expected[:5]
    assert sequence.output.tolist() == expected[5:]
    assert (sequence.num_tokens, sequence.num_output, sequence.num_prompt) == (len(expected), len(expected) - 5, 5)


def test_pending_is_what_is_not_cached() -> None:
    sequence = Sequence(1, np.array([4, 5, 6], np.int32))
    assert sequence.pending.tolist() == [4, 5, 6]
    sequence.num_cached = 3
    sequence.append([7])
    assert sequence.pending.tolist() == [7]
    sequence.drop_cache()
    assert sequence.pending.tolist() == [4, 5, 6, 7]


def test_a_fork_goes_its_own_way() -> None:
    sequence = Sequence(1, np.array([4, 5], np.int32), "space")
    sequence.append([6])
    sequence.num_cached = 2
    twin = sequence.fork(2)
    twin.append([8])
    sequence.append([9])
    assert sequence.output.tolist() == [6, 9]
    assert twin.output.tolist() == [6, 8]
    assert (twin.key, twin.namespace, twin.num_cached, twin.num_prompt) == (2, "space", 2, 2)
