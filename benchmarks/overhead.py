"""What a step costs beside the model's pass and the reading of its logits: drafting, reducing, packing, committing, telling.

Batch 8, trees of 16 nodes, 32,000 logits; the model is random and small. Also the reading itself: the best token and the
best eight of 136 rows.

    python benchmarks/overhead.py --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verify_cost import RandomChains

from outpace import Drafter, Engine, SamplingParams
from outpace.kernels.logits import topk_rows


def step_overhead(drafter: Drafter | str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=32000,
                         intermediate_size=256, max_position_embeddings=2048, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    engine = Engine(model, drafter=drafter, guard=False, max_nodes=args.nodes)
    core: Any = engine._core
    spent = {"forward": 0.0, "verify": 0.0}
    for part in spent:
        inner = getattr(core, f"_{part}")

        def timed(*given: Any, _inner: Any = inner, _part: str = part) -> Any:
            begin = time.perf_counter()
            try:
                return _inner(*given)
            finally:
                spent[_part] += time.perf_counter() - begin

        setattr(core, f"_{part}", timed)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, 31000, (args.batch_size, args.context), generator=generator)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=10_000 if args.context > 1900 else 2000 - args.context))
    for _ in range(8):
        engine.step()
    steps = []

    def verified() -> int:
        return sum(request.figures.verified_nodes for samples in core.requests.values() for request in samples)

    nodes = verified()
    for _ in range(args.steps):
        before = sum(spent.values())
        begin = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - begin - (sum(spent.values()) - before)) * 1e3)
    done = verified() - nodes
    return {
        "drafter": drafter if isinstance(drafter, str) else drafter.name,
        "batch_size": args.batch_size,
        "overhead_ms_per_step": round(statistics.median(steps), 3),
        "most": round(max(steps), 3),
        "nodes_per_step": round(done / args.steps, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for drafter in (RandomChains(args.nodes, 32000), "suffix"):
        print(json.dumps(step_overhead(drafter, args)), flush=True)
    logits = torch.randn(136, 32000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for name, read in (
        ("best", lambda rows: topk_rows(rows, 1)),
        ("top 8", lambda rows: topk_rows(rows, 8)),
        ("torch argmax", lambda rows: rows.argmax(-1)),
    ):
        read(logits)
        times = []
        for _ in range(51):
            begin = time.perf_counter()
            read(logits)
            times.append((time.perf_counter() - begin) * 1e3)
        print(json.dumps({"reading": name, "rows": 136, "vocabulary": 32000, "ms": round(statistics.median(times), 3)}))


if __name__ == "__main__":
    main()
