"""What Outpace does, shown without a checkpoint: drafts on real text, then a check of a random model against `generate`.

make demo
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

DRAFTERS = ("none", "llma", "lookup", "suffix")
VOCAB_SIZE = 4096
PROMPT_TOKENS = 256  # of each file, given to the drafter as the prompt; the rest is replayed as output
PROMPTS = (
    "def count_tokens(text: str) -> int:",
    '"""Draft trees and verdicts: what is proposed for a batch, and what became of it.\n\nExample: under the root',
    "import numpy as np\nimport torch\n\nfrom outpace.errors import",
    "for b in range(len(offsets) - 1):\n    begin, end = offsets[b], offsets[b + 1]\n    for",
)
NEW_TOKENS = 64


def main() -> int:
    console = Console(highlight=False)
    done: list[str] = []
    started = time.perf_counter()
    try:
        _say(console, "[bold]Outpace[/bold]: the model's own tokens, in fewer steps.")
        _progress(console, "importing torch and Transformers")
        import outpace
        from outpace.cli.common import quiet_libraries

        quiet_libraries(None)
        package = Path(outpace.__file__).parent
        sources = {str(path.relative_to(package)): path.read_text("utf-8") for path in sorted(package.rglob("*.py"))}
        tokenizer = _train_tokenizer(console, list(sources.values()))
        _replay(console, sources, tokenizer)
        done.append("part 1 (drafts on real text)")
        differing = _check(console, tokenizer)
        done.append("part 2 (with and without speculation)")
    except KeyboardInterrupt:
        _say(console, "")
        _say(console, f"Interrupted. Finished: {', '.join(done) or 'no part yet'}.")
        return 130
    _next_steps(console)
    _say(console, f"{time.perf_counter() - started:.0f} seconds in all.")
    return 1 if differing else 0


def _train_tokenizer(console, texts):
    """A byte-level BPE over these very texts, so nothing is downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    _progress(console, f"training a tokenizer of {VOCAB_SIZE} tokens on the package's own source code")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _replay(console, sources, tokenizer) -> None:
    from outpace.bench import Trace
    from outpace.bench.replay import start_replay

    traces = []
    for name, text in sources.items():
        ids = np.array(tokenizer(text, verbose=False)["input_ids"], np.int32)
        if len(ids) > 2 * PROMPT_TOKENS:
            traces.append(Trace(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], id=name))
    tokens = sum(len(trace.output_ids) for trace in traces)
    _heading(console, "1. What drafts would save on text like this")
    _say(
        console,
        f"{len(traces)} files of Outpace's own source code are replayed, {tokens:,} tokens. The first {PROMPT_TOKENS} tokens "
        "of a file are the prompt; the rest is taken for a model's output. No model runs. A step costs a model one "
        "pass; plain decoding commits 1 token in each.",
    )
    table = Table()
    table.add_column("drafter")
    for heading in ("tokens a step", "nodes a step", "us a step"):
        table.add_column(heading, justify="right")
    try:
        for name in DRAFTERS:
            _progress(console, f"replaying through {name}")
            run = start_replay(name, traces)
            for trace in traces:
                run.add(trace)
            result = run.result
            table.add_row(
                name,
                f"{result.mean_accepted_tokens:.2f}",
                f"{result.nodes_per_step:.1f}",
                f"{result.draft_us_per_step:.1f}",
            )
    finally:  # also after Ctrl-C: what was measured so far
        if table.row_count:
            console.print(table)
    _say(
        console,
        "[bold]tokens a step[/bold]: committed by one pass of the model, its own token included (MAT). "
        "[bold]nodes a step[/bold]: drafted tokens that the pass verifies besides. "
        "[bold]us a step[/bold]: microseconds that drafting takes, here and now. "
        "How many tokens a step you get depends on the text: answers that quote their prompt (summaries, edits) gain "
        "most, translations least.",
    )


def _check(console, tokenizer) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outpace import Engine
    from outpace.bench.check import check

    _heading(console, "2. With and without speculation: the same tokens")
    _progress(console, "building a random Llama")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # sharper than the usual start, or it would write one token for ever
                spread = 1.0 if "embed" in name else (1.5 if "self_attn" in name else 1.0) / parameter.shape[1] ** 0.5
                torch.nn.init.normal_(parameter, std=spread)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    _say(
        console,
        f"A Llama of {size:.0f}M random weights in float32 continues {len(PROMPTS)} prompts by {NEW_TOKENS} tokens: once with "
        "the drafter suffix, all in one batch, and once with Transformers' own generate, one at a time. Every draft "
        "is verified here, whether it pays or not.",
    )
    engine = Engine(model, tokenizer, drafter="suffix", guard=False)

    last = ""

    def on_step(stage: str, _done: int, _total: int) -> None:
        nonlocal last
        if stage != last:
            _progress(console, stage)
            last = stage

    result = check(engine, list(PROMPTS), max_tokens=NEW_TOKENS, on_step=on_step)
    table = Table()
    table.add_column("prompt", no_wrap=True, overflow="crop", max_width=30)
    table.add_column("result")
    table.add_column("tokens", justify="right")
    for detail in result.details:
        start = PROMPTS[detail.index].splitlines()[0]
        table.add_row(start, detail.result, str(detail.tokens))
    console.print(table)
    _say(
        console,
        f"{result.identical} of {result.prompts} identical, {result.ties} ties, {result.divergences} divergences, "
        f"{result.errors} errors. A tie is a place where both tokens' logits are within twice the "
        f"floating-point noise of the best; the noise is {result.noise_floor:.1e} here.",
    )
    _say(
        console,
        f"A random model writes noise ({result.distinct_4grams:.0%} of its 4-grams are distinct), and noise cannot be "
        f"guessed: {result.mean_accepted_tokens:.2f} tokens a step. So this part shows that nothing changes. It says nothing "
        "about speed.",
    )
    return result.divergences + result.errors


def _next_steps(console: Console) -> None:
    _heading(console, "Next, with a checkpoint of yours (folder or hub id)")
    commands = (
        'outpace generate "Once upon a time" --model M',
        "outpace check --model M --prompts FILE",
        "outpace replay TRACES.jsonl --drafter suffix",
    )
    for command in commands:
        console.print(Padding(command, (0, 0, 0, 2)), markup=False)
    _say(console, "")
    _say(
        console,
        "Each explains itself with --help. Before that, `source .venv/bin/activate` puts the command on the path.",
    )


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(f"[bold]{text}[/bold]")
    console.print()


def _say(console: Console, text: str) -> None:
    console.print(text)


def _progress(console: Console, text: str) -> None:
    """One line on standard error, so that a pipe holds results alone."""
    print(f"... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
