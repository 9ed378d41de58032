"""Prompts with a kind: those held out of the training of the model in the box, or a file of the same form.

Each line is a JSON object with ``prompt`` (text) or ``messages`` (a conversation), and where they are known ``id``,
``kind`` and ``source``::

    {"id": "editing-03", "kind": "editing", "messages": [{"role": "user", "content": "..."}], "source": "json/encoder.py"}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.assets import builtin_folder
from outpace.bench.prompts import read_prompts
from outpace.engine import Prompt

OTHER = "other"  # the kind of a prompt that names none


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One prompt.

    Attributes:
        id: Its name in tables and files; no two have the same.
        kind: ``completion``, ``editing``, ``arithmetic``, ``varied``, or whatever the file says.
        prompt: Text, messages or token ids, as the engine takes them.
        source: Where its text comes from; empty if the file does not say.
    """

    id: str
    kind: str
    prompt: Prompt
    source: str = ""

    @property
    def text(self) -> str:
        """What the user says: the text, or the last message; empty for token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        last: Any = self.prompt[-1] if len(self.prompt) else ""
        return str(last.get("content", "")) if isinstance(last, dict) else ""


def read_held_out(path: str | Path | None = None) -> list[HeldOut]:
    """Read such a file; those of the model in the box by default.

    Raises:
        CheckpointError: The model in the box is not in this installation.
        InputError: The file cannot be read, or holds no prompt.
        TraceFormatError: A line is broken; file and line are named.
    """
    path = builtin_folder() / "prompts.jsonl" if path is None else Path(path)
    prompts = read_prompts(path)
    records: list[dict[str, Any]] = [{}] * len(prompts)
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):  # well-formed, since `read_prompts` has read them
        records = [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
    found: dict[str, HeldOut] = {}
    for index, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        name = str(record.get("id", f"prompt-{index}"))
        name = name if name not in found else f"{name}-{index}"
        found[name] = HeldOut(name, str(record.get("kind", OTHER)), prompt, str(record.get("source", "")))
    return list(found.values())


def first_of_each_kind(prompts: SequenceOf[HeldOut], count: int) -> list[HeldOut]:
    """The first ``count`` prompts of each kind, in the file's order."""
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.kind] += 1
        if seen[prompt.kind] <= count:
            kept.append(prompt)
    return kept
