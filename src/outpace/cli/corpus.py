"""``outpace corpus``: automata over documents, on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli.common import JsonOption, check_writable, err_console, quiet_libraries, write_json
from outpace.errors import ConfigError, InputError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from outpace.corpora.build import BuildProgress, BuildReport
    from outpace.corpora.look import Found
    from outpace.suffix.corpus import Corpus, Manifest
    from outpace.tokenizers import TextTokenizer

_HELP = "\n\n".join(
    (
        "Build corpora to draft from, and look into them.",
        "A corpus is a folder with a suffix automaton over many documents. While a model writes something that stands in one "
        "of them, what comes next there is the draft. The documents' tokens must be the model's, so a corpus belongs to a "
        "tokenizer. It is opened in milliseconds whatever its size, and processes share its memory.",
        "Examples:",
        "    outpace corpus build ./my-corpus --tokenizer outpace-tiny ./src README.md",
        '    outpace corpus try ./my-corpus "import numpy"',
    )
)
_BUILD_HELP = "\n\n".join(
    (
        "Build a corpus in the folder OUT from files and folders.",
        "In a folder, every file below it is read, except hidden ones and corpora; files that cannot be used are "
        "counted: those that are no text in UTF-8, for instance. "
        "`text`: each file is one document. `jsonl` (.jsonl, .ndjson): each line is one, in the field(s) of `--field`. `ids` "
        "(.npy): a file with integers in one dimension is one document; with `--format ids` also lines of JSON, each a list "
        "of ids or an object with one in `--field` (`ids`). Without `--format`, a file's name decides.",
        "With `--chat`, the field (`messages`) holds a conversation, a list of objects with role and content, which the "
        "tokenizer's chat template renders; or plain text, which is rendered as an assistant's answer.",
        "What does not fit into `--memory` becomes several shards, built side by side and asked together; fewer `--workers` "
        "make larger shards. On disk a corpus takes about 24 bytes a token, and its build 4 more.",
        "The corpus is made beside OUT and renamed when it is complete: an interrupted build leaves nothing.",
        "Examples:",
        "    outpace corpus build code --tokenizer meta-llama/Llama-3.1-8B-Instruct ~/projects/app",
        "    outpace corpus build gsm8k --tokenizer llama.model --field question,answer train.jsonl",
        "    outpace corpus build answers --tokenizer ./my-model --chat --memory 8GB --skip-bad-lines chats/",
    )
)
_TRY_HELP = "\n\n".join(
    (
        "Look a text up: the longest end of it that occurs in the corpus, where that stands first, what would be drafted.",
        "Without TEXT, texts are read from standard input, one a line. The tokenizer is found by the name that it had when "
        "the corpus was built; `--tokenizer` says where it is now.",
        "Example:",
        '    outpace corpus try ./my-corpus "for i in range("',
    )
)
_VERIFY_HELP = "\n\n".join(
    (
        "Read a whole corpus and compare it with its checksums.",
        "Exit status: 0 if it is sound, 1 if it is damaged; then each damaged file is named.",
        "`--deep` audits each automaton as well, link by link, in plain Python: minutes for a million tokens.",
    )
)
FolderArgument = Annotated[str, typer.Argument(metavar="DIR", help="A corpus.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help=_HELP, no_args_is_help=True)
    group.command("build", help=_BUILD_HELP)(_build)
    group.command("info", help="Show what a corpus says of itself.")(_info)
    group.command("verify", help=_VERIFY_HELP)(_verify)
    group.command("try", help=_TRY_HELP)(_try)
    app.add_typer(group, name="corpus")


def _build(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="Files and folders.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="T",
            help="SentencePiece .model file, folder, hub id or outpace-tiny: the model's.",
        ),
    ],
    document_format: Annotated[
        str, typer.Option("--format", metavar="F", help="text, jsonl, ids, or auto: by each file's name.")
    ] = "auto",
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME",
            help="Field of a JSON line; several (repeated, or with commas) are joined by newlines.",
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render conversations with the chat template.")] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count lines that cannot be used, and go on.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="For building shards, all processes together, as 2GB; half of what is free by default. The process that "
            "reads comes on top.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, metavar="N", help="Processes that build shards; as many as CPUs.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the corpus OUT if it is there.")] = False,
) -> None:
    from outpace.corpora.build import BuildOptions, build_corpus
    from outpace.corpora.memory import parse_size

    names = tuple(name.strip() for given in fields or () for name in given.split(","))
    if not all(names):
        raise ConfigError(f"expected names of fields, found {', '.join(fields or ())!r}")
    options = BuildOptions(
        tokenizer, document_format, names, chat, skip_bad_lines, parse_size(memory) if memory else None, workers, force
    )
    _quiet_for(tokenizer)
    console = err_console()
    try:
        with _Bar(console) as bar:
            report = build_corpus(out, inputs, options, bar.show)
    except KeyboardInterrupt:
        console.print(f"outpace: interrupted; {str(out)!r} is as it was, and nothing was left beside it")
        raise typer.Exit(130) from None
    _tell_built(console, report)
    typer.echo(str(out))


def _info(folder: FolderArgument, json_path: JsonOption = None) -> None:
    from outpace.corpora.memory import size_text
    from outpace.suffix.corpus import Corpus

    check_writable(json_path)
    manifest = Corpus.open(folder).manifest
    write_json(json_path, manifest.to_json())
    if json_path == "-":
        return
    own, asked = manifest.tokenizer, manifest.provenance
    skipped = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in manifest.skipped.items() if count)
    options = [asked["format"], *(["chat"] if asked["chat"] else []), *asked["fields"]]
    rows = {
        "tokenizer": f"{own.name} (fingerprint {own.fingerprint[:12]}, {own.vocab_size:,} ids)",
        "documents": f"{manifest.documents:,}",
        "tokens": f"{manifest.tokens:,} (largest id {manifest.largest_token:,})",
        "states": f"{sum(shard.states for shard in manifest.shards):,} inner, "
        f"{sum(shard.edges for shard in manifest.shards):,} stored transitions",
        "size": f"{size_text(manifest.nbytes)}, {manifest.nbytes / manifest.tokens:.1f} bytes a token",
        "shards": f"{len(manifest.shards)}",
        "inputs": _shortened(asked["inputs"]),
        "read as": ", ".join(options),
        "left out": skipped or "nothing",
        "built": f"{asked['date']} by Outpace {manifest.outpace}, in "
        f"{asked['seconds_reading'] + asked['seconds_building']:,.1f} s",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<10} {value}")


def _verify(
    folder: FolderArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Audit the automata too; slow.")] = False,
) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from outpace.corpora.memory import size_text
    from outpace.suffix.corpus import Manifest, verify

    console = err_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        problems = list(verify(folder, deep=deep, progress=show))
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    manifest = Manifest.read(folder)
    audited = ", audited" if deep else ""
    typer.echo(
        f"sound: {len(manifest.shards)} shard(s), {size_text(manifest.nbytes)}, {manifest.tokens:,} tokens{audited}"
    )


def _try(
    folder: FolderArgument,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="What to look up.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", "-t", metavar="T", help="Where the corpus's tokenizer is now.")
    ] = None,
) -> None:
    import numpy as np

    from outpace.corpora.look import look_up
    from outpace.suffix.corpus import Corpus
    from outpace.tokenizers import TextTokenizer

    corpus = Corpus.open(folder)
    name = tokenizer or corpus.manifest.tokenizer.source
    _quiet_for(name)
    try:
        loaded = TextTokenizer.load(name)
    except ConfigError as error:
        if tokenizer is not None:
            raise
        raise ConfigError(f"{error}; --tokenizer says where the tokenizer of {folder!r} is now") from error
    Corpus.open(folder, loaded.fingerprint, name)
    for asked in [text] if text is not None else _typed_lines():
        ids = np.array(loaded.encode(_encodable(asked)), np.int32)
        _tell_found(corpus, loaded, ids, look_up(corpus, ids))


class _Bar:
    """A progress bar with tokens, tokens/s and memory."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)
        self._stage = ""

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()

    def show(self, now: BuildProgress) -> None:
        from outpace.corpora.memory import size_text

        if now.stage != self._stage:
            self._stage = now.stage
            self._progress.reset(self._task)
        tokens = now.tokens if now.stage == "reading" else now.done
        speed = tokens / now.seconds if now.seconds > 0 else 0.0
        told = f"{now.stage}: {tokens:,} tokens, {speed:,.0f} tokens/s, {size_text(now.memory)} of memory"
        self._progress.update(self._task, completed=now.done, total=now.total or None, description=told)


