"""`outpace demo` and `outpace chat` as users run them, on a tiny checkpoint."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import outpace.assets
import outpace.bench.demo
import outpace.cli.demo
from checkpoints import SENTENCES, write_checkpoint
from outpace.cli import main
from outpace.cli.common import USABLE_DRAFTERS

START = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from outpace.cli import main; main()"
ESCAPE = "\x1b"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for the model in the box, with its prompts."""
    folder = write_checkpoint(tmp_path_factory.mktemp("box") / outpace.assets.BUILTIN_MODEL)
    records = [
        {"id": "completion-00", "kind": "completion", "prompt": SENTENCES[3], "source": "json/encoder.py"},
        {"id": "completion-01", "kind": "completion", "prompt": SENTENCES[3] * 2},
        {"id": "editing-00", "kind": "editing", "messages": [{"role": "user", "content": SENTENCES[3]}]},
        {"id": "arithmetic-00", "kind": "arithmetic", "messages": [{"role": "user", "content": SENTENCES[5]}]},
        {"id": "varied-00", "kind": "varied", "prompt": SENTENCES[2]},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "prompts.jsonl").write_text(lines)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path) -> Run:
    """Runs a command in this process, with the stand-in as the model in the box; status, output, errors."""
    monkeypatch.setattr(outpace.assets, "files", lambda _: checkpoint.parent)
    monkeypatch.setattr(outpace.cli.demo, "_ROUNDS", 1)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, stdin: str | bytes = "") -> tuple[int, str, str]:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        capsys.readouterr()
        status = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "60", "PYTHONIOENCODING": "utf-8"}
    environment |= options.pop("environment", {})  # type: ignore[arg-type]
    command = [sys.executable, "-c", START, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **options)  # type: ignore[call-overload,no-any-return]


# --- demo ------------------------------------------------------------------------------------------------------------


