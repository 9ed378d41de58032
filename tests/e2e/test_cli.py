"""The commands as users run them, on a tiny checkpoint: what goes where, and what bad input says."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace.bench.check
import outpace.cli.check
import outpace.cli.generate
import outpace.cli.replay
import outpace.engine.core
from checkpoints import SENTENCES, write_checkpoint
from families import greedy
from outpace.cli import main
from outpace.engine import Output
from outpace.verify import Verification

PROMPT = SENTENCES[0]


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        status = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Any]:
    """What the unmodified model writes after `PROMPT`: 40 tokens."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = greedy(model, tokenizer(PROMPT)["input_ids"], 40)
    assert len(ids) == 40
    return {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- generate --------------------------------------------------------------------------------------------------------


def test_text_on_standard_output_and_figures_on_standard_error(
    run: Run, checkpoint: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    done = run("generate", PROMPT, "--model", checkpoint, "--max-tokens", 40, "--json", tmp_path / "out.json")
    assert done.status == 0
    output = json.loads((tmp_path / "out.json").read_text())
    assert done.out == expected["text"] + "\n" == output["text"] + "\n"
    assert output["token_ids"] == expected["ids"]
    assert output["finish_reason"] == "length"
    assert "40 tokens (length)" in done.err
    assert "tokens a step with drafter suffix" in done.err
    assert "Traceback" not in done.err


def test_json_alone_on_standard_output(run: Run, checkpoint: Path, expected: dict[str, Any]) -> None:
    done = run("generate", PROMPT, "-m", checkpoint, "-n", 40, "--logprobs", 2, "-d", "lookup", "--json", "-")
    assert done.status == 0
    output = json.loads(done.out)
    assert (output["token_ids"], output["text"]) == (expected["ids"], expected["text"])
    assert [len(entry["top"]) for entry in output["logprobs"]] == [2] * 40
    assert output["figures"]["tokens"] == 39
    assert output["figures"]["mean_accepted_tokens"] >= 1.0
    assert output["seed"] is None
    assert "tokens a step with drafter lookup" in done.err


@pytest.mark.parametrize("prompt", [["-"], []])
def test_prompt_from_standard_input(run: Run, checkpoint: Path, expected: dict[str, Any], prompt: list[str]) -> None:
    done = run("generate", *prompt, "-m", checkpoint, "-n", 40, stdin=PROMPT.encode())
    assert (done.status, done.out) == (0, expected["text"] + "\n")


def test_samples_and_seeds(run: Run, checkpoint: Path) -> None:
    options = ("-m", checkpoint, "-n", 12, "--temperature", 1.0, "--top-p", 0.9)
    done = run("generate", PROMPT, *options, "--seed", 5, "--samples", 3, "--json", "-")
    outputs = json.loads(done.out)
    assert [output["seed"] for output in outputs] == [5, 6, 7]
    assert len({tuple(output["token_ids"]) for output in outputs}) == 3
    alone = json.loads(run("generate", PROMPT, *options, "--seed", 6, "-d", "none", "--json", "-").out)
    assert alone["token_ids"] == outputs[1]["token_ids"]
    shown = run("generate", PROMPT, *options, "--seed", 5, "--samples", 3)
    for index, output in enumerate(outputs):
        assert f"--- sample {index}\n{output['text']}\n" in shown.out
    assert "seed 5" in shown.err


def test_stop_strings(run: Run, checkpoint: Path, expected: dict[str, Any]) -> None:
    text = expected["text"]
    at = next(i for i in range(8, len(text) - 3) if "�" not in text[i : i + 3] and text[i : i + 3].isprintable())
    stop = text[at : at + 3]
    done = run("generate", PROMPT, "-m", checkpoint, "-n", 40, "--stop", "zzzzzz", "--stop", stop)
    assert done.out == text[: text.find(stop)] + "\n"
    assert f"stop at {stop!r}" in done.err


def test_chat(run: Run, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    both = json.loads(
        run("generate", "How many?", "-m", checkpoint, "-n", 3, "--system", "Be brief.", "--json", "-").out
    )
    user = json.loads(run("generate", "How many?", "-m", checkpoint, "-n", 3, "--chat", "--json", "-").out)
    for found, wanted in ((both, messages), (user, messages[1:])):
        ids = tokenizer.apply_chat_template(wanted, add_generation_prompt=True)["input_ids"]
        assert found["prompt_token_ids"] == ids


def test_user_text_is_not_read_as_markup(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closing tag that nothing opened is an error of markup; here it is a folder, and what ended the text."""
    folder = tmp_path / "[" / "llama] :smile:"
    folder.parent.mkdir()
    folder.symlink_to(checkpoint)
    decode = outpace.cli.generate._run

    def stopped(*arguments: Any, **options: Any) -> list[Output]:
        return [dataclasses.replace(o, stop_reason="[/INST] :smile:") for o in decode(*arguments, **options)]

    monkeypatch.setattr(outpace.cli.generate, "_run", stopped)
    done = run("generate", PROMPT, "-m", folder, "-n", 2, "--json", tmp_path / "out.json")
    assert done.status == 0
    assert "(length at '[/INST] :smile:')" in done.err
    assert json.loads((tmp_path / "out.json").read_text())["stop_reason"] == "[/INST] :smile:"
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt": PROMPT})
    assert run("check", "-m", folder, "-p", prompts, "-n", 2).status == 0


@pytest.mark.parametrize("command", ["generate", "check", "replay"])
def test_json_is_written_before_the_figures(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """What was computed is kept, whatever goes wrong in showing it."""

    def fails(*_: object) -> None:
        raise RuntimeError("cannot show")

    monkeypatch.setattr(outpace.cli.generate, "_show_figures", fails)
    for module in (outpace.cli.check, outpace.cli.replay):
        monkeypatch.setattr(module, "_show", fails)
    lines = write_lines(tmp_path / "lines.jsonl", {"prompt": PROMPT, "prompt_ids": [5], "output_ids": [5, 5, 5]})
    arguments = {
        "generate": [PROMPT, "-m", checkpoint, "-n", 2],
        "check": ["-m", checkpoint, "-p", lines, "-n", 2],
        "replay": [lines],
    }[command]
    with pytest.raises(RuntimeError, match="cannot show"):
        run(command, *arguments, "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())


# --- check -----------------------------------------------------------------------------------------------------------

CHECK_KEYS = {"prompts", "tokens", "identical", "ties", "divergences", "noise_floor"}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": SENTENCES[0]},
        {"messages": [{"role": "user", "content": "How many ships?"}]},
        {"prompt_ids": [5, 6, 7]},
        {"turns": [SENTENCES[4], "ignored"]},
        {"question": "Who?"},
    )


@pytest.mark.parametrize("against", ["transformers", "none"])
def test_check_finds_nothing(run: Run, checkpoint: Path, prompts: Path, against: str) -> None:
    done = run("check", "-m", checkpoint, "-p", prompts, "-n", 24, "--against", against, "--json", "-")
    assert done.status == 0, done.err
    result = json.loads(done.out)
    assert result.keys() >= CHECK_KEYS
    assert (result["prompts"], result["identical"], result["ties"], result["divergences"]) == (5, 5, 0, 0)
    assert 5 * 5 < result["tokens"] <= 5 * 24
    assert 0 < result["noise_floor"] < 1e-3
    assert [detail["result"] for detail in result["details"]] == ["identical"] * 5
    assert "5 prompts" in done.err
    assert "0 divergences" in done.err


def test_check_reads_plain_text_and_a_limit(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("First of all\r\n\n  \nSecondly\nThirdly")
    result = json.loads(run("check", "-m", checkpoint, "-p", path, "-n", 4, "--limit", 2, "--json", "-").out)
    assert result["prompts"] == 2
    assert json.loads(run("check", "-m", checkpoint, "-p", path, "-n", 4, "--json", "-").out)["prompts"] == 3


def test_check_in_bfloat16(run: Run, checkpoint: Path, prompts: Path) -> None:
    done = run("check", "-m", checkpoint, "-p", prompts, "-n", 24, "--dtype", "bfloat16", "--json", "-")
    result = json.loads(done.out)
    assert done.status == 0, done.err
    assert result["identical"] + result["ties"] == 5
    assert result["noise_floor"] > 1e-3


def _commit_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the ninth step on, one sequence's bonus token is another than the model's."""
    verify = outpace.engine.core.verify
    calls = 0

    def wrong(choosers: Any, trees: Any, logits: torch.Tensor) -> Verification:
        nonlocal calls
        calls += 1
        found = verify(choosers, trees, logits)
        if calls == 9:
            last = int(found.verdicts.token_offsets[1]) - 1
            row = logits[found.verdicts.path_of(0)[-1] + 1 if len(found.verdicts.path_of(0)) else 0]
            found.verdicts.tokens[last] = int(np.argmin(row.float().numpy()))
        return found

    monkeypatch.setattr(outpace.engine.core, "verify", wrong)


@pytest.mark.parametrize("floor", [None, 1e6])
def test_check_finds_a_wrong_token(
    run: Run, checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: float | None
) -> None:
    _commit_wrong_tokens(monkeypatch)
    if floor is not None:  # an engine whose packed passes are wrong measures a high floor: it must not excuse itself
        monkeypatch.setattr(outpace.bench.check, "noise_floor", lambda *_: floor)
    path = tmp_path / "result.json"
    done = run("check", "-m", checkpoint, "-p", prompts, "-n", 24, "-d", "none", "--json", path)
    assert done.status == 1
    assert done.out == ""
    result = json.loads(path.read_text())
    assert (result["identical"], result["ties"], result["divergences"]) == (4, 0, 1)
    [detail] = [detail for detail in result["details"] if detail["result"] == "divergence"]
    assert detail["position"] == 8
    assert detail["expected"] != detail["found"]
    assert detail["gap"] > 1
    assert "divergence" in done.err
    assert str(detail["expected"]) in done.err


def test_check_counts_what_it_could_not_generate_from(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "ok"}, {"prompt_ids": [5] * 600}, {"prompt_ids": [10**6]})
    done = run("check", "-m", checkpoint, "-p", path, "-n", 4, "--json", "-")
    assert done.status == 2
    result = json.loads(done.out)
    assert (result["identical"], result["errors"]) == (1, 2)
    assert "600 tokens, and the context of 512" in done.err
    assert "token ids must be" in done.err


# --- replay ----------------------------------------------------------------------------------------------------------


def test_replay(run: Run, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"prompt_ids": [1, 2, 3], "output_ids": [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]})
    done = run("replay", path, "-d", "suffix", "--max-nodes", 4, "--json", "-")
    assert done.status == 0
    figures = json.loads(done.out)
    assert figures["drafter"].startswith("suffix")
    assert figures["mean_accepted_tokens"] == figures["tokens"] / figures["steps"] > 2
    for spec in ("none", "oracle(1.0)"):
        assert run("replay", path, "-d", spec).status == 0


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(checkpoint: Path, tmp_path: Path) -> Callable[[str], tuple[list[object], bytes]]:
    """A command line and standard input for each kind of bad input."""

    def make(kind: str) -> tuple[list[object], bytes]:
        generate: list[object] = ["generate", "x", "-m", checkpoint, "-n", 2]
        lines = tmp_path / "lines.jsonl"
        match kind:
            case "missing shard":
                folder = tmp_path / "torn"
                folder.mkdir()
                for path in checkpoint.iterdir():
                    if "00002" not in path.name:
                        (folder / path.name).symlink_to(path)
                return ["generate", "x", "-m", folder], b""
            case "standard input":
                return ["generate", "-", "-m", checkpoint], b"caf\xe9"
            case "prompts not UTF-8":
                lines.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
                return ["check", "-m", checkpoint, "-p", lines], b""
            case "prompts not JSON":
                lines.write_text('{"prompt": "a"}\n\n{"prompt: 3}\n')
                return ["check", "-m", checkpoint, "-p", lines], b""
            case "no prompts":
                lines.write_text("\n\n")
                return ["check", "-m", checkpoint, "-p", lines], b""
            case "trace":
                lines.write_text('{"prompt_ids": [1], "output_ids": [1, 2]}\n{"prompt_ids": [1]}\n')
                return ["replay", lines], b""
            case "long prompt":
                return ["generate", "ship " * 600, "-m", checkpoint], b""
        more: dict[str, list[object]] = {
            "drafter": [*generate, "-d", "sufix"],
            "drafter option": [*generate, "-d", "suffix(draft_sise=3)"],
            "model": ["generate", "x", "-m", checkpoint.parent / "lama"],
            "option": [*generate, "--temprature", 1],
            "command": ["generat"],
            "no model": ["check", "-p", lines],
            "number": [*generate, "--top-k", "many"],
            "parameter": [*generate, "--top-p", 2],
            "dtype": [*generate, "--dtype", "float23"],
            "empty prompt": ["generate", "", "-m", checkpoint],
            "max_tokens 0": ["generate", "x", "-m", checkpoint, "--max-tokens", 0],
            "surrogate": ["generate", "a\udcffb", "-m", checkpoint],
            "JSON path": [*generate, "--json", tmp_path / "none" / "x.json"],
            "JSON path of check": ["check", "-m", checkpoint, "-p", lines, "--json", tmp_path],
            "JSON path of replay": ["replay", lines, "--json", tmp_path / "none" / "x.json"],
            "no file": ["check", "-m", checkpoint, "-p", tmp_path / "none.jsonl"],
            "reference": ["check", "-m", checkpoint, "-p", lines, "--against", "transformer"],
        }
        return more[kind], b""

    return make


SAYS = {
    "drafter": "did you mean 'suffix' or 'suffix-tree'?",
    "drafter option": "did you mean 'draft_size'",
    "model": "checkpoints beside it: llama",
    "option": "--temp",
    "command": "Did you mean 'generate'?",
    "no model": "--model",
    "number": "--top-k",
    "parameter": "top_p must be",
    "dtype": "did you mean 'float32'",
    "long prompt": "context of 512 tokens",
    "empty prompt": "the prompt is empty",
    "max_tokens 0": "max_tokens must be an integer at least 1 or None, found 0",
    "standard input": "byte 0xe9 at offset 3",
    "surrogate": r"'\udcff'",
    "prompts not UTF-8": "lines.jsonl:2: expected UTF-8, found byte 0xe9",
    "prompts not JSON": "lines.jsonl:3: expected a JSON object",
    "no prompts": "holds no prompt",
    "trace": "lines.jsonl:2: ",
    "missing shard": "model-00002-of-",
    "JSON path": "there is no folder",
    "JSON path of check": "it is a folder",
    "JSON path of replay": "there is no folder",
    "no file": "none.jsonl",
    "reference": "did you mean 'transformers'?",
}


@pytest.mark.parametrize("kind", SAYS)
def test_bad_input_is_one_clear_line(run: Run, bad: Any, kind: str) -> None:
    arguments, stdin = bad(kind)
    done = run(*arguments, stdin=stdin)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("outpace: ")
    assert done.err.count("\n") == 1, done.err
    assert SAYS[kind] in done.err


@pytest.mark.parametrize("kind", ["drafter", "model", "option", "trace", "empty prompt"])
def test_debug_shows_the_traceback(run: Run, bad: Any, kind: str) -> None:
    arguments, stdin = bad(kind)
    for place in (0, len(arguments)):
        done = run(*arguments[:place], "--debug", *arguments[place:], stdin=stdin)
        assert done.status == 2
        assert "Traceback (most recent call last)" in done.err
        assert SAYS[kind] in done.err


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ([], "outpace demo"),
        (["demo"], "outpace demo --model"),
        (["chat"], "| outpace chat"),
        (["generate"], 'outpace generate "Once upon a time" --model'),
        (["check"], "outpace check --model"),
        (["replay"], "outpace replay traces.jsonl"),
    ],
)
def test_help_teaches_with_an_example(run: Run, command: list[str], example: str) -> None:
    done = run(*command, "--help")
    assert done.status == 0
    assert example in " ".join(done.out.split())
    assert done.err == ""