def _quiet_for(tokenizer: str) -> None:
    if not tokenizer.endswith(".model"):  # a SentencePiece file needs no Transformers, which take seconds to import
        quiet_libraries(None)


def _tell_built(console: Console, report: BuildReport) -> None:
    from outpace.corpora.memory import size_text

    manifest: Manifest = report.manifest
    for note in report.notes:
        console.print(f"note: {note}")
    shards = len(manifest.shards)
    seconds = report.seconds_reading + report.seconds_building
    console.print(
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens in {shards} shard{'s' * (shards != 1)}: "
        f"{size_text(manifest.nbytes)}, {manifest.nbytes / manifest.tokens:.1f} bytes a token; {seconds:.1f} s (reading "
        f"{manifest.tokens / report.seconds_reading:,.0f} tokens/s, building "
        f"{manifest.tokens / report.seconds_building:,.0f}), at most {size_text(report.peak_memory)} of memory in a process"
    )


def _typed_lines() -> Iterator[str]:
    """Lines of standard input that hold something; a prompt where somebody types them."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input is not {error.encoding.upper()}: byte {error.object[error.start]:#04x}"
            ) from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _encodable(text: str) -> str:
    """``text``, if it is text: what the shell passes on may be bytes that are no UTF-8.

    Raises:
        InputError: It is not.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        found = f"byte {code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else f"half a character (\\u{code:04x})"
        raise InputError(f"the text is not UTF-8: {found} at character {error.start}") from error
    return text


