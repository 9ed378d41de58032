"""The texts that `outpace-tiny` is trained on, and the fixed part that is held out of training.

Two sources: the Python standard library of the running interpreter, and GSM8K's training questions (MIT) as one
JSON object a line with `question` and `answer`. What is held out depends only on a document's name, never on
chance: one standard-library file in twenty by its path, one GSM8K question in twenty by its text.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import InputError

HELD_OUT_ONE_IN = 20
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_SKIPPED_FOLDERS = {"site-packages", "__pycache__", "pydoc_data"}
_LARGEST_FILE = 300_000  # characters; larger files are tables of data
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the standard library.

    Attributes:
        name: Path below the library's folder, with forward slashes.
        text: The whole text.
        is_test: Whether the file belongs to a test suite.
    """

    name: str
    text: str
    is_test: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """One GSM8K question with its worked answer, without the calculator's annotations."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One function or class cut out of a source file, dedented.

    Attributes:
        source: Name of the file.
        name: Name of the function or class.
        code: Its text, without a trailing newline.
    """

    source: str
    name: str
    code: str


def is_held_out(key: str) -> bool:
    """Whether the document called `key` is kept out of training (about one in `HELD_OUT_ONE_IN`)."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def read_stdlib(folder: Path | None = None) -> list[SourceFile]:
    """Read the Python files of the standard library, sorted by name.

    Args:
        folder: The library's folder; the running interpreter's own when None.

    Raises:
        InputError: The folder holds no Python file.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED_FOLDERS.intersection(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files are badly encoded on purpose
        if len(text) <= _LARGEST_FILE and text.strip():
            files.append(SourceFile("/".join(parts), text, bool(_TEST_FOLDERS.intersection(parts))))
    if not files:
        raise InputError(f"{root} holds no Python file")
    return files


def read_gsm8k(path: Path) -> list[Problem]:
    """Read GSM8K questions from a JSON-lines file, or from the one in a folder whose name says that it is for training.

    Raises:
        InputError: The file is missing, a folder holds none or several, or a line is not an object with `question` and
            `answer`.
    """
    if path.is_dir():
        found = sorted(path.glob("*train*.jsonl"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise InputError(
                f"{path}: expected one file *train*.jsonl of GSM8K's questions, found {names}; name the file"
            )
        path = found[0]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read GSM8K's questions: {error}") from error
    problems = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            answer = _CALCULATOR_NOTE.sub("", row["answer"])
            problems.append(Problem(row["question"].strip(), answer.strip()))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}:{number}: not a GSM8K question ({error!r})") from error
    return problems


def code_blocks(file: SourceFile, *, shortest: int = 80, longest: int = 1400) -> list[CodeBlock]:
    """Cut the functions, methods and small classes out of a file.

    Args:
        file: The file.
        shortest: Least length of a block, in characters.
        longest: Greatest length.
    """
    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return []
    lines = file.text.splitlines()
    blocks = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.end_lineno is None or "\t" in lines[node.lineno - 1]:
            continue
        indent = node.col_offset
        cut = lines[node.lineno - 1 : node.end_lineno]
        if any(line[:indent].strip() for line in cut):
            continue  # a string or comment that starts left of the block
        code = "\n".join(line[indent:].rstrip() for line in cut)
        if shortest <= len(code) <= longest:
            blocks.append(CodeBlock(file.name, node.name, code))
    return blocks