def test_version_and_no_arguments(run: Run) -> None:
    assert run("--version").out.startswith("outpace 0.")
    nothing = run()
    assert nothing.status == 2
    assert "generate" in nothing.out + nothing.err


# --- as processes ----------------------------------------------------------------------------------------------------


LIGHT = """
import sys
from outpace.cli import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as end:
        print(f"status of {command}: {end.code}")
heavy = {"numba", "numpy", "outpace.draft", "outpace.engine", "torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_and_usage_errors_do_not_wait_for_torch() -> None:
    good = [
        "--version",
        "--help",
        *(f"{command} --help" for command in ("demo", "generate", "chat", "check", "replay")),
    ]
    bad = [
        "generat",
        "generate --temprature 1",
        "demo --max-tokens 0",
        "chat --modle x",
        "check --limit 0",
        "check -m x",
        "replay",
    ]
    done = subprocess.run([sys.executable, "-c", LIGHT, *good, *bad], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [f"status of {command}: 2" in done.stdout for command in good] == [False] * len(good)
    assert [f"status of {command}: 2" in done.stdout for command in bad] == [True] * len(bad)


def process(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "import sys; from outpace.cli import main; sys.exit(main())", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
    return subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=120)


def test_a_process_streams_text_and_nothing_else(checkpoint: Path, expected: dict[str, Any]) -> None:
    done = process("generate", "-", "-m", checkpoint, "-n", 40, "--threads", 1, stdin=PROMPT.encode())
    assert done.returncode == 0
    assert done.stdout.decode() == expected["text"] + "\n"
    assert done.stderr.count(b"\n") == 1  # the figures; no advice of other libraries


def test_a_process_writes_json_and_nothing_else(checkpoint: Path, expected: dict[str, Any]) -> None:
    done = process("generate", PROMPT, "-m", checkpoint, "-n", 40, "--threads", 1, "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["token_ids"] == expected["ids"]


def test_a_process_ends_with_status_2_and_one_line(checkpoint: Path) -> None:
    done = process("generate", "ship " * 600, "-m", checkpoint, "--threads", 1)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert done.stderr.startswith(b"outpace: the prompt has ")


@pytest.mark.parametrize("command", ["generate", "check"])
def test_chat_needs_a_template(run: Run, checkpoint: Path, tmp_path: Path, command: str) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "chat_template.jinja").unlink()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    given = ["hello"] if command == "generate" else ["-p", prompts]
    ran = run(command, *given, "-m", bare, "--chat")
    assert ran.status == 2
    assert ran.err.strip().endswith("has no chat template; leave out --chat and --system")
