from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outpace.cli.replay import register
from outpace.errors import ConfigError, CorpusError, InputError, TraceFormatError, UnknownNameError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return app


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    line = {"prompt_ids": [1, 2, 3, 1], "output_ids": [2, 3, 1, 2, 3], "category": "loop"}
    path.write_text("".join(json.dumps({**line, "id": i}) + "\n" for i in range(3)))
    return path


def test_json_alone_on_standard_output(app: typer.Typer, traces: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(traces), "--drafter", "suffix", "--json", "-"])
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert figures.pop("draft_us_per_step") > 0
    assert figures.pop("reduce_us_per_step") > 0
    assert figures == {
        "drafter": "suffix",
        "mean_accepted_tokens": 4.0,
        "by_category": {"loop": 4.0},
        "nodes_per_step": 3.0,
        "steps": 3,
        "tokens": 12,
        "traces": 3,
        "max_nodes": 64,
        "budget": None,
        "memory": False,
        "corpora": [],
        "memory_us_per_step": 0.0,
        "calibration": None,
    }
    assert "4.000" in result.stderr
    assert "12 tokens in 3 steps" in result.stderr


def test_figures_only_on_standard_error(app: typer.Typer, traces: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(traces), str(traces), "--limit", "4"])
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "4 recorded outputs" in result.stderr


