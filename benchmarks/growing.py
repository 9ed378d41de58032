"""The growing automaton: microseconds a token, on text that repeats itself without end and on text that does not.

python benchmarks/growing.py --tokens 100000
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from outpace.draft.suffix_tree import COUNT_WALK
from outpace.suffix import GrowingAutomaton


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    size = args.tokens
    texts = {
        "all equal": np.zeros(size, np.int32),
        "two in turn": np.arange(size, dtype=np.int32) % 2,
        "random, alphabet of 2": np.random.default_rng(0).integers(0, 2, size, np.int32),
        "random, alphabet of 200,000": np.random.default_rng(0).integers(0, 200_000, size, np.int32),
    }
    for walk in (0, COUNT_WALK):
        GrowingAutomaton([1, 2, 1], count_walk=walk)  # compiles
        for name, text in texts.items():
            times = []
            for _ in range(args.repeat):
                automaton = GrowingAutomaton(count_walk=walk)
                begin = time.perf_counter()
                automaton.extend(text)
                times.append(time.perf_counter() - begin)
            print(
                json.dumps({"text": name, "links_counted": walk, "us_a_token": 1e6 * statistics.median(times) / size})
            )


if __name__ == "__main__":
    main()