def test_demo_in_a_pipe(checkpoint: Path, tmp_path: Path) -> None:
    """No control codes, no bars, never wider than 60 columns; texts, table, conditions, three commands."""
    options = ("--prompts", checkpoint / "prompts.jsonl", "-m", checkpoint, "-n", 8, "--threads", 1, "--seconds", 600)
    options += ("--prompts-per-kind", 1)
    process = start("demo", *options, "--json", tmp_path / "demo.json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = (stream.decode() for stream in process.communicate(timeout=300))
    assert process.returncode == 0, err
    assert ESCAPE not in out + err
    assert "\r" not in out + err
    assert max(map(cell_len, out.splitlines())) <= 60
    for wanted in (
        "Code completion",
        "Code editing",
        "Worked arithmetic",
        "json/encoder.py",
        "1 thread,",
        "all prompts",
    ):
        assert wanted in out
    assert [line.strip() for line in out.splitlines() if line.startswith("  outpace ")] == [
        "outpace chat",
        'outpace generate "def read_config(path):"',
        "outpace demo --model PATH-OR-HUB-ID",
    ]
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["complete"] is True
    assert "Time was up" not in out
    assert found["model"] == str(checkpoint)
    assert found["drafters"] == ["none", *(name for name in USABLE_DRAFTERS if name != "none")]
    assert list(found["kinds"]) == ["completion", "editing", "arithmetic", "varied"]
    for rows in (*found["kinds"].values(), found["all"]):
        for drafter in found["drafters"]:
            row = rows[drafter]
            assert row["tokens_per_s"] > 0
            assert row["speedup"] > 0
            assert row["mean_accepted_tokens"] >= 1.0
    assert len(found["runs"]) == 4 * len(found["drafters"])
    assert {run["result"] for run in found["runs"]} == {None, "identical"}
    assert all(len(run["origins"]) == len(run["token_ids"]) == 8 for run in found["runs"])


@pytest.fixture
def listens() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens")
def test_demo_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, once three runs are over: what they gave, and status 130."""
    measure = outpace.bench.demo.Demo._run

    def pressed_later(self: outpace.bench.demo.Demo, *arguments: Any) -> None:
        if len(self.cells) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        measure(self, *arguments)

    monkeypatch.setattr(outpace.bench.demo.Demo, "_run", pressed_later)
    status, out, err = run("demo", "-n", 8, "-d", "suffix", "--json", "x.json", "--seconds", 600)
    assert status == 130, err
    assert "Interrupted. What 3 finished runs gave:" in out
    assert "code completion (1)" in out
    assert "outpace chat" in out
    found = json.loads(Path("x.json").read_text())
    assert (found["complete"], found["rounds"], len(found["runs"])) == (False, 0, 3)


@pytest.mark.usefixtures("listens")
def test_demo_interrupted_before_anything_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outpace.bench.demo.Demo, "_run", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(outpace.bench.demo.Demo, "warm_up", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    status, out, err = run("demo", "-n", 8, "-d", "suffix")
    assert (status, out) == (130, "")
    assert "nothing was measured" in err


def test_demo_of_the_model_in_the_box(run: Run) -> None:
    """By default its own prompts; with JSON on standard output everything else goes to standard error."""
    status, out, err = run(
        "demo", "-n", 6, "--prompts-per-kind", 1, "-d", "suffix", "-d", "lookup(3)", "--json", "-", "--seconds", 600
    )
    assert status == 0, err
    found = json.loads(out)
    assert found["model"] == "outpace-tiny"
    assert found["drafters"][:2] == ["none", "suffix"]
    assert len(found["runs"]) == 4 * 3
    assert "all prompts (4)" in err


def test_demo_ends_when_time_is_up(run: Run) -> None:
    status, out, _ = run("demo", "-n", 4, "-d", "suffix", "--seconds", 0)
    assert status == 0
    assert "Time was up after 1 of 5 prompts; --seconds gives it more." in " ".join(out.split())


def test_demo_reports_outputs_that_are_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.bench.demo.Demo.divergences", lambda _: 2)
    status, out, _ = run("demo", "-n", 4, "--prompts-per-kind", 1, "-d", "suffix")
    assert status == 1
    assert "2 outputs are NOT what plain decoding gives" in out


SAYS = {
    ("demo", "-d", "sufix"): "did you mean 'suffix' or 'suffix-tree'?",
    ("demo", "-m", "./nowhere"): "no folder './nowhere'",
    ("demo", "-n", "0"): "--max-tokens",
    ("demo", "--prompts-per-kind", "0"): "--prompts-per-kind",
    ("demo", "--prompts", "none.jsonl"): "cannot read none.jsonl",
    ("demo", "--json", "none/x.json"): "there is no folder",
    ("demo", "-n", "500"): "do not fit the context of 512",
    ("chat", "-d", "sufix"): "did you mean 'suffix' or 'suffix-tree'?",
    ("chat", "-m", "./nowhere"): "no folder './nowhere'",
    ("chat", "-n", "0"): "--max-tokens",
    ("chat", "--top-p", "2"): "top_p must be",
}


@pytest.mark.parametrize("arguments", SAYS, ids=" ".join)
def test_bad_input_is_one_clear_line(run: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("... ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("outpace: ")
    assert SAYS[arguments] in lines[0]


def test_without_the_model_in_the_box(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(outpace.assets, "files", lambda _: tmp_path)
    for command in ("demo", "chat", "generate"):
        status, _, err = run(command, stdin="x")
        assert status == 2
        assert "the model in the box is not in this installation" in err


def test_generate_takes_the_model_in_the_box(run: Run, checkpoint: Path) -> None:
    """Whatever folder of the same name lies here; a path reaches that one."""
    Path("outpace-tiny").mkdir()
    status, out, _ = run("generate", SENTENCES[0], "-n", 4)
    assert (status, out) == (0, run("generate", SENTENCES[0], "-n", 4, "-m", checkpoint)[1])
    status, _, err = run("generate", "x", "-m", "./outpace-tiny")
    assert (status, "no config.json" in err) == (2, True)


# --- chat ------------------------------------------------------------------------------------------------------------


def test_chat_in_a_pipe(run: Run) -> None:
    lines = [
        "How many ships?",
        "",
        "/stats",
        "/drafter lookup",
        "/drafter",
        "/help",
        '"""/two',
        'lines"""',
        "/exit",
        "no",
    ]
    status, out, err = run("chat", "-n", 12, stdin="\n".join(lines))
    assert status == 0, err
    assert err.count("(12 tokens, ") == 2
    assert "last answer: 12 tokens" in err
    assert "(drafter lookup" in err
    assert "in use: lookup" in err
    assert "/clear" in err
    assert ESCAPE not in out + err
    assert "> " not in err
    again = run("chat", "-n", 12, "-d", "none", stdin="How many ships?\n/two\nlines\n")
    assert again[0] == 2
    assert "unknown command '/two'" in again[2]
    first = run("generate", "How many ships?", "--chat", "-n", 12)[1]
    assert out.startswith(first)
    assert again[1].startswith(first)


