"""``outpace train``: recipes that come with Outpace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.common import ThreadsOption, err_console, quiet_libraries
from outpace.errors import ConfigError

_HELP = "Train a model by a recipe that comes with Outpace."
_TINY_HELP = "\n\n".join(
    (
        "Train outpace-tiny, the model in the box: a Llama of 5 million parameters.",
        "Its texts are the Python standard library of this interpreter (or of --stdlib) and GSM8K's training questions; one "
        "document in twenty is held out. OUT gets the checkpoint, the tokenizer, the figures (training.json) and the "
        "held-out prompts (prompts.jsonl); a snapshot every five minutes. The recipe takes one to two hours on two cores.",
        "GSM8K's questions (MIT): train.jsonl of github.com/openai/grade-school-math, one JSON object a line.",
        "Example:",
        "    outpace train tiny ./my-tiny --gsm8k train.jsonl",
    )
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    group = typer.Typer(help=_HELP, no_args_is_help=True)
    group.command("tiny", help=_TINY_HELP)(_tiny)
    app.add_typer(group, name="train")


def _tiny(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; made if missing.")],
    gsm8k: Annotated[
        Path, typer.Option("--gsm8k", metavar="PATH", help="GSM8K's training questions, JSON lines, or their folder.")
    ],
    stdlib: Annotated[
        Path | None, typer.Option("--stdlib", metavar="DIR", help="A standard library; this interpreter's by default.")
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option("--start-from", metavar="DIR", help="Go on from an earlier result's weights.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, metavar="N", help="Tokens to train on; the recipe's by default.")
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    quiet_libraries(threads)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT must be a folder, found the file {str(out)!r}")

    from rich.progress import Progress, TimeRemainingColumn

    from outpace.train.tiny import TinyRecipe, train_tiny

    recipe = TinyRecipe() if tokens is None else TinyRecipe(tokens=tokens)
    console = err_console()
    with Progress(*Progress.get_default_columns()[:-1], TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("reading the texts", total=None)

        def show(*, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
            told = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
            bar.update(task, total=steps, completed=step, description=told)

        figures = train_tiny(out, gsm8k=gsm8k, stdlib=stdlib, start_from=start_from, recipe=recipe, progress=show)
    losses = ", ".join(f"{kind} {figures[kind]:.3f}" for kind in ("stdlib", "edits", "copies", "arithmetic"))
    console.print(f"held-out loss (nats a token): {losses}")
    typer.echo(str(out))
