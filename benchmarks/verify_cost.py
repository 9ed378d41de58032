"""What it costs to verify draft nodes: milliseconds a step with trees of some size, against plain decoding, in one run.

The trees are chains of random tokens, which the model rejects, so that every step commits one token. Steps are timed by the
engine's own figures; the sides take turns, and medians are compared.

    python benchmarks/verify_cost.py --model 100M --nodes 4 8 16 40 --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from models import SHAPES, build

from outpace import Drafter, DraftTrees, Engine, Origin, SamplingParams, Signals
from outpace.tree import Int32Array, Verdicts


class RandomChains(Drafter):
    """Chains of random tokens."""

    name = "random"

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self._nodes, self._vocab_size = nodes, vocab_size
        self._random = np.random.default_rng(0)

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Nothing to keep."""

    def close(self, key: int) -> None:
        """Nothing to forget."""

    def fork(self, key: int, new_key: int) -> None:
        """Nothing to copy."""

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Nothing to learn."""

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """A chain for each sequence."""
        sizes = np.minimum(self._nodes, caps).astype(np.int32)
        offsets = np.zeros(len(keys) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        total = int(offsets[-1])
        parents = np.concatenate([np.arange(-1, size - 1, dtype=np.int32) for size in sizes])
        tokens = self._random.integers(0, self._vocab_size, total).astype(np.int32)
        return DraftTrees(
            offsets, tokens, parents, np.zeros(total, np.float32), np.full(total, int(Origin.LOOKUP), np.uint32)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="100M")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 40])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.model)
    vocab_size = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, 4000, (args.batch_size, args.context), generator=generator)
    engines = {0: Engine(model, drafter="none")} | {
        nodes: Engine(model, drafter=RandomChains(nodes, vocab_size), guard=False) for nodes in args.nodes
    }
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    times: dict[int, list[float]] = {nodes: [] for nodes in engines}
    for repeat in range(args.repeat + 1):
        for nodes, engine in engines.items():
            figures = engine.generate(list(prompts), params)[0].figures
            if repeat:  # the first is for warming up
                times[nodes].append(figures.decode_s / figures.steps * 1e3)
    plain = times[0]
    for nodes, found in times.items():
        ratios = [one / other for one, other in zip(found, plain, strict=True)]
        row = {
            "model": args.model,
            "batch_size": args.batch_size,
            "nodes": nodes,
            "ms_per_step": round(statistics.median(found), 2),
            "against_plain": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
