"""Each held-out prompt of the model in the box, alone: plain decoding, Transformers' `generate`, and drafters, in one run.

Every prompt is decoded greedily by every side in turn, several times; the median of its times counts. A drafter's speedup is
measured against the faster of our plain decoding (`none`) and `generate`. Prompts whose plain output loops (a share of distinct
4-grams under 0.6) are marked and kept out of the means, for loops make every drafter look good.

    python benchmarks/heldout.py --drafter suffix --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict

import torch
from models import BUILTIN, build

from outpace import Engine, SamplingParams
from outpace.assets import BUILTIN_MODEL
from outpace.bench.check import distinct_ngrams
from outpace.bench.heldout import read_held_out
from outpace.engine.prompts import to_token_ids
from outpace.model import LoadOptions, load_tokenizer

LOOPS_UNDER = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", action="append", help="repeatable; suffix by default")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kind", action="append", help="only prompts of this kind; repeatable")
    parser.add_argument(
        "--retry-below", type=float, default=0.97, help="measure slower prompts again, with three times as many runs"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="above 0: sampled text, which hardly repeats, against `none` alone",
    )
    args = parser.parse_args()
    drafters = args.drafter or ["suffix"]
    torch.set_num_threads(args.threads)
    model = build(BUILTIN)
    tokenizer = load_tokenizer(BUILTIN_MODEL, LoadOptions())
    engines = {name: Engine(model, tokenizer, drafter=name) for name in ("none", *drafters)}
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=0)

    def generate(ids: list[int]) -> tuple[list[int], float]:
        row = torch.tensor([ids])
        output = model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=args.tokens)
        return output[0, len(ids) :].tolist(), 1.0

    def speculate(name: str, ids: list[int]) -> tuple[list[int], float]:
        output = engines[name].generate([ids], params)[0]
        return output.token_ids, output.figures.mean_accepted_tokens or 1.0

    def times_of(ids: list[int], repeat: int) -> tuple[dict[str, float], dict[str, list[int]], dict[str, float]]:
        times: dict[str, list[float]] = defaultdict(list)
        tokens: dict[str, list[int]] = {}
        accepted: dict[str, float] = {}
        sides = [*engines] if args.temperature else ["generate", *engines]
        for turn in range(repeat):
            for name in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                begin = time.perf_counter()
                tokens[name], accepted[name] = generate(ids) if name == "generate" else speculate(name, ids)
                times[name].append(time.perf_counter() - begin)
        return {name: statistics.median(found) for name, found in times.items()}, tokens, accepted

    prompts = [prompt for prompt in read_held_out() if not args.kind or prompt.kind in args.kind]
    encoded = [to_token_ids(prompt.prompt, tokenizer, model.config.vocab_size, "").tolist() for prompt in prompts]
    for ids in encoded[:2]:
        times_of(ids, 2)  # warm up
    speedups: dict[tuple[str, str], list[float]] = defaultdict(list)
    slower: list[str] = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        medians, tokens, accepted = times_of(ids, args.repeat)
        others = [name for name in ("none", "generate") if name in medians]
        measured_again = False
        base = min(medians[name] for name in others)
        if any(base / medians[name] < args.retry_below for name in drafters):
            medians, tokens, accepted = times_of(ids, 3 * args.repeat)
            base, measured_again = min(medians[name] for name in others), True
        distinct = distinct_ngrams([tokens["none"]])
        row = {
            "id": prompt.id,
            "prompt_tokens": len(ids),
            "tokens": len(tokens["none"]),
            "distinct_4grams": round(distinct, 2),
            "none_tokens_per_s": round(len(tokens["none"]) / medians["none"]),
        }
        if "generate" in medians:
            row["none_against_generate"] = round(medians["generate"] / medians["none"], 2)
            row["none_same_as_generate"] = tokens["none"] == tokens["generate"]
        for name in drafters:
            speedup = base / medians[name]
            row[name] = {
                "speedup": round(speedup, 3),
                "mat": round(accepted[name], 2),
                "same_as_none": tokens[name] == tokens["none"],
            }
            if measured_again:
                row["measured_again"] = True
            speedups[name, prompt.kind + (", looping" if distinct < LOOPS_UNDER else "")].append(speedup)
            if speedup < args.retry_below:
                slower.append(f"{prompt.id} ({name}): {speedup:.3f}")
        print(json.dumps(row), flush=True)
    for (name, kind), found in sorted(speedups.items()):
        summary = {"drafter": name, "kind": kind, "prompts": len(found), "median": round(statistics.median(found), 2),
                   "least": round(min(found), 3), "most": round(max(found), 2)}  # fmt: skip
        print(json.dumps(summary))
    print(json.dumps({"slower_than": args.retry_below, "prompts": slower}))


if __name__ == "__main__":
    main()
