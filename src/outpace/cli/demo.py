"""``outpace demo``: the model in the box, plain and with every drafter."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli.common import (
    DEFAULT_MODEL,
    USABLE_DRAFTERS,
    AdapterOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    ThreadsOption,
    TrustOption,
    check_writable,
    err_console,
    load_engine,
    load_options,
    write_json,
)
from outpace.cli.interrupts import interruptible
from outpace.cli.origins import Painter, out_console, pieces_of, printable
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from outpace.bench.demo import Demo
    from outpace.bench.heldout import HeldOut

_HELP = "\n\n".join(
    (
        "Show what speculation does here and now: the model in the box, plain and with every drafter.",
        "A few prompts of each kind, held out of the model's training, are decoded greedily, one at a time: code to be "
        "completed, code to be edited, worked arithmetic, and text that repeats nothing. Plain decoding and the drafters "
        "take turns, so that whatever else the machine does hits all alike. Takes one to two minutes, the first time a "
        "little longer; Ctrl-C shows what was measured so far.",
        "tokens/s counts from the prompt to the last token. MAT is the mean number of tokens that a step commits, the "
        "model's own included; 1.00 is plain decoding. An output that is not identical is a *tie* if rounding decided "
        "between two tokens, else an error of Outpace, and the exit status is 1.",
        "Examples:",
        "    outpace demo",
        "    outpace demo --model ./my-llama --drafter suffix --drafter 'suffix(draft_size=20)' --json demo.json",
    )
)
_TITLES = {
    "completion": "code completion",
    "editing": "code editing",
    "arithmetic": "worked arithmetic",
    "varied": "text without repetition",
}
_ROUNDS = 5
_PROMPT_LINES = 4  # of a prompt that are shown
_NOISY = 0.15  # spread of repeated runs above which the figures are called noisy


def demo(
    model: ModelOption = DEFAULT_MODEL,
    prompts_per_kind: Annotated[
        int, typer.Option("--prompts-per-kind", min=1, metavar="N", help="Prompts of each kind.")
    ] = 2,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Most tokens to generate for each prompt.")
    ] = 128,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter", "-d", metavar="D",
            help=f"One of {', '.join(USABLE_DRAFTERS)}; may be repeated; all of them by default.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", "-p", metavar="FILE", help="Other prompts: JSON Lines with prompt or messages, and kind."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, metavar="S", help="Time for measuring; one prompt always runs.")
    ] = 60.0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    adapter: AdapterOption = None,
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:  # fmt: skip
    """Measure and show; see ``_HELP``."""
    check_writable(json_path)
    options = load_options(dtype, device, adapter, trust_remote_code)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    console, shown = err_console(), out_console(stderr=json_path == "-")
    _tell(console, "loading torch and Transformers")
    from outpace.bench.demo import Demo
    from outpace.bench.heldout import first_of_each_kind, read_held_out
    from outpace.draft import build_drafter

    specs = list(drafter or USABLE_DRAFTERS)
    for spec in specs:
        build_drafter(spec)  # a wrong name is told before anything slow
    chosen = first_of_each_kind(read_held_out(prompts), prompts_per_kind)
    engine = load_engine(console, model, threads, drafter="none", **options)
    if engine.tokenizer is None:
        raise ConfigError(f"{model!r} has no tokenizer that could be loaded, and the prompts are text")
    measured = Demo(engine, chosen, specs, max_tokens)
    complete = _measure(console, measured, seconds)
    if not measured.cells:
        console.print("interrupted before the first run had ended: nothing was measured")
        raise typer.Exit(130)
    try:
        measured.compare(measure_noise=complete)
    except KeyboardInterrupt:
        measured.compare(measure_noise=False)
        complete = False
    if json_path is not None:
        write_json(json_path, _conditions(model, load, complete) | measured.to_dict())
    _show(shown, measured, model, load, complete)
    if not complete:
        raise typer.Exit(130)
    if measured.divergences():
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo", help=_HELP)(demo)


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(console: Console, measured: Demo, seconds: float) -> bool:
    """Warm up and run the rounds; whether they came to their end, or Ctrl-C ended them."""
    with interruptible() as pressed, _progress(console) as advance:

        def stop_if_pressed() -> None:
            if pressed():
                raise KeyboardInterrupt

        def warming(spec: str) -> None:
            stop_if_pressed()
            advance(f"warming up {spec}", measured.drafters.index(spec), len(measured.drafters))

        try:
            measured.warm_up(warming)
            stop_if_pressed()
            size = measured.runs_in_round
            advance("measuring", 0, size)
            for done in measured.measure(seconds=seconds, most_rounds=_ROUNDS, on_step=stop_if_pressed):
                current = (done - 1) // size
                advance(f"measuring, round {current + 1} of at most {_ROUNDS}", done - current * size, size)
        except KeyboardInterrupt:
            return False
    return True


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows what is being done and how much of it is; a bar in a terminal, else a line for each stage."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not console.is_terminal or console.is_dumb_terminal:
        last = ""

        def line(what: str, _done: int, _total: int) -> None:
            nonlocal last
            if what.split(",")[0] != last:
                last = what.split(",")[0]
                _tell(console, last)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), TimeRemainingColumn())
    # Few refreshes: they take time from what is measured.
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _tell(console: Console, stage: str) -> None:
    """A line on what is going on, for where no bar can be shown."""
    if not console.is_terminal or console.is_dumb_terminal:
        console.print(f"... {stage}")


def _conditions(model: str, load: float | None, complete: bool) -> dict[str, object]:
    import torch

    from outpace import __version__

    versions = {"outpace": __version__, "torch": torch.__version__}
    return {"model": model, "complete": complete, "load_average": load, "versions": versions}


# --- showing ---------------------------------------------------------------------------------------------------------


def _show(console: Console, measured: Demo, model: str, load: float | None, complete: bool) -> None:
    done = [
        prompt for prompt in measured.prompts if any((prompt.id, spec) in measured.cells for spec in measured.drafters)
    ]
    painter = Painter(console)
    for kind, prompts in measured.kinds().items():
        _show_text(console, painter, measured, kind, prompts)
    if not complete:
        runs = sum(len(cell.seconds) for cell in measured.cells.values())
        console.print(f"Interrupted. What {runs} finished runs gave:", style="bold")
        console.print()
    _show_table(console, measured, done)
    _show_notes(console, measured, model, load, complete)
    _show_next(console)


def _show_text(console: Console, painter: Painter, measured: Demo, kind: str, prompts: list[HeldOut]) -> None:
    """One prompt of a kind and what came of it, with the drafter that guessed best there."""
    from rich.text import Text

    rows = [measured.row(spec, prompts) for spec in measured.drafters if (prompts[0].id, spec) in measured.cells]
    if not rows:
        return
    best = max(rows, key=lambda row: (row.drafter != "none", row.mean_accepted_tokens))
    cell = measured.cells[prompts[0].id, best.drafter]
    console.print(Text(_TITLES.get(kind, kind).capitalize(), "bold"))
    source = f" ({prompts[0].source})" if prompts[0].source else ""
    console.print(Text(f"prompt {prompts[0].id}{source}:", "dim"))
    console.print(Text(_excerpt(prompts[0]), tab_size=4))
    console.print(Text(f"written by the model, drafts by {best.drafter}:", "dim"))
    console.print(painter.text(pieces_of(measured.tokenizer, cell.outputs[0].token_ids, cell.origins)))
    console.print(Text("(") + painter.legend(cell.origins) + Text(")"))
    console.print()


def _excerpt(prompt: HeldOut) -> str:
    """The end of a text that is continued, the beginning of a message."""
    lines = printable(prompt.text).strip("\n").splitlines()
    left = len(lines) - _PROMPT_LINES
    if left <= 0:
        return "\n".join(lines)
    note = f"[... {left} more {'line' if left == 1 else 'lines'} ...]"
    if isinstance(prompt.prompt, str):
        return "\n".join([note, *lines[-_PROMPT_LINES:]])
    return "\n".join([*lines[:_PROMPT_LINES], note])


def _show_table(console: Console, measured: Demo, done: list[HeldOut]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("drafter", overflow="fold")
    for heading in ("tokens/s", "MAT", "speedup", "identical", "ties"):
        table.add_column(heading, justify="right", no_wrap=True)
    groups = [(_TITLES.get(kind, kind), prompts) for kind, prompts in measured.kinds().items()]
    if len(groups) > 1:
        groups.append(("all prompts", done))
    for title, prompts in groups:
        rows = [row for spec in measured.drafters if (row := measured.row(spec, prompts)).prompts]
        if not rows:
            continue
        table.add_row(f"{title} ({rows[0].prompts})", style="bold")
        fastest = max((row.speedup or 0.0) for row in rows)
        for row in rows:
            plain = row.drafter == "none"
            ties = "?" if row.results.get("unknown") else str(row.results.get("tie", 0))
            table.add_row(
                "  " + ("none (plain)" if plain else row.drafter),
                _speed(row.tokens_per_s),
                f"{row.mean_accepted_tokens:.2f}" if row.mean_accepted_tokens else "-",
                "-" if row.speedup is None else f"{row.speedup:.2f}x",
                "" if plain else f"{row.results.get('identical', 0)}/{row.prompts}",
                "" if plain else ties,
                style="green" if row.speedup == fastest > 1.0 and not plain else "",
            )
        table.add_row()
    console.print(table)


def _show_notes(console: Console, measured: Demo, model: str, load: float | None, complete: bool) -> None:
    """The conditions, and what the reader should know before believing the figures."""
    conditions = measured.to_dict()
    cores, threads = conditions["cpus"], conditions["threads"]
    rounds = f"median of {measured.rounds} rounds" if measured.rounds > 1 else "one round"
    console.print(
        f"Measured here and now: {printable(model)}, {conditions['dtype']} on {conditions['device']}, {threads} "
        f"{'thread' if threads == 1 else 'threads'}, {cores} cores; one prompt at a time, at most {measured.max_tokens} "
        f"tokens each, greedy, {rounds}."
    )
    spread = measured.spread()
    if spread is not None:
        noisy = " That is noisy: take the speeds as rough." if spread > _NOISY else ""
        console.print(f"Repeated plain runs of a prompt lay {spread:.0%} apart.{noisy}")
    if load is not None and cores and load > 0.5 * cores:
        console.print(f"Other programs were running (load {load:.1f} on {cores} cores): speeds suffer, tokens do not.")
    if any(cell.result == "tie" for cell in measured.cells.values()):
        console.print("A tie: two tokens so close that rounding decides; the text differs from there on.")
    if looping := measured.looping():
        console.print(
            f"{len(looping)} of {len(measured.prompts)} texts loop (under 60% of their 4-grams differ), which flatters every "
            f"drafter: {', '.join(looping)}."
        )
    run = sum((prompt.id, "none") in measured.cells for prompt in measured.prompts)
    if complete and run < len(measured.prompts):
        console.print(f"Time was up after {run} of {len(measured.prompts)} prompts; --seconds gives it more.")
    if measured.left_out:
        console.print(f"{len(measured.left_out)} prompts were left out: too long for the model's context.")
    if wrong := measured.divergences():
        console.print(
            f"{wrong} outputs are NOT what plain decoding gives. That is an error of Outpace; please report it.",
            style="bold red",
        )


def _show_next(console: Console) -> None:
    console.print()
    console.print("Try next:", style="bold")
    for command in (
        "outpace chat",
        'outpace generate "def read_config(path):"',
        "outpace demo --model PATH-OR-HUB-ID",
    ):
        console.print(f"  {command}")
    if shutil.which("outpace") is None:
        console.print("(after `source .venv/bin/activate`)")


def _speed(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"
