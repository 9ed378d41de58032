"""``outpace chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli.common import (
    DEFAULT_MODEL,
    AdapterOption,
    CorpusOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxNodesOption,
    MemoryOption,
    ModelOption,
    SkipCorporaOption,
    ThreadsOption,
    TrustOption,
    err_console,
    load_engine,
    load_options,
)
from outpace.cli.conversation import Conversation, Tally
from outpace.cli.interrupts import interruptible
from outpace.cli.origins import OriginWriter, Painter, out_console, shares
from outpace.errors import OutpaceError, PromptError, UnknownNameError

if TYPE_CHECKING:
    from rich.console import Console

_HELP = "\n\n".join(
    (
        "Talk with a model, and see in colour what was drafted and accepted.",
        "Answers come as they are made. Ctrl-C stops an answer, Ctrl-D leaves. A message that spans lines begins and ends "
        'with `"""`. Type `/help` for the commands.',
        "Messages may come through a pipe, one a line; then standard output holds the answers alone, and the exit status "
        "is 2 if something could not be answered.",
        "Examples:",
        "    outpace chat",
        "    outpace chat --model ./my-llama --system 'Answer briefly.' --temperature 0.7 --seed 1",
        "    echo 'How much is 12 * 7?' | outpace chat",
    )
)
_COMMANDS = {
    "/help": "this list",
    "/drafter": "who guesses, and who else could; /drafter NAME changes it",
    "/stats": "tokens/s, MAT and accepted drafts, of the last answer and of all",
    "/clear": "forget the conversation",
    "/exit": "leave (so does Ctrl-D)",
}
_QUOTES = '"""'


def chat(
    model: ModelOption = DEFAULT_MODEL,
    drafter: DrafterOption = "suffix",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Most tokens of an answer.")
    ] = 256,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="S", help="For sampling; drawn if not given.")] = None,
    max_nodes: MaxNodesOption = 64,
    memory: MemoryOption = False,
    corpus: CorpusOption = None,
    skip_unusable_corpora: SkipCorporaOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    adapter: AdapterOption = None,
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Talk; see ``_HELP``."""
    from outpace.config import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    options = load_options(dtype, device, adapter, trust_remote_code)
    console = err_console()
    options |= {
        "memory": memory, "corpora": tuple(corpus or ()), "skip_unusable_corpora": skip_unusable_corpora
    }  # fmt: skip
    engine = load_engine(console, model, threads, drafter=drafter, max_nodes=max_nodes, max_batch_size=1, **options)
    session = _Session(console, Conversation(engine, params, system))
    session.greet(model)
    status = session.run()
    if status:
        raise typer.Exit(status)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("chat", help=_HELP)(chat)


class _Session:
    """Reads messages and commands, and shows answers on standard output and everything else on standard error."""

    def __init__(self, console: Console, conversation: Conversation) -> None:
        self._console, self._conversation = console, conversation
        self._out = out_console()  # also lets characters pass that its encoding lacks
        self._typed = sys.stdin.isatty()
        self._failed = False
        if self._typed:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # arrow keys in `input`, where there is such a thing

    def greet(self, model: str) -> None:
        """Say who answers, and how to leave."""
        if not self._typed:
            return
        name = self._conversation.engine.drafter.name
        self._console.print(f"{model} with drafter {name}. /help lists the commands, Ctrl-D leaves.")
        if Painter(self._out).colours:
            self._console.print("Coloured text was drafted and accepted; the rest is the model's own.", style="dim")

    def run(self) -> int:
        """Until the end of input or ``/exit``; returns the exit status."""
        while True:
            try:
                line = self._read()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._typed:
                    return 130
                self._console.print("\n(Ctrl-D or /exit leaves)", style="dim")
                continue
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif not self._answer(line.strip()):
                return 130
        return 2 if self._failed and not self._typed else 0

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self) -> str:
        """One message or command.

        Raises:
            EOFError: There is no more.
            PromptError: Standard input is not UTF-8.
        """
        line = self._read_line("> ")
        if not line.lstrip().startswith(_QUOTES):
            return line
        text = line.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            try:
                text += "\n" + self._read_line(". ")
            except EOFError:
                return f" {text}"  # ends with the input
        return " " + text.rstrip().removesuffix(_QUOTES)  # a space: what is quoted is no command

    def _read_line(self, prompt: str) -> str:
        if self._typed:
            try:
                return input(prompt)
            except EOFError:
                print()
                raise
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8: byte {error.object[error.start]:#04x}") from error
        if not line:
            raise EOFError
        return line.rstrip("\n")

    # --- answering ---------------------------------------------------------------------------------------------------

    def _answer(self, text: str) -> bool:
        """Answer one message; False if Ctrl-C ended it and there is nobody to ask what now."""
        talk = self._conversation
        try:
            with interruptible() as pressed:
                dropped = talk.make_room(text)
                if dropped:
                    turns = "turn was" if dropped == 1 else f"{dropped} turns were"
                    self._note(
                        f"(context of {talk.engine.target.context_length:,} tokens full: the oldest {turns} forgotten)"
                    )
                writer = OriginWriter(talk.engine.tokenizer)
                reason: int | str | None = None
                for progress in talk.ask(text, pressed):
                    writer.write(progress)
                    if progress.output is not None:
                        reason = progress.output.stop_reason
                print(flush=True)
                stopped = pressed()
        except OutpaceError as error:
            self._fail(error)
            return True
        except KeyboardInterrupt:  # pressed twice: at once, in the middle of a step
            if not self._typed:
                raise
            print(flush=True)
            self._note("(stopped)")
            return True
        if stopped:
            self._note("(stopped)")
        elif reason == "context":
            self._note("(the context is full; /clear starts anew)")
        self._note(f"({_summary(talk.last)})")
        return self._typed or not stopped

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim")

    def _fail(self, error: OutpaceError) -> None:
        self._failed = True
        self._console.print(f"outpace: {' '.join(str(error).split())}")

    # --- commands ----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> bool:
        """Do what it says; False if it says to leave."""
        name, _, argument = line.strip().partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                for command, what in _COMMANDS.items():
                    self._console.print(f"  {command:<9} {what}")
                self._note(f"a message of several lines begins and ends with {_QUOTES}")
            case "/clear":
                self._conversation.clear()
                self._note("(forgotten)")
            case "/stats":
                self._show_stats()
            case "/drafter":
                self._use_drafter(argument.strip())
            case _:
                self._fail(UnknownNameError("command", name, _COMMANDS))
        return True

    def _use_drafter(self, spec: str) -> None:
        from outpace.draft import available_drafters

        if not spec:
            self._console.print(f"in use: {self._conversation.engine.drafter.name}")
            for name, what in available_drafters(usable_only=True).items():
                self._console.print(f"  {name:<9} {what}")
            return
        try:
            self._conversation.use_drafter(spec)
        except OutpaceError as error:
            self._fail(error)
            return
        self._note(f"(drafter {self._conversation.engine.drafter.name})")

    def _show_stats(self) -> None:
        talk = self._conversation
        if not talk.session.answers:
            self._console.print("no answer yet")
            return
        answers = f"{talk.session.answers} {'answer' if talk.session.answers == 1 else 'answers'}"
        self._console.print(f"  last answer: {_summary(talk.last)}")
        self._console.print(f"  {answers}: {_summary(talk.session)}")


def _summary(tally: Tally) -> str:
    """For instance ``38 tokens, 210.3 tokens/s, 1.84 tokens a step; accepted drafts: dynamic 42%``."""
    parts = [f"{tally.tokens} tokens"]
    if tally.tokens_per_s is not None:
        parts.append(f"{tally.tokens_per_s:.1f} tokens/s")
    if tally.mean_accepted_tokens is not None:
        parts.append(f"{tally.mean_accepted_tokens:.2f} tokens a step")
    accepted = shares(tally.origins, tally.tokens)
    return ", ".join(parts) + f"; accepted drafts: {accepted or 'none'}"