def test_chat_goes_on_after_what_it_cannot_answer(run: Run) -> None:
    status, out, err = run("chat", "-n", 4, stdin=f"{SENTENCES[0] * 40}\n/drafter nix\nHow many?\n")
    assert status == 2
    assert "shorten it" in err
    assert "unknown drafter 'nix'" in err
    assert err.count("(4 tokens") == 1
    assert out


def test_chat_says_when_turns_are_forgotten(run: Run) -> None:
    _, _, err = run("chat", "-n", 4, stdin=(SENTENCES[0] * 3 + "\n") * 10)
    assert "of 512 tokens full: the oldest turn was forgotten)" in " ".join(err.split())


def test_chat_refuses_what_is_no_text(run: Run) -> None:
    status, _, err = run("chat", stdin=b"caf\xe9\n")
    assert status == 2
    assert "standard input is not UTF-8: byte 0xe9" in err


def test_chat_needs_a_template(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    status, _, err = run("chat", "-m", bare, stdin="hello\n")
    assert status == 2
    assert "`outpace generate` continues text" in err


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self._fd, child = pty.openpty()
        options = {"stdin": child, "stdout": child, "stderr": child, "start_new_session": True}
        self.process = start(*arguments, environment={"TERM": "xterm", **environment}, **options)
        os.close(child)
        self.seen = ""

    def wait_for(self, text: str, *, after: int = 0, seconds: float = 180) -> int:
        """Reads until ``text`` comes behind position ``after``; returns where it ends."""
        deadline = time.monotonic() + seconds
        while (at := self.seen.find(text, after)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen!r}"
            if select.select([self._fd], [], [], 0.2)[0]:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
        return at + len(text)

    def read_more(self) -> None:
        """Reads what comes next."""
        self.seen += os.read(self._fd, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """Reads to the end; the exit status."""
        with contextlib.suppress(OSError):
            while piece := os.read(self._fd, 65536):
                self.seen += piece.decode(errors="replace")
        status = self.process.wait(timeout=120)
        os.close(self._fd)
        return status


def test_chat_in_a_terminal(checkpoint: Path) -> None:
    """Ctrl-C stops an answer, or tells how to leave; an arrow key brings a message back; Ctrl-D leaves."""
    terminal = Terminal("chat", "-m", checkpoint, "-n", 450, "--threads", 1)
    at = terminal.wait_for("\r\n> ")
    time.sleep(0.5)  # it is shown a little before keys are waited for
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.wait_for("(Ctrl-D or /exit leaves)", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("How many?\n")
    at = terminal.wait_for("How many?\r\n", after=at)
    terminal.read_more()  # the answer has begun
    terminal.process.send_signal(signal.SIGINT)
    at = terminal.wait_for("(stopped)", after=at)
    at = terminal.wait_for("> ", after=at)
    terminal.type("\x1b[A")
    at = terminal.wait_for("How many?", after=at)
    terminal.type("\x15/exit\n")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_demo_in_a_terminal_without_colour(checkpoint: Path) -> None:
    """A dumb terminal that wants no colour gets no control code at all."""
    options = ("--prompts", checkpoint / "prompts.jsonl", "-m", checkpoint, "-n", 4, "--threads", 1, "-d", "suffix")
    terminal = Terminal("demo", *options, "--prompts-per-kind", 1, TERM="dumb", NO_COLOR="1")
    assert terminal.end() == 0
    assert ESCAPE not in terminal.seen
    assert "none (plain)" in terminal.seen
