"""The command ``outpace``: one file a command."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer

from outpace._version import __version__
from outpace.cli import chat, check, corpus, demo, generate, replay, train
from outpace.errors import OutpaceError

_HELP = """Lossless speculative decoding for any Hugging Face causal language model.

The model's own tokens, sooner. To begin with: `outpace demo`, which needs nothing but this installation; then
`outpace generate "Once upon a time" --model PATH-OR-HUB-ID`, and `outpace check --help` to convince yourself that
nothing but the speed has changed.

Anything that cannot work ends with one line on standard error and exit status 2.
"""

app = typer.Typer(
    name="outpace",
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (works anywhere on the line).")] = False,
) -> None:
    pass


# The root of click's errors: of click itself, or of the copy of it that newer versions of typer carry.
_ClickError: Any = typer.BadParameter.__mro__[2]

for _command in (demo, generate, chat, check, replay, corpus, train):
    _command.register(app)


def main(argv: list[str] | None = None) -> None:
    """Entry point; turns errors into one line and an exit status.

    Args:
        argv: Arguments; those of the process by default.
    """
    arguments, debug = _take_debug(sys.argv[1:] if argv is None else argv)
    try:
        status = app(args=arguments, prog_name="outpace", standalone_mode=False)
    except _ClickError as error:
        message = error.format_message()
        if type(error).__name__ != "NoArgsIsHelpError":
            _report(error, message, debug)
        elif message.strip():
            print(message)  # the help, unless it was printed already
        sys.exit(2)
    except OutpaceError as error:
        _report(error, str(error), debug)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        print("outpace: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    if status:
        sys.exit(status)


def _report(error: Exception, message: str, debug: bool) -> None:
    """One line on standard error, or the traceback."""
    if debug:
        traceback.print_exception(error)
    else:
        print(f"outpace: {' '.join(message.split())}", file=sys.stderr)


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Arguments without ``--debug``, which may stand anywhere before ``--``, and whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end
