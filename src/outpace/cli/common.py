"""What several commands share: options, quiet loading, JSON output."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console

from outpace.draft import available_drafters
from outpace.errors import InputError
from outpace.model import LoadOptions

ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="M", help="Folder of a checkpoint, or a Hugging Face hub id.")
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter", "-d", metavar="D", help=f"One of {', '.join(available_drafters())}; options in parentheses."
    ),
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


def err_console() -> Console:
    """A console on standard error, for figures and progress."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def load_options(dtype: str, device: str, adapter: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Loading options as `Engine` takes them, checked before anything slow happens."""
    values: dict[str, Any] = {
        "dtype": dtype, "device": device, "adapter": adapter, "trust_remote_code": trust_remote_code
    }  # fmt: skip
    LoadOptions(**values)
    return values


def quiet_libraries(threads: int | None) -> None:
    """Keep Transformers' progress bars and advice off the terminal, and set torch's threads."""
    logs: Any = transformers.logging  # untyped
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)
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


def write_json(path: str, value: Any) -> None:
    """Write JSON to a file, or to standard output if ``path`` is ``-``.

    Raises:
        InputError: The file cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
