"""What README and docs show is run here: Python, `outpace` commands, links, and the generated reference."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import checkpoints
import outpace
import outpace.assets
import outpace.cli.demo
from outpace import cli
from outpace.corpora.build import BuildOptions, build_corpus

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(
    r"""\$ (?:echo (?P<said>"[^"]*"|'[^']*') \| )?outpace (?P<arguments>.*?)(?:  # (?P<needs>needs .*))?"""
)
NOT_RUN = {  # what else a reader is told to type, and where it runs instead
    "$ source .venv/bin/activate": "changes a shell",
    "$ pip install -e .": "`make setup` does it, with the versions of constraints.txt",
    "$ .venv/bin/python scripts/build_reference.py": "test_reference_is_up_to_date",
}
BOX = ROOT / "src" / "outpace" / "assets" / outpace.assets.BUILTIN_MODEL


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the placeholders of the documentation stand for."""
    folder = tmp_path_factory.mktemp("docs")
    checkpoints.write_checkpoint(folder / "checkpoint")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon a time"}\n{"prompt": "the ships, the ships, the ships"}\n')
    if not BOX.is_dir():  # a stand-in until it is there
        shutil.copytree(folder / "checkpoint", folder / BOX.name)
        shutil.copy(prompts, folder / BOX.name)
    traces = folder / "traces.jsonl"
    rng = np.random.default_rng(0)
    with traces.open("w") as file:
        for category in ("qa", "summary"):
            text = rng.integers(3, 20, 60).tolist() * 2
            file.write(json.dumps({"prompt_ids": text[:40], "output_ids": text[40:], "category": category}) + "\n")
    texts = folder / "texts"
    texts.mkdir()
    (texts / "a.py").write_text(
        "def read_lines(path):\n    with open(path) as file:\n        return file.read().splitlines()\n"
    )
    build_corpus(folder / "corpus", [texts], BuildOptions(str(BOX) if BOX.is_dir() else str(folder / "checkpoint")))
    return {
        "corpus build path/to/corpus": "corpus build built",  # within the test's own folder
        "path/to/corpus": str(folder / "corpus"),
        "path/to/texts": str(texts),
        "path/to/checkpoint": str(folder / "checkpoint"),
        "prompts.jsonl": str(prompts),
        "traces.jsonl": str(traces),
    }


@pytest.fixture(autouse=True)
def model_in_the_box(monkeypatch: pytest.MonkeyPatch, places: dict[str, str]) -> None:
    """Examples use it by name; where this checkout lacks it, the name means a small random model."""
    if not BOX.is_dir():
        monkeypatch.setattr(outpace.assets, "files", lambda _: Path(places["prompts.jsonl"]).parent)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text("utf-8")) if found == language]


def filled(text: str, places: dict[str, str]) -> str:
    for placeholder, path in places.items():
        text = text.replace(placeholder, path)
    return text


def console_lines() -> Iterator[tuple[str, str]]:
    """Each line of the documentation's consoles, with its page, and what the Makefile runs of Outpace."""
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in block.splitlines():
                yield name(page), line
    for arguments in re.findall(r"\$\(BIN\)/outpace (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE):
        yield "Makefile", f"$ outpace {arguments}"


def commands() -> Iterator[object]:
    """Each distinct `outpace` command, with the first page that shows it; what it needs and CI lacks is told in a comment."""
    seen = set()
    for page, line in console_lines():
        command = COMMAND.fullmatch(line)
        if command is not None and line not in seen:
            seen.add(line)
            marks = [pytest.mark.skip(reason=f"it {command['needs']}")] if command["needs"] else []
            yield pytest.param(page, line, marks=marks, id=f"{page}: {line}")


def test_consoles_hold_commands_that_run() -> None:
    """A line that is none of the known kinds would be shown without being tried."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    for page, line in console_lines():
        if line.startswith("$ make "):
            assert set(line.split()[2:]) <= targets, f"{page}: {line}"
        else:
            assert COMMAND.fullmatch(line) or line in NOT_RUN, f"{page}: {line}"
    assert "make check test" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page: Path, places: dict[str, str]) -> None:
    """The blocks of one page share a namespace, as a reader who follows it has them."""
    space: dict[str, object] = {"__name__": "__docs__"}
    text = page.read_text("utf-8")
    for found in FENCE.finditer(text):
        if found[1] == "python":
            line = text.count("\n", 0, found.start(2))
            source = "\n" * line + filled(found[2], places)  # so that a traceback names the page's own line
            exec(compile(source, name(page), "exec"), space)


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_command_runs(
    page: str, line: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = COMMAND.fullmatch(line)
    assert command is not None
    said = shlex.split(command["said"] or "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said or ["How many ships?", "/stats"]) + "\n"))
    threads = torch.get_num_threads()
    status: object = 0
    try:
        cli.main(shortened(shlex.split(filled(command["arguments"], places)), monkeypatch))
    except SystemExit as ended:
        status = ended.code
    assert status in (0, None), f"{page}: {line}"
    assert torch.get_num_threads() == threads


def shortened(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same command with less to do."""
    if arguments[0] == "demo":
        monkeypatch.setattr(outpace.cli.demo, "_ROUNDS", 1)
        arguments += ["--prompts-per-kind", "1", "--seconds", "0"]
    if "--max-tokens" in arguments:
        place = arguments.index("--max-tokens") + 1
        arguments[place] = str(min(int(arguments[place]), 12))
    elif arguments[0] not in ("corpus", "replay"):
        arguments += ["--max-tokens", "12"]
    return arguments


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(BOX) and not BOX.is_dir():
            continue  # the model card comes with the model
        assert target.exists(), f"{name(page)}: {link}"
        assert target.is_relative_to(ROOT), f"{name(page)}: {link} leads out of the repository"
        assert not anchor or anchor in anchors(target), f"{name(page)}: {link}"


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text("utf-8")) if "://" not in link}
    missing = [name(page) for page in PAGES if page.is_relative_to(index.parent) and page not in {index, *linked}]
    assert not missing


def build_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_reference", ROOT / "scripts" / "build_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_up_to_date() -> None:
    for file, text in build_reference().pages().items():
        committed = (ROOT / "docs" / "reference" / file).read_text("utf-8")
        assert committed == text, f"docs/reference/{file} is old: run python scripts/build_reference.py"


def test_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.sub(r"\.dev\d*$", "", outpace.__version__)
    assert f"## [{released}]" in text or "## [Unreleased]" in text


def test_no_figure_is_left_out() -> None:
    assert [name(page) for page in PAGES if "TODO" in page.read_text("utf-8")] == []
