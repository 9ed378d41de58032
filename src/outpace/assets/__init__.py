"""The model in the box: its name, and where it lies.

The name is exact and is looked up before anything else, so the default model does not depend on the folder in which a
command is run. A checkpoint of yours that has the same name is reached as a path: ``./outpace-tiny``.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from outpace.errors import CheckpointError

BUILTIN_MODEL = "outpace-tiny"


def is_builtin(name: object) -> bool:
    """Whether a model's name means the model in the box; a path object never does."""
    return isinstance(name, str) and name == BUILTIN_MODEL


def builtin_folder() -> Path:
    """The folder of the model in the box, with its weights, tokenizer and held-out prompts.

    Raises:
        CheckpointError: This installation came without it.
    """
    folder = Path(str(files(__name__))) / BUILTIN_MODEL
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the model in the box is not in this installation: {str(folder)!r} has no config.json; install Outpace again, "
            "or give another model (--model)"
        )
    return folder