def save_tokenizer(folder: Path, *words: str) -> None:
    """A tokenizer of whole words; 0 stands for any other."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: index for index, word in enumerate(("[UNK]", *words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_json_to_a_file_and_plain_text(app: typer.Typer, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words", "to", "be", "or", "not")
    (tmp_path / "play.txt").write_text("to be or not to be")
    out = tmp_path / "figures.json"
    command = ["replay", str(tmp_path / "play.txt"), "--tokenizer", str(tmp_path / "words"), "--max-nodes", "2"]
    result = CliRunner().invoke(app, [*command, "--json", str(out)])
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert (figures["tokens"], figures["max_nodes"], list(figures["by_category"])) == (4, 2, ["text"])


def test_help_teaches_with_an_example(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["replay", "--help"])
    assert result.exit_code == 0
    assert "outpace replay traces.jsonl --drafter suffix" in result.stdout
    assert "Examples:" in result.stdout


def test_a_category_is_not_read_as_markup(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "output_ids": [2, 3], "category": "[/qa] :smile:"}))
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 0, result.exception
    assert "[/qa] :smile:" in result.stderr


def test_errors_are_typed(app: typer.Typer, traces: Path, tmp_path: Path) -> None:
    def error(*arguments: str) -> BaseException | None:
        return CliRunner().invoke(app, ["replay", *arguments]).exception

    assert isinstance(error(str(traces), "--drafter", "sufix"), UnknownNameError)
    assert isinstance(error(str(tmp_path / "nope.jsonl")), InputError)
    assert isinstance(error(str(traces), "--json", str(tmp_path / "no" / "folder.json")), InputError)
    with traces.open("a") as file:
        file.write("{broken\n")
    broken = error(str(traces))
    assert isinstance(broken, TraceFormatError)
    assert broken.line == 4


def test_options_of_a_run(app: typer.Typer, traces: Path) -> None:
    options = ["-d", "suffix", "--memory", "--max-nodes", "5", "--budget", "2.5", "--json", "-"]
    result = CliRunner().invoke(app, ["replay", str(traces), *options])
    assert result.exit_code == 0, result.exception
    figures = json.loads(result.stdout)
    assert (figures["memory"], figures["max_nodes"], figures["budget"]) == (True, 5, 2.5)
    assert figures["nodes_per_step"] <= 2.5
    assert figures["memory_us_per_step"] > 0
    assert "into the memory" in result.stderr
    assert isinstance(CliRunner().invoke(app, ["replay", str(traces), "--budget", "-1"]).exception, ConfigError)


def test_calibration_in_the_terminal(app: typer.Typer, traces: Path) -> None:
    for arguments in ([str(traces), "--calibration"], ["--calibration", str(traces)], [str(traces), "--calibration="]):
        result = CliRunner().invoke(app, ["replay", *arguments, "--json", "-"])
        assert result.exit_code == 0, result.exception
        assert "dynamic, raw" in result.stderr
        assert "expected calibration error" in result.stderr
        everything = json.loads(result.stdout)["calibration"][0]
        assert everything["origins"] == "all"
        assert everything["raw"]["nodes"] == 9
        assert set(everything["raw"]["buckets"][0]) == {"low", "high", "nodes", "estimated", "observed"}
    result = CliRunner().invoke(app, ["replay", str(traces), "-d", "none", "--calibration"])
    assert "no drafted node was judged" in result.stderr


@pytest.mark.parametrize("name", ["diagram.svg", "diagram.png"])
def test_calibration_drawn(app: typer.Typer, traces: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    result = CliRunner().invoke(app, ["replay", "--calibration", str(path), str(traces)])
    assert result.exit_code == 0, result.exception
    first = path.read_bytes()
    assert first[:5] in (b"<?xml", b"\x89PNG\r")
    assert "dynamic" in first.decode("latin-1") or name.endswith(".png")
    assert CliRunner().invoke(app, ["replay", "--calibration", str(path), str(traces)]).exit_code == 0
    assert path.read_bytes() == first
    missing = CliRunner().invoke(app, ["replay", str(traces), "--calibration", str(tmp_path / "no" / name)])
    assert isinstance(missing.exception, InputError)


def test_a_plot_needs_matplotlib(app: typer.Typer, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["replay", str(traces), "--calibration", "diagram.svg"])
    assert isinstance(result.exception, ConfigError)
    assert "outpace[plots]" in str(result.exception)
    assert CliRunner().invoke(app, ["replay", str(traces), "--calibration"]).exit_code == 0


def test_drafters_that_need_a_model_draft_nothing_and_it_is_said(app: typer.Typer, traces: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(traces), "-d", "recycling"])
    assert result.exit_code == 0, result.exception
    assert "no model runs" in result.stderr
    assert "no model runs" not in CliRunner().invoke(app, ["replay", str(traces)]).stderr


def test_a_corpus_feeds_the_drafter(app: typer.Typer, tmp_path: Path) -> None:
    from outpace.corpora.build import BuildOptions, build_corpus

    save_tokenizer(tmp_path / "words", "to", "be", "or", "not", "that", "is", "the", "question")
    save_tokenizer(tmp_path / "others", "question", "the", "is", "that")
    (tmp_path / "play.txt").write_text("to be or not to be that is the question")
    corpus = tmp_path / "corpus"
    build_corpus(corpus, [tmp_path / "play.txt"], BuildOptions(str(tmp_path / "words")))
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt_ids": [9, 9], "output_ids": [3, 4, 1, 2, 5, 6, 7, 8]}))
    command = ["replay", str(tmp_path / "t.jsonl"), "-d", "sam(l_bias=0)", "--json", "-"]

    def figures(*more: str) -> tuple[float, str]:
        result = CliRunner().invoke(app, [*command, *more])
        assert result.exit_code == 0, result.exception
        return json.loads(result.stdout)["mean_accepted_tokens"], result.stderr

    alone, _ = figures()
    fed, said = figures("--corpus", str(corpus))
    assert (alone, fed) == (1.0, 7.0)
    assert said.count("nothing says which tokenizer") == 1
    _, said = figures("--corpus", str(corpus), "--tokenizer", str(tmp_path / "words"))
    assert "nothing says" not in said
    refused = CliRunner().invoke(app, [*command, "--corpus", str(corpus), "--tokenizer", str(tmp_path / "others")])
    assert isinstance(refused.exception, CorpusError)
    assert "words" in str(refused.exception)
    assert "others" in str(refused.exception)
    missing = CliRunner().invoke(app, [*command, "--corpus", str(tmp_path / "nowhere")])
    assert isinstance(missing.exception, CorpusError)
