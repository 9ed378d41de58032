"""``outpace generate``: one prompt, streamed."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.common import (
    DEFAULT_MODEL,
    AdapterOption,
    CompileOption,
    CorpusOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    MaxNodesOption,
    MemoryOption,
    ModelOption,
    SkipCorporaOption,
    ThreadsOption,
    TrustOption,
    check_chat_template,
    check_writable,
    err_console,
    load_engine,
    load_options,
    write_json,
)
from outpace.cli.origins import OriginWriter, shares
from outpace.errors import ConfigError, OutpaceError, PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from outpace.config import SamplingParams
    from outpace.engine import Engine, Output

_HELP = "\n\n".join(
    (
        "Generate text from a prompt, and show it as it comes.",
        "PROMPT is the text itself, or `-` to read standard input. The text goes to standard output, the figures to "
        "standard error. In a terminal, what was drafted and accepted is coloured, unless NO_COLOR is set. Decoding is "
        "greedy unless `--temperature` is above 0; the same seed gives the same text with every drafter.",
        "Examples:",
        '    outpace generate "def read_lines(path):"',
        '    outpace generate "Once upon a time" --model ./my-llama',
        "    cat notes.txt | outpace generate - -m ./my-llama -d 'suffix(draft_size=20)' --max-tokens 500",
        '    outpace generate "Why is the sky blue?" --chat -m ./my-llama --temperature 0.7 --seed 1 --json -',
    )
)


def generate(
    prompt: Annotated[str, typer.Argument(metavar="[PROMPT|-]", help="Text, or - for standard input.")] = "-",
    model: ModelOption = DEFAULT_MODEL,
    drafter: DrafterOption = "suffix",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", metavar="N", help="Most tokens to generate.")
    ] = 256,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", help="1 does nothing.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", help="For sampling; drawn if not given.")] = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Continue the prompt N times.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", metavar="N", help="With --json: log-probabilities, and the N best.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")] = None,
    max_nodes: MaxNodesOption = 64,
    memory: MemoryOption = False,
    corpus: CorpusOption = None,
    skip_unusable_corpora: SkipCorporaOption = False,
    compile_model: CompileOption = False,
    guard: Annotated[bool, typer.Option(help="Switch drafts off while they do not pay by the clock.")] = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    adapter: AdapterOption = None,
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Generate and stream; see ``_HELP``."""
    from outpace.config import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        n=samples,
        stop=tuple(stop or ()),
        logprobs=logprobs,
    )
    check_writable(json_path)
    options = load_options(dtype, device, adapter, trust_remote_code)
    text = _read_prompt(prompt)
    console = err_console()
    options |= {
        "memory": memory, "corpora": tuple(corpus or ()), "skip_unusable_corpora": skip_unusable_corpora
    }  # fmt: skip
    engine = load_engine(
        console, model, threads, drafter=drafter, max_nodes=max_nodes, guard=guard, compile=compile_model, **options
    )
    if engine.tokenizer is None:
        raise ConfigError(f"{model!r} has no tokenizer that could be loaded, and a text prompt needs one")
    if chat or system is not None:
        check_chat_template(engine)
    messages = [{"role": "system", "content": system}] if system is not None else []
    full_prompt: Any = [*messages, {"role": "user", "content": text}] if chat or messages else text
    counts: Counter[int] = Counter()
    outputs = _run(engine, full_prompt, params, counts, show=json_path != "-" and samples == 1)
    if json_path != "-" and samples > 1:
        for output in outputs:
            print(f"--- sample {output.sample_index}\n{output.text}")
    write_json(json_path, [output.to_dict() for output in outputs] if samples > 1 else outputs[0].to_dict())
    _show_figures(console, outputs, engine.drafter.name, counts)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("generate", help=_HELP)(generate)


def _run(engine: Engine, prompt: Any, params: SamplingParams, counts: Counter[int], *, show: bool) -> list[Output]:
    """Stream to the end; ``counts`` gets the number of tokens of each origin."""
    outputs: list[Output] = []
    writer = OriginWriter(engine.tokenizer, params.stop) if show else None
    try:
        for progress in engine.stream(prompt, params):
            counts.update(progress.origins)
            if writer is not None:
                writer.write(progress)
            if progress.output is not None:
                outputs.append(progress.output)
    except OutpaceError:
        if show and outputs:
            print()
        raise
    if show:
        print()
    return sorted(outputs, key=lambda output: output.sample_index)


def _show_figures(console: Console, outputs: list[Output], drafter: str, counts: Counter[int]) -> None:
    from outpace.engine import total_figures

    figures = total_figures(outputs)
    # Samples share their steps, so the longest of them is the time of all.
    prefill = max(output.figures.prefill_s for output in outputs)
    decode = max(output.figures.decode_s for output in outputs)
    speed = f"{figures.tokens / decode:.1f} tokens/s" if decode else "no decoding"
    tokens = sum(len(output.token_ids) for output in outputs)
    seeds = f", seed {outputs[0].seed}" if outputs[0].seed is not None else ""
    reasons = ", ".join(sorted({_reason(output) for output in outputs}))
    accepted = shares(counts, counts.total())
    console.print(
        f"{tokens} tokens ({reasons}), {speed}, {figures.mean_accepted_tokens:.2f} tokens a step with drafter "
        f"{drafter}{f' (accepted drafts: {accepted})' if accepted else ''}; "
        f"prompt of {len(outputs[0].prompt_token_ids)} in {prefill:.2f} s{seeds}",
        style="dim",
    )


def _reason(output: Output) -> str:
    detail = "" if output.stop_reason is None else f" at {output.stop_reason!r}"
    return f"{output.finish_reason}{detail}"


def _read_prompt(prompt: str) -> str:
    """The prompt itself, or what standard input holds."""
    if prompt != "-":
        return prompt
    if sys.stdin.isatty():
        print("reading the prompt from standard input; end with Ctrl-D", file=sys.stderr)
    content = sys.stdin.buffer.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}"
        ) from error
