"""The documents of `outpace-tiny`'s training: files, editing tasks and worked arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from random import Random

from outpace.errors import InputError
from outpace.train.corpus import CodeBlock, SourceFile, code_blocks, is_held_out, read_gsm8k, read_stdlib
from outpace.train.edits import make_edit
from outpace.train.tokenizer import chat_text

_WORD = re.compile(r"[A-Za-z_]{3,}")


class TrainingTexts:
    """The two sources, split, and an endless shuffled stream of documents of each kind.

    Args:
        gsm8k: GSM8K's training questions, JSON lines.
        stdlib: Folder of the Python standard library; the running interpreter's own when None.
        test_weight: How often a test file of the library is drawn, compared with another file.

    Raises:
        InputError: A source is missing or malformed.
    """

    def __init__(self, gsm8k: Path, stdlib: Path | None = None, *, test_weight: float = 1.0) -> None:
        files, problems = read_stdlib(stdlib), read_gsm8k(gsm8k)
        self.files = [file for file in files if not is_held_out(file.name)]
        self.held_out_files = [file for file in files if is_held_out(file.name)]
        self.problems = [problem for problem in problems if not is_held_out(problem.question)]
        self.held_out_problems = [problem for problem in problems if is_held_out(problem.question)]
        self._test_weight = test_weight

    def for_tokenizer(self) -> Iterator[str]:
        """Training documents that the tokenizer is trained on: the library without its tests, and the problems."""
        yield from (file.text for file in self.files if not file.is_test)
        yield from (f"{problem.question}\n{problem.answer}" for problem in self.problems)

    def stdlib(self, random: Random, *, held_out: bool = False) -> Iterator[str]:
        """Whole files, endlessly."""
        files = self.held_out_files if held_out else self.files
        while True:
            drawn = [file for file in files if not file.is_test or random.random() < self._test_weight]
            random.shuffle(drawn)
            for file in drawn:
                yield file.text

    def arithmetic(self, random: Random, *, held_out: bool = False) -> Iterator[str]:
        """Questions with their worked answers as conversations, endlessly."""
        problems = list(self.held_out_problems if held_out else self.problems)
        while True:
            random.shuffle(problems)
            for problem in problems:
                yield chat_text(problem.question, problem.answer)

    def copies(self, random: Random, *, held_out: bool = False) -> Iterator[str]:
        """Lists of words to be repeated, endlessly: only copying predicts the answer, so that it is learned soon."""
        files = self.held_out_files if held_out else self.files
        words = sorted({word for file in files if not file.is_test for word in _WORD.findall(file.text)})
        while True:
            text = random.choice((" ", ", ", "\n")).join(random.choices(words, k=random.randint(8, 64)))
            yield chat_text(f"{random.choice(('Repeat this.', 'Copy this.'))}\n\n{text}", text)

    def edits(self, random: Random, *, held_out: bool = False) -> Iterator[str]:
        """Editing tasks as conversations, endlessly; each block is edited in another way when it comes again."""
        blocks = _blocks(self.held_out_files if held_out else self.files)
        if not blocks:
            raise InputError("the standard library's folder holds no function to make editing tasks from")
        while True:
            random.shuffle(blocks)
            for block in blocks:
                edit = make_edit(block, random)
                if edit is not None:
                    yield chat_text(edit.prompt, edit.answer)


def _blocks(files: SequenceOf[SourceFile]) -> list[CodeBlock]:
    return [block for file in files for block in code_blocks(file)]
