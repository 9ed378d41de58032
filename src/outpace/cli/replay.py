"""``outpace replay``: what a drafter would have saved on recorded outputs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from outpace.cli.common import JsonOption, ReplayDrafterOption, check_writable, err_console, write_json
from outpace.cli.reliability import show_reliability

if TYPE_CHECKING:
    from rich.console import Console

    from outpace.bench.replay import Replay
    from outpace.bench.traces import Trace
    from outpace.suffix.corpus import Corpus
    from outpace.tokenizers import TextTokenizer

_HELP = "\n\n".join(
    (
        "Replay recorded outputs through a drafter, without a model.",
        "Each line of a trace file holds `prompt_ids` and `output_ids`. The drafter sees the prompt and the first "
        "output token, then drafts step after step; what agrees with the recorded output counts as accepted. Any other "
        "file is plain text and needs `--tokenizer`.",
        "Examples:",
        "    outpace replay traces.jsonl --drafter suffix --json -",
        "    outpace replay book.txt --tokenizer llama.model -d 'suffix(draft_size=20)' --max-nodes 8",
        "    outpace replay traces.jsonl -d suffix-tree --memory --corpus gsm8k --budget 7",
        "    outpace replay traces.jsonl -d suffix-tree --calibration reliability.svg",
        "The figures go to standard error; with `--json -` standard output holds the JSON and nothing else.",
    )
)


_CALIBRATION = "--calibration"
_PLOTS = (".svg", ".png")  # as `outpace.bench.plots` has them, which would import numpy


class _ReplayCommand(typer.core.TyperCommand):
    """``--calibration`` with or without a path: what ends in .svg or .png behind it is one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write the option with ``=``, so that it always has a value."""
        written: list[str] = []
        left = list(args)
        while left:
            arg = left.pop(0)
            if arg == "--":
                written += [arg, *left]
                break
            if arg == _CALIBRATION:
                arg += "=" + (left.pop(0) if left and left[0].lower().endswith(_PLOTS) else "")
            written.append(arg)
        parsed: list[str] = super().parse_args(ctx, written)
        return parsed


def replay(
    traces: Annotated[list[str], typer.Argument(metavar="TRACES...", help="Trace files (.jsonl), or plain text.")],
    drafter: ReplayDrafterOption = "suffix",
    max_nodes: Annotated[
        int, typer.Option("--max-nodes", min=0, max=2**31 - 1, metavar="M", help="Verify at most M nodes in any step.")
    ] = 64,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="N",
            help="Verify at most N nodes a step in the mean: more where the drafts are sure, less where not.",
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Let the outputs of earlier traces feed the drafter, in the files' order.")
    ] = False,
    corpus: Annotated[
        list[str] | None,
        typer.Option("--corpus", metavar="DIR", help="Let a corpus feed the drafter; repeatable."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            _CALIBRATION,
            metavar="[PATH]",
            help="Show estimated against observed acceptance; with a PATH (.svg, .png), draw it too.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="T",
            help="For plain text, and to check that a corpus fits: SentencePiece .model file, folder or hub id.",
        ),
    ] = None,
    json_path: JsonOption = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N traces.")] = None,
) -> None:
    """Replay recorded outputs through a drafter; see ``_HELP``."""
    check_writable(json_path)
    from rich.progress import track

    from outpace.bench.plots import check_plot_path, draw_reliability
    from outpace.bench.replay import start_replay
    from outpace.bench.traces import read_traces
    from outpace.draft.registry import uses_sources
    from outpace.tokenizers import TextTokenizer

    if calibration:
        check_plot_path(calibration)
    console = err_console()
    text_tokenizer = TextTokenizer.load(tokenizer) if tokenizer is not None else None
    corpora = _open_corpora(console, corpus or [], text_tokenizer)
    encode = text_tokenizer.encode if text_tokenizer is not None else None
    loaded: list[Trace] = list(
        itertools.islice(itertools.chain.from_iterable(read_traces(path, encode) for path in traces), limit)
    )
    run = start_replay(
        drafter,
        loaded,
        max_nodes,
        memory=memory,
        corpora=corpora,
        budget=budget,
        calibration=calibration is not None,
    )
    if not run.drafter.needs.nothing:
        console.print(f"{drafter}: no model runs, so what drafts from its passes has nothing to draft")
    if (memory or corpora) and not uses_sources(drafter):
        console.print(f"{drafter} drafts from the request's own text alone: memory and corpora change nothing")
    for trace in track(loaded, description="replaying", console=console, transient=True):
        run.add(trace)
    result = run.result
    write_json(json_path, result.to_json())
    _show(console, run)
    if calibration and result.calibration:
        draw_reliability(calibration, result.calibration, f"{drafter} on {result.traces:,} recorded outputs")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("replay", help=_HELP, cls=_ReplayCommand)(replay)


def _open_corpora(console: Console, folders: list[str], tokenizer: TextTokenizer | None) -> list[Corpus]:
    from outpace.suffix.corpus import Corpus

    if folders and tokenizer is None:
        console.print(
            "nothing says which tokenizer made the traces; with --tokenizer a corpus of another one would be refused"
        )
    fingerprint = tokenizer.fingerprint if tokenizer is not None else None
    name = tokenizer.name if tokenizer is not None else None
    return [Corpus.open(folder, fingerprint, name) for folder in folders]


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
    fed = f", {result.memory_us_per_step:.1f} us for taking outputs into the memory" if result.memory else ""
    console.print(f"besides, a step: {result.reduce_us_per_step:.1f} us for calibration and selection{fed}")
    if result.calibration is not None:
        show_reliability(console, result.calibration)
