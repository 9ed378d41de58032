"""Code-editing tasks made from real functions: an instruction with the code, and the code after the edit.

Each maker takes a block and a random generator and gives `(instruction, edited code)`, or None where the edit does
not apply. The edits are mechanical, so that the right answer is known.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from outpace.train.corpus import CodeBlock

_NAME = re.compile(r"(?<![\w.'\"])[a-z_][a-z0-9_]{2,}(?![\w'\"])")
_NUMBER = re.compile(r"(?<![\w.])\d{1,4}(?![\w.])")
_STRING = re.compile(r"'([a-zA-Z_ ]{3,20})'|\"([a-zA-Z_ ]{3,20})\"")
_COMMENT = re.compile(r"^\s*#.*$")
_NEW_NAMES = [
    "value",
    "result",
    "item",
    "data",
    "name",
    "text",
    "count",
    "index",
    "total",
    "buffer",
    "node",
    "entry",
    "record",
    "key",
    "source",
    "target",
    "path",
    "line",
    "current",
    "previous",
    "first",
    "last",
    "size",
    "limit",
    "start",
    "stop",
    "offset",
    "field",
    "group",
    "match",
    "token",
    "parser",
    "writer",
    "reader",
    "handle",
    "message",
    "options",
    "config",
    "settings",
    "params",
    "state",
    "status",
    "flag",
    "mode",
    "kind",
    "label",
    "title",
    "content",
    "body",
    "header",
    "chunk",
    "block",
    "items",
    "values",
    "names",
    "lines",
    "tokens",
    "nodes",
    "entries",
    "fields",
    "groups",
    "parts",
    "pieces",
    "rows",
    "columns",
    "width",
    "height",
    "depth",
    "level",
    "left",
    "right",
    "parent",
    "child",
    "root",
    "leaf",
    "queue",
    "stack",
    "table",
    "cache",
    "store",
    "pool",
    "client",
    "server",
    "request",
    "response",
    "session",
]
_RENAME_WORDINGS = (
    "Rename `{0}` to `{1}`.",
    "Rename the name `{0}` to `{1}` in this code.",
    "Call `{0}` `{1}` instead.",
)


@dataclass(frozen=True, slots=True)
class Edit:
    """One editing task.

    Attributes:
        instruction: What to change, in one sentence.
        before, after: The code before and after.
    """

    instruction: str
    before: str
    after: str

    @property
    def prompt(self) -> str:
        """The user's message: the instruction, then the code in a fence."""
        return f"{self.instruction}\n\n```python\n{self.before}\n```"

    @property
    def answer(self) -> str:
        """The assistant's message: the edited code in a fence."""
        return f"```python\n{self.after}\n```"


def _rename(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    names = Counter(name for name in _NAME.findall(block.code) if not keyword.iskeyword(name))
    often = sorted(name for name, count in names.items() if 2 <= count <= 12 and name != "self")
    fresh = [name for name in _NEW_NAMES if not re.search(rf"\b{name}\b", block.code)]
    if not often or not fresh:
        return None
    old, new = random.choice(often), random.choice(fresh)
    if random.random() < 0.3:
        new = f"{new}_{random.choice(_NEW_NAMES)}"
    wording = random.choice(_RENAME_WORDINGS)
    return wording.format(old, new), re.sub(rf"\b{re.escape(old)}\b", new, block.code)


def _rename_definition(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    if block.name.startswith("__"):
        return None
    new = f"{random.choice(('make', 'get', 'do', 'find', 'run', 'new', 'check'))}_{random.choice(_NEW_NAMES)}"
    what = "class" if block.code.startswith("class ") else "function"
    return f"Rename the {what} `{block.name}` to `{new}`.", re.sub(rf"\b{re.escape(block.name)}\b", new, block.code)


def _change_number(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    numbers = sorted(set(_NUMBER.findall(block.code)))
    if not numbers:
        return None
    old, new = random.choice(numbers), str(random.choice((0, 1, 2, 3, 5, 8, 10, 16, 20, 32, 64, 100, 256)))
    if old == new:
        return None
    return f"Replace the number {old} by {new}.", re.sub(rf"(?<![\w.]){old}(?![\w.])", new, block.code)


def _change_string(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    strings = sorted({a or b for a, b in _STRING.findall(block.code)})
    if not strings:
        return None
    old, new = random.choice(strings), random.choice(_NEW_NAMES)
    changed = block.code.replace(f"'{old}'", f"'{new}'").replace(f'"{old}"', f'"{new}"')
    return f"Replace the string '{old}' by '{new}'.", changed


def _docstring_lines(code: str) -> tuple[int, int] | None:
    """First and last line (0-based, inclusive) of the block's own docstring."""
    try:
        node = ast.parse(code).body[0]
    except SyntaxError:
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or len(node.body) < 2:
        return None
    first = node.body[0]
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return None
    return first.lineno - 1, (first.end_lineno or first.lineno) - 1


def _remove_docstring(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    span = _docstring_lines(block.code)
    if span is None:
        return None
    lines = block.code.split("\n")
    rest = lines[: span[0]] + lines[span[1] + 1 :]
    while len(rest) > span[0] and not rest[span[0]].strip():
        del rest[span[0]]
    return random.choice(("Remove the docstring.", "Delete the docstring of this code.")), "\n".join(rest)


def _remove_comments(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    lines = block.code.split("\n")
    kept = [line for line in lines if not _COMMENT.match(line)]
    if len(kept) == len(lines):
        return None
    return random.choice(("Remove the comments.", "Delete all comment lines.")), "\n".join(kept)


def _add_print(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    try:
        node = ast.parse(block.code).body[0]
    except SyntaxError:
        return None
    if not isinstance(node, ast.FunctionDef) or node.body[0].lineno == node.lineno:
        return None
    span = _docstring_lines(block.code)
    at = span[1] + 1 if span else node.body[0].lineno - 1
    lines = block.code.split("\n")
    while at < len(lines) and (not lines[at].strip() or _COMMENT.match(lines[at])):
        at += 1
    if at >= len(lines):
        return None
    indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
    word = random.choice(("start", "enter", "begin", block.name))
    statement = f"print('{word}')"
    return f"Add `{statement}` at the start of the function.", "\n".join([*lines[:at], indent + statement, *lines[at:]])


def _repeat(block: CodeBlock, random: Random) -> tuple[str, str] | None:
    return random.choice(("Repeat this code.", "Copy this code without changes.")), block.code


_MAKERS: tuple[tuple[Callable[[CodeBlock, Random], tuple[str, str] | None], float], ...] = (
    (_rename, 0.40),
    (_rename_definition, 0.12),
    (_change_number, 0.08),
    (_change_string, 0.10),
    (_remove_docstring, 0.10),
    (_remove_comments, 0.05),
    (_add_print, 0.10),
    (_repeat, 0.05),
)


def make_edit(block: CodeBlock, random: Random) -> Edit | None:
    """Make one editing task from a block, or None where the drawn kind of edit does not apply to it."""
    maker = random.choices([maker for maker, _ in _MAKERS], [weight for _, weight in _MAKERS])[0]
    made = maker(block, random)
    if made is None:
        return None
    instruction, after = made
    if after.strip() == "" or (after == block.code and maker is not _repeat):
        return None
    return Edit(instruction, block.code, after)
