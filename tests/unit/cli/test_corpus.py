from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from datafiles import data_path
from outpace import cli
from outpace.cli.corpus import register
from outpace.corpora import build
from outpace.errors import ConfigError, CorpusError, InputError, OutpaceError
from outpace.suffix.corpus import MANIFEST, Corpus

TEXTS = ("import os\nimport numpy as np\n", "import numpy as np\nx = np.zeros(3)\n", "import sys\n")


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return app


@pytest.fixture(scope="module")
def corpus(app: typer.Typer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = folder / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = folder / "out"
    result = CliRunner().invoke(
        app, ["corpus", "build", str(out), "-t", "outpace-tiny", "--memory", "50MB", str(lines)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert result.stdout == f"{out}\n"
    assert "3 documents, " in result.stderr
    assert "tokens in 1 shard: " in result.stderr
    return out


def test_info(app: typer.Typer, corpus: Path) -> None:
    result = CliRunner().invoke(app, ["corpus", "info", str(corpus)])
    manifest = Corpus.open(corpus).manifest
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert lines["documents"] == "3"
    assert lines["tokens"].startswith(f"{manifest.tokens} ")
    assert "outpace-tiny" in lines["tokenizer"]
    assert lines["inputs"].endswith("in.jsonl")


def test_info_as_json(app: typer.Typer, corpus: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["corpus", "info", str(corpus), "--json", "-"])
    assert json.loads(result.stdout) == json.loads((corpus / MANIFEST).read_text())
    result = CliRunner().invoke(app, ["corpus", "info", str(corpus), "--json", str(tmp_path / "x.json")])
    assert "documents" in result.stdout
    assert json.loads((tmp_path / "x.json").read_text())["documents"] == 3


def test_verify(app: typer.Typer, corpus: Path) -> None:
    result = CliRunner().invoke(app, ["corpus", "verify", str(corpus)])
    assert result.exit_code == 0
    assert result.stdout.startswith("sound: 1 shard(s), ")
    path = corpus / "shard-00000.frozen"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        result = CliRunner().invoke(app, ["corpus", "verify", str(corpus)])
    finally:
        path.write_bytes(content)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{path} is damaged: its SHA-256")


def test_verification_decides_the_exit_status_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["corpus", "verify", str(tmp_path)])
    assert "is no corpus" in capsys.readouterr().out


def test_try_a_text(app: typer.Typer, corpus: Path) -> None:
    result = CliRunner().invoke(app, ["corpus", "try", str(corpus), "♜import"])
    told = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert told["match"].endswith("tokens, occurs 4 times: 'import'")
    assert "document" in told["stands"]
    assert "in.jsonl, its document" in told["stands"]
    result = CliRunner().invoke(app, ["corpus", "try", str(corpus), "\nimport numpy as np"])
    told = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert "occurs once" in told["match"]
    assert "in document 0 " in told["stands"]
    assert told["around"].startswith("'import os'")
    assert told["draft"] == r"'\n'"
    assert told["next"] == r"'\n' 1"


def test_try_what_is_typed(app: typer.Typer, corpus: Path) -> None:
    result = CliRunner().invoke(app, ["corpus", "try", str(corpus)], input="import sys\n\n♜\n")
    assert result.stdout.count("match") == 2
    assert "document 2" in result.stdout
    assert "no match: not even the last token occurs" in result.stdout
    result = CliRunner().invoke(app, ["corpus", "try", str(corpus), ""])
    assert "the text holds no token" in result.stdout


def test_try_what_is_no_text(app: typer.Typer, corpus: Path) -> None:
    error = failed(app, "try", str(corpus), "import \udcff")
    assert isinstance(error, InputError)
    assert str(error) == "the text is not UTF-8: byte 0xff at character 7"
    error = failed(app, "try", str(corpus), "\ud800")
    assert r"half a character (\ud800)" in str(error)
    result = CliRunner().invoke(app, ["corpus", "try", str(corpus)], input=b"import \xff\n")
    assert isinstance(result.exception, InputError), result.output
    assert "not UTF-8" in str(result.exception)


def test_the_end_of_a_document(app: typer.Typer, corpus: Path) -> None:
    result = CliRunner().invoke(app, ["corpus", "try", str(corpus), "import sys\n"])
    assert "draft   nothing: the document ends here" in result.stdout
    assert "next    nothing: every occurrence ends its document" in result.stdout


def failed(app: typer.Typer, *arguments: str) -> BaseException:
    result = CliRunner().invoke(app, ["corpus", *arguments])
    assert isinstance(result.exception, OutpaceError), result.output
    return result.exception


def test_bad_input(app: typer.Typer, corpus: Path, tmp_path: Path) -> None:
    out, lines = str(tmp_path / "out"), str(corpus.parent / "in.jsonl")
    error = failed(app, "build", out, "-t", str(tmp_path / "no.model"), lines)
    assert isinstance(error, ConfigError)
    assert "cannot load tokenizer" in str(error)
    error = failed(app, "build", out, "-t", "outpace-tiny", "--memory", "much", lines)
    assert "expected a size" in str(error)
    error = failed(app, "build", out, "-t", "outpace-tiny", "--memory", "50MB", "--field", "body", lines)
    assert isinstance(error, InputError)
    assert "in.jsonl:1: expected a field 'body', found text" in str(error)
    error = failed(app, "build", out, "-t", "outpace-tiny", "--field", "a,,b", lines)
    assert "expected names of fields" in str(error)
    error = failed(app, "build", str(corpus), "-t", "outpace-tiny", "--memory", "50MB", lines)
    assert "exists already; --force" in str(error)
    for command in ("info", "try"):
        error = failed(app, command, out)
        assert isinstance(error, CorpusError)
        assert "there is nothing of that name" in str(error)
    assert not Path(out).exists()


def test_fields_with_commas_and_repeated(app: typer.Typer, tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"a": "one", "b": "two", "c": "three"}\n')
    for fields in (["--field", "a,b", "--field", "c"], ["--field", "a", "--field", "b, c"]):
        out = str(tmp_path / "out")
        done = ["corpus", "build", out, "-t", "outpace-tiny", "--memory", "50MB", "--force", *fields, str(lines)]
        result = CliRunner().invoke(app, done, catch_exceptions=False)
        assert result.exit_code == 0
        assert Corpus.open(out).manifest.provenance["fields"] == ["a", "b", "c"]


@pytest.mark.data
def test_another_tokenizer_is_refused(app: typer.Typer, corpus: Path) -> None:
    pytest.importorskip("sentencepiece")
    llama = str(data_path("tokenizers", "llama.model"))
    error = failed(app, "try", str(corpus), "x", "--tokenizer", llama)
    assert isinstance(error, CorpusError)
    assert "'outpace-tiny'" in str(error)
    assert repr(llama) in str(error)


def test_ctrl_c(app: typer.Typer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "plan_shards", interrupt)
    lines = str(corpus.parent / "in.jsonl")
    arguments = ["corpus", "build", str(tmp_path / "out"), "-t", "outpace-tiny", "--memory", "50MB", lines]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    assert "interrupted; " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_teaches(app: typer.Typer) -> None:
    for command in ("build", "try", "verify", "info"):
        result = CliRunner().invoke(app, ["corpus", command, "--help"])
        assert result.exit_code == 0
    assert "build" in CliRunner().invoke(app, ["corpus"]).output