def _tell_found(corpus: Corpus, tokenizer: TextTokenizer, ids: np.ndarray, found: Found | None) -> None:
    from outpace.corpora.look import source_of

    if found is None:
        typer.echo("no match: not even the last token occurs" if len(ids) else "no match: the text holds no token")
        return
    matched, before, after = ids[len(ids) - found.length :].tolist(), found.before.tolist(), found.after.tolist()
    source = source_of(corpus, found.document)
    path = "" if source is None else source[0].encode("utf-8", "backslashreplace").decode("utf-8")
    whence = "" if source is None else f" ({path}, its document {source[1]})"
    times = "once" if found.count == 1 else f"{found.count:,} times"
    draft = repr(_continued(tokenizer, matched, after)) if after else "nothing: the document ends here"
    following = [f"{_continued(tokenizer, matched, [token])!r} {count:,}" for token, count in found.next_tokens]
    typer.echo(f"match   {found.length} of {len(ids)} tokens, occurs {times}: {tokenizer.decode(matched)!r}")
    typer.echo(f"stands  in document {found.document:,}{whence}, at token {found.position:,}")
    typer.echo(f"around  {tokenizer.decode(before)!r} [{_continued(tokenizer, before, matched)!r}]")
    typer.echo(f"draft   {draft}")
    typer.echo(f"next    {', '.join(following) or 'nothing: every occurrence ends its document'}")


def _continued(tokenizer: TextTokenizer, before: list[int], ids: list[int]) -> str:
    """Text of ``ids`` after others: the first token of a text may lose its space."""
    last = before[-4:]
    return tokenizer.decode([*last, *ids]).removeprefix(tokenizer.decode(last))


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
