"""What several commands share: options, quiet loading, JSON output.

The engine, and torch with it, is imported where it is used: help and usage errors must not wait for it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.assets import BUILTIN_MODEL
from outpace.errors import ConfigError, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from outpace.engine import Engine

# What `available_drafters` says, which would import the drafters.
USABLE_DRAFTERS = ("llma", "lookup", "merge", "none", "recycling", "sam", "suffix", "suffix-tree")
ALL_DRAFTERS = ("llma", "lookup", "merge", "none", "oracle", "recycling", "sam", "suffix", "suffix-tree")

DEFAULT_MODEL = BUILTIN_MODEL

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="M",
        help=f"Folder of a checkpoint, a Hugging Face hub id, or {BUILTIN_MODEL}: the model in the box (a folder of yours "
        f"by that name is ./{BUILTIN_MODEL}).",
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option("--drafter", "-d", metavar="D", help=f"One of {', '.join(USABLE_DRAFTERS)}; options in parentheses."),
]
ReplayDrafterOption = Annotated[
    str,
    typer.Option("--drafter", "-d", metavar="D", help=f"One of {', '.join(ALL_DRAFTERS)}; options in parentheses."),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, float16, float64, or auto: as the checkpoint was saved.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N; auto takes a GPU if there is one.")]
AdapterOption = Annotated[
    str | None, typer.Option("--adapter", metavar="A", help="PEFT adapter to put on the model (folder or hub id).")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run modeling code that comes with the checkpoint.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads; torch's own choice by default.")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write results as JSON; - is standard output.")
]
MaxNodesOption = Annotated[
    int, typer.Option("--max-nodes", min=0, metavar="N", help="Verify at most N draft nodes of a sequence in a step.")
]
CompileOption = Annotated[
    bool,
    typer.Option("--compile", help="Run the model through torch.compile; uncompiled, with a warning, if that fails."),
]

MemoryOption = Annotated[
    bool,
    typer.Option("--memory/--no-memory", help="Draft from earlier responses of this run (drafters sam, suffix-tree)."),
]
CorpusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus", metavar="DIR", help="Draft from this corpus (outpace corpus build), too; may be repeated."
    ),
]
SkipCorporaOption = Annotated[
    bool,
    typer.Option(
        "--skip-unusable-corpora",
        help="Go on, with a warning, without a --corpus that is missing, damaged or of another tokenizer.",
    ),
]


def err_console() -> Console:
    """A console on standard error, for figures and progress.

    What is printed is shown as it is: paths, stop strings and categories may look like markup.
    """
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def load_options(dtype: str, device: str, adapter: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Loading options as `Engine` takes them, checked before anything slow happens."""
    from outpace.model import LoadOptions

    values: dict[str, Any] = {
        "dtype": dtype, "device": device, "adapter": adapter, "trust_remote_code": trust_remote_code
    }  # fmt: skip
    LoadOptions(**values)
    return values


def load_engine(console: Console, model: str, threads: int | None, **options: Any) -> Engine:
    """Make an engine, with nothing on the terminal but that it is loading.

    Args:
        console: Where to say so.
        model: Folder or hub id.
        threads: As `quiet_libraries` takes it.
        options: As `Engine` takes them.
    """
    from rich.text import Text

    from outpace.engine import Engine

    quiet_libraries(threads)
    with console.status(Text(f"loading {model}")):  # a string would be read as markup
        return Engine(model, **options)


def check_chat_template(engine: Engine) -> None:
    """See that ``--chat`` can work.

    Raises:
        ConfigError: The model's tokenizer has no chat template, or there is no tokenizer.
    """
    if getattr(engine.tokenizer, "chat_template", None) is None:
        raise ConfigError("the model's tokenizer has no chat template; leave out --chat and --system")


def quiet_libraries(threads: int | None) -> None:
    """Keep Transformers' progress bars and advice off the terminal, and set torch's threads."""
    import torch
    import transformers

    logs: Any = transformers.logging  # untyped
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    for name in ("torch", "huggingface_hub"):  # the hub's client would tell of every retry
        logging.getLogger(name).setLevel(logging.ERROR)
    if threads is not None:
        torch.set_num_threads(threads)


def check_writable(path: str | None) -> None:
    """Refuse a path that `write_json` could not write, before any work is done for it.

    Raises:
        InputError: Its folder does not exist, or it is a folder itself.
    """
    if path is None or path == "-":
        return
    target = Path(path)
    problem = None
    if target.is_dir():
        problem = "it is a folder"
    elif not target.parent.is_dir():
        problem = f"there is no folder {str(target.parent)!r}"
    elif not os.access(target if target.exists() else target.parent, os.W_OK):
        problem = "permission denied"
    if problem is not None:
        raise InputError(f"cannot write {path}: {problem}")


def write_json(path: str | None, value: Any) -> None:
    """Write JSON to a file, to standard output if ``path`` is ``-``, or nowhere if it is None.

    JSON has no infinities: a number that is not finite (the log-probability of an impossible token) is written as null.

    Raises:
        InputError: The file cannot be written.
    """
    if path is None:
        return
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _finite(value: Any) -> Any:
    """``value`` with None in place of numbers that are not finite, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
