"""``outpace check``: with and without speculation, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.common import (
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
from outpace.errors import UnknownNameError

if TYPE_CHECKING:
    from rich.console import Console

    from outpace.bench.check import CheckResult, Reference
    from outpace.engine import Engine

_HELP = "\n\n".join(
    (
        "Check that speculation changes nothing but the speed.",
        "Every prompt of the file is decoded greedily with speculation, all in one batch, and without: by default with "
        "Transformers' own `generate`, one at a time. Where outputs differ, the first difference is a *tie* if both "
        "tokens' logits are closer to the best than twice the measured floating-point noise, else a *divergence*.",
        "FILE is .jsonl (a field prompt_ids, messages, turns, prompt, question or text) or plain text, a prompt a line.",
        "Exit status: 0 if there is no divergence, 1 if there is one, 2 if the check could not be made.",
        "Example:",
        "    outpace check --model ./my-llama --prompts questions.jsonl --drafter suffix --dtype float32",
    )
)


def check_command(
    model: ModelOption,
    prompts: Annotated[str, typer.Option("--prompts", "-p", metavar="FILE", help="Where the prompts are.")],
    drafter: DrafterOption = "suffix",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Tokens to generate for each prompt.")
    ] = 128,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N prompts.")] = None,
    against: Annotated[
        str, typer.Option("--against", help="transformers: the model's own generate. none: our plain decoding.")
    ] = "transformers",
    chat: Annotated[bool, typer.Option("--chat", help="Wrap text prompts in the model's chat template.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Most prompts in one batch.")] = 32,
    max_nodes: MaxNodesOption = 64,
    memory: MemoryOption = False,
    corpus: CorpusOption = None,
    skip_unusable_corpora: SkipCorporaOption = False,
    compile_model: CompileOption = False,
    guard: Annotated[
        bool, typer.Option(help="Let drafts be cut where they do not pay; off, everything drafted is verified.")
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    adapter: AdapterOption = None,
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Run the check; see ``_HELP``."""
    if against not in ("transformers", "none"):
        raise UnknownNameError("reference", against, ["transformers", "none"])
    reference: Reference = "none" if against == "none" else "transformers"
    check_writable(json_path)
    options = load_options(dtype, device, adapter, trust_remote_code)
    from outpace.bench.prompts import read_prompts

    listed: list[Any] = list(read_prompts(prompts, limit))
    if chat:
        listed = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in listed]
    console = err_console()
    options |= {
        "drafter": drafter,
        "max_nodes": max_nodes,
        "guard": guard,
        "compile": compile_model,
        "max_batch_size": batch_size,
        "memory": memory,
        "corpora": tuple(corpus or ()),
        "skip_unusable_corpora": skip_unusable_corpora,
    }
    engine = load_engine(console, model, threads, **options)
    if chat:
        check_chat_template(engine)
    result = _check(console, engine, listed, max_tokens, reference)
    write_json(json_path, result.to_dict())
    _show(console, result)
    if result.divergences:
        raise typer.Exit(1)
    if result.errors:
        raise typer.Exit(2)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("check", help=_HELP)(check_command)


def _check(console: Console, engine: Engine, prompts: list[Any], max_tokens: int, reference: Reference) -> CheckResult:
    """The check, with a bar of its progress."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from outpace.bench.check import check

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("with speculation", total=len(prompts))
        return check(
            engine,
            prompts,
            max_tokens=max_tokens,
            reference=reference,
            on_step=lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total),
        )


def _show(console: Console, result: CheckResult) -> None:
    from rich.table import Table

    differing = [detail for detail in result.details if detail.result != "identical"]
    if differing:
        table = Table()
        for heading in ("prompt", "result", "position", "without", "with", "logit gap"):
            table.add_column(heading, justify="left" if heading == "result" else "right")
        for detail in differing:
            gap = "" if detail.gap is None else f"{detail.gap:.2e}"
            cells = [detail.index, detail.result, detail.position, detail.expected, detail.found]
            table.add_row(*("" if cell is None else str(cell) for cell in cells), gap)
        console.print(table)
        for detail in differing:
            if detail.message is not None:
                console.print(f"prompt {detail.index}: {detail.message}")
    console.print(
        f"{result.prompts} prompts, {result.tokens:,} tokens: {result.identical} identical, {result.ties} ties, "
        f"{result.divergences} divergences, {result.errors} errors"
    )
    console.print(
        f"noise floor {result.noise_floor:.2e}; {result.mean_accepted_tokens:.2f} tokens a step with drafter "
        f"{result.drafter}; {result.distinct_4grams:.2f} of 4-grams distinct"
        + (" (the text loops, which flatters every drafter)" if result.distinct_4grams < 0.6 else "")
    )
