"""The held-out prompts that come with `outpace-tiny`: what `outpace demo` shows and the benchmarks measure.

All are made from the part of the sources that training never saw, and by a fixed rule, so that nobody picked them for
their figures. Four kinds:

* ``completion``: a piece of a source file up to the end of a function's docstring; raw text.
* ``editing``: an editing task as in training, on code from a held-out file; a message.
* ``arithmetic``: a GSM8K question; a message.
* ``varied``: a list of words that do not repeat; raw text. Drafts have nothing to find there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from outpace.train.corpus import SourceFile, code_blocks
from outpace.train.edits import make_edit
from outpace.train.texts import TrainingTexts

COUNTS = {"completion": 18, "editing": 24, "arithmetic": 18, "varied": 12}
_LINES_BEFORE = 24
_WORD = re.compile(r"\b[a-z]{4,12}\b")


def held_out_prompts(texts: TrainingTexts, seed: int = 0) -> list[dict[str, Any]]:
    """Make the prompts.

    Args:
        texts: Both sources, split.
        seed: Of the order in which held-out documents are gone through.

    Returns:
        Objects with ``id``, ``kind``, ``source`` and either ``prompt`` (raw text) or ``messages``.
    """
    random = Random(seed)
    files = [file for file in texts.held_out_files if not file.is_test and not file.name.startswith("encodings/")]
    random.shuffle(files)
    makers = {
        "completion": _completions(files),
        "editing": _editing(files, random),
        "arithmetic": _arithmetic(texts, random),
        "varied": _varied(files, random),
    }
    prompts = []
    for kind, count in COUNTS.items():
        for number in range(count):
            made = next(makers[kind], None)
            if made is None:
                break
            prompts.append({"id": f"{kind}-{number:02d}", "kind": kind, **made})
    return prompts


def write_prompts(prompts: list[dict[str, Any]], path: Path) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts), encoding="utf-8")


def _completions(files: list[SourceFile]) -> Iterator[dict[str, Any]]:
    """From each file in turn the first function with a docstring and a body worth completing; then each file's next."""
    found = [_cuts(file) for file in files]
    while found:
        for cuts in list(found):
            made = next(cuts, None)
            if made is None:
                found.remove(cuts)
            else:
                yield made


def _cuts(file: SourceFile) -> Iterator[dict[str, Any]]:
    try:
        tree = ast.parse(file.text)
    except SyntaxError:
        return
    lines = file.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or node.end_lineno is None:
            continue
        after = node.body[0].end_lineno or node.lineno
        if node.end_lineno - after < 6:
            continue
        text = "\n".join(lines[max(0, node.lineno - 1 - _LINES_BEFORE) : after]) + "\n"
        if 400 <= len(text) <= 1600:
            yield {"prompt": text, "source": f"{file.name}:{node.name}"}


def _editing(files: list[SourceFile], random: Random) -> Iterator[dict[str, Any]]:
    blocks = [block for file in files for block in code_blocks(file, shortest=300, longest=1000)]
    random.shuffle(blocks)
    seen: set[str] = set()
    for block in blocks:
        edit = make_edit(block, random)
        if edit is None or edit.before == edit.after or block.source in seen:
            continue
        seen.add(block.source)
        yield {"messages": [{"role": "user", "content": edit.prompt}], "source": f"{block.source}:{block.name}"}


def _arithmetic(texts: TrainingTexts, random: Random) -> Iterator[dict[str, Any]]:
    problems = [problem for problem in texts.held_out_problems if len(problem.question) <= 280]
    random.shuffle(problems)
    for problem in problems:
        yield {"messages": [{"role": "user", "content": problem.question}], "source": "GSM8K"}


def _varied(files: list[SourceFile], random: Random) -> Iterator[dict[str, Any]]:
    words = sorted({word for file in files for word in _WORD.findall(file.text)})
    random.shuffle(words)
    for begin in range(0, len(words) - 48, 48):
        yield {"prompt": "words: " + ", ".join(words[begin : begin + 48]) + ", ", "source": "standard library"}
