"""Plain decoding (drafter `none`) against Transformers' `generate`, in bfloat16, in one run.

Both decode the same prompts greedily for the same number of tokens. Each measurement times a long and a short run and
takes the difference, so that prefill and set-up drop out; the two sides take turns, and medians are compared.

    python benchmarks/plain_vs_generate.py --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from models import SHAPES, build

from outpace import Engine, SamplingParams


def measure(shape: str, batch_size: int, args: argparse.Namespace) -> dict[str, object]:
    model = build(shape)
    model.generation_config.eos_token_id = None
    prompts = torch.randint(4, 4000, (batch_size, args.prompt_tokens), generator=torch.Generator().manual_seed(1))
    engine = Engine(model, drafter="none")

    def transformers_run(tokens: int) -> torch.Tensor:
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=tokens)

    def outpace_run(tokens: int) -> list[list[int]]:
        outputs = engine.generate(list(prompts), SamplingParams(max_tokens=tokens, ignore_eos=True))
        return [output.token_ids for output in outputs]

    sides = {"transformers": transformers_run, "outpace": outpace_run}
    per_step: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(4)
    for _ in range(args.repeat):
        for name, run in sides.items():
            begin = time.perf_counter()
            run(1)
            middle = time.perf_counter()
            run(1 + args.tokens)
            end = time.perf_counter()
            per_step[name].append(((end - middle) - (middle - begin)) / args.tokens * 1e3)
    medians = {name: statistics.median(times) for name, times in per_step.items()}
    ratios = [theirs / ours for theirs, ours in zip(per_step["transformers"], per_step["outpace"], strict=True)]
    reference = transformers_run(args.tokens)[:, prompts.shape[1] :].tolist()
    identical = sum(a == b for a, b in zip(reference, outpace_run(args.tokens), strict=True))
    return {
        "model": shape,
        "batch_size": batch_size,
        "transformers_ms_per_step": round(medians["transformers"], 2),
        "outpace_ms_per_step": round(medians["outpace"], 2),
        "outpace_tokens_per_s": round(batch_size / medians["outpace"] * 1e3),
        "speed_ratio_median": round(statistics.median(ratios), 3),
        "speed_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "identical_outputs": f"{identical}/{batch_size}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in args.models:
        for batch_size in args.batch_sizes:
            print(json.dumps(measure(shape, batch_size, args)), flush=True)


if __name__ == "__main__":
    main()
