"""``outpace replay``: what a drafter would have saved on recorded outputs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli.common import JsonOption, ReplayDrafterOption, check_writable, err_console, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from outpace.bench.replay import Replay
    from outpace.bench.traces import Trace

_HELP = "\n\n".join(
    (
        "Replay recorded outputs through a drafter, without a model.",
        "Each line of a trace file holds `prompt_ids` and `output_ids`. The drafter sees the prompt and the first "
        "output token, then drafts step after step; what agrees with the recorded output counts as accepted. Any other "
        "file is plain text and needs `--tokenizer`.",
        "Examples:",
        "    outpace replay traces.jsonl --drafter suffix --json -",
        "    outpace replay book.txt --tokenizer llama.model -d 'suffix(draft_size=20)' --max-nodes 8",
        "The figures go to standard error; with `--json -` standard output holds the JSON and nothing else.",
    )
)


def replay(
    traces: Annotated[list[str], typer.Argument(metavar="TRACES...", help="Trace files (.jsonl), or plain text.")],
    drafter: ReplayDrafterOption = "suffix",
    max_nodes: Annotated[
        int | None, typer.Option("--max-nodes", min=0, metavar="N", help="Verify at most N nodes a step.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="T", help="For plain text: SentencePiece .model file, folder or hub id."),
    ] = None,
    json_path: JsonOption = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N traces.")] = None,
) -> None:
    """Replay recorded outputs through a drafter; see ``_HELP``."""
    check_writable(json_path)
    from rich.progress import track

    from outpace.bench.replay import start_replay
    from outpace.bench.traces import read_traces
    from outpace.tokenizers import load_encoder

    console = err_console()
    encode = load_encoder(tokenizer) if tokenizer is not None else None
    loaded: list[Trace] = list(
        itertools.islice(itertools.chain.from_iterable(read_traces(path, encode) for path in traces), limit)
    )
    run = start_replay(drafter, loaded, max_nodes)
    for trace in track(loaded, description="replaying", console=console, transient=True):
        run.add(trace)
    write_json(json_path, run.result.to_json())
    _show(console, run)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("replay", help=_HELP)(replay)


def _show(console: Console, run: Replay) -> None:
    from rich.table import Table

    result = run.result
    table = Table()
    for heading in ("category", "tokens a step"):
        table.add_column(heading, justify="right" if heading != "category" else "left")
    for category, mean in result.by_category.items():
        table.add_row(category, f"{mean:.3f}")
    table.add_section()
    table.add_row("all", f"{result.mean_accepted_tokens:.3f}")
    console.print(f"{result.drafter} on {result.traces:,} recorded outputs")
    console.print(table)
    console.print(
        f"{result.tokens:,} tokens in {result.steps:,} steps, {result.nodes_per_step:.2f} nodes and "
        f"{result.draft_us_per_step:.1f} us of drafting a step"
    )
