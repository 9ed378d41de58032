from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from outpace import available_drafters
from outpace.cli import app
from outpace.cli.common import ALL_DRAFTERS, USABLE_DRAFTERS, write_json
from outpace.errors import CorpusError


def test_the_drafters_named_in_the_help_are_those_of_the_registry() -> None:
    assert list(ALL_DRAFTERS) == list(available_drafters())
    assert list(USABLE_DRAFTERS) == list(available_drafters(usable_only=True))


def test_only_replay_offers_drafters_that_know_the_output() -> None:
    root: Any = typer.main.get_command(app)
    offered = {
        name: next(p.help for p in command.params if p.name == "drafter")
        for name, command in root.commands.items()
        if name not in ("corpus", "train")  # which generate nothing
    }
    assert {name for name, text in offered.items() if "oracle" in text} == {"replay"}
    assert all("suffix" in text for text in offered.values())


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("place", ["-", "out.json"])
def test_numbers_that_are_not_finite_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    value = {"logprobs": [{"logprob": -math.inf, "top": [(3, np.float64(-1.5)), (4, math.nan)]}], "n": 2, "x": math.inf}
    write_json(place, value)
    text = capsys.readouterr().out if place == "-" else Path(place).read_text()
    found = json.loads(text, parse_constant=refuse)
    assert found == {"logprobs": [{"logprob": None, "top": [[3, -1.5], [4, None]]}], "n": 2, "x": None}


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(None, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["generate", "chat", "check"])
def test_a_corpus_that_cannot_be_used(tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture) -> None:
    """It ends the command, or is left out with a warning."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\n")
    model = ["--model", "outpace-tiny", "--max-tokens", "2", "--drafter", "suffix-tree"]
    arguments = {
        "generate": ["def f(x):"],
        "chat": [],
        "check": ["--prompts", str(prompts), "--against", "none"],
    }[command]
    arguments = [command, *arguments, *model, "--corpus", str(tmp_path / "missing")]
    result = CliRunner().invoke(app, arguments, input="")
    assert isinstance(result.exception, CorpusError), result.output
    result = CliRunner().invoke(app, [*arguments, "--skip-unusable-corpora"], input="")
    assert result.exit_code == 0, result.output
    assert "going on without a corpus: no corpus at" in caplog.text
