"""Write docs/reference from the docstrings of the public names and from the commands' help.

python scripts/build_reference.py            writes the pages
python scripts/build_reference.py --check    exit status 1 if a committed page is out of date
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.core

import outpace
import outpace.cli
import outpace.errors

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/build_reference.py from docstrings; edit those. -->"
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
GROUPS = {
    "Generating": [
        "Engine",
        "SamplingParams",
        "Output",
        "Progress",
        "Figures",
        "EngineFigures",
        "TokenLogprobs",
        "generate",
    ],
    "Options": ["EngineConfig", "LoadOptions"],
    "Extending": [
        "Drafter",
        "DraftTrees",
        "Verdicts",
        "SignalNeeds",
        "Signals",
        "Origin",
        "Constraint",
        "OracleDrafter",
        "available_drafters",
        "build_drafter",
    ],
}
IN_OTHER_PAGES = {"OutpaceError", "__version__"}


def pages() -> dict[str, str]:
    """Each page's file name and content."""
    return {"python.md": python_page(), "errors.md": errors_page(), "command-line.md": command_page()}


# --- Python ----------------------------------------------------------------------------------------------------------


def python_page() -> str:
    grouped = {name for names in GROUPS.values() for name in names}
    if grouped | IN_OTHER_PAGES != set(outpace.__all__):
        raise SystemExit(f"GROUPS and outpace.__all__ differ: {(grouped | IN_OTHER_PAGES) ^ set(outpace.__all__)}")
    lead = "Every public name is imported from `outpace`. Errors have [a page of their own](errors.md)."
    lines = [NOTE, "", "# Python", "", lead]
    for title, names in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", *describe(name, getattr(outpace, name))]
    return "\n".join(lines) + "\n"


def describe(name: str, thing: Any) -> list[str]:
    """A section about one class or function."""
    if inspect.isfunction(thing):
        return [f"### `{name}`", "", *signature_of(name, thing), "", *markdown(thing.__doc__)]
    lines = [f"### `{name}`", ""]
    has_fields = dataclasses.is_dataclass(thing)
    if not has_fields and not issubclass(thing, enum.Enum) and "__init__" in vars(thing) and not is_protocol(thing):
        lines += [*signature_of(name, thing.__init__), ""]
    lines += markdown(thing.__doc__, types_of(thing) if has_fields else {})
    if issubclass(thing, enum.Enum):
        comments = dict(re.findall(r"^\s+([A-Z_]+) = .*?#\s*(.+)$", inspect.getsource(thing), re.MULTILINE))
        lines += ["", *(f"- `{member.name}` ({member.value}): {comments[member.name]}" for member in thing)]
    for method_name, method in methods_of(thing):
        lines += ["", f"#### `{name}.{method_name}`", ""]
        if isinstance(method, property):
            lines += [f"Property, {code(annotation(method.fget, 'return'))}.", "", *markdown(method.__doc__)]
        else:
            function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
            lines += [*signature_of(method_name, function), "", *markdown(function.__doc__)]
    return lines


def is_protocol(thing: type) -> bool:
    return bool(getattr(thing, "_is_protocol", False))


def methods_of(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class itself documents, in the order of its source."""
    for name, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, value


def types_of(thing: Any) -> dict[str, str]:
    """Type and default of each field of a dataclass."""
    found = {}
    for field in dataclasses.fields(thing):
        text = str(field.type)
        if field.default is not dataclasses.MISSING:
            text += f" = {field.default!r}"
        elif field.default_factory is not dataclasses.MISSING:
            text += f" = {field.default_factory()!r}"
        found[field.name] = text
    return found


def annotation(function: Any, name: str) -> str:
    return str(function.__annotations__.get(name, "Any"))


def signature_of(name: str, function: Any) -> list[str]:
    """The signature as code, a parameter a line where it is long."""
    parts, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        text = f"{prefix}{parameter.name}: {annotation(function, parameter.name)}"
        if parameter.default is not parameter.empty:
            shown = "..." if inspect.isfunction(parameter.default) else repr(parameter.default)
            text += f" = {shown}"
        parts.append(text)
    returns = annotation(function, "return") if "return" in function.__annotations__ else None
    end = f" -> {returns}" if returns and not function.__name__.startswith("__") else ""
    whole = f"{name}({', '.join(parts)}){end}"
    if len(whole) > 100:
        whole = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])
    return ["```text", *whole.splitlines(), "```"]


def code(text: str) -> str:
    return f"`{text}`"


# --- Docstrings --------------------------------------------------------------------------------------------------------


def markdown(docstring: str | None, types: dict[str, str] | None = None) -> list[str]:
    """A docstring in Google's form, as Markdown lines.

    Args:
        docstring: As written.
        types: For the entries of a section ``Attributes``, what is shown behind the name.
    """
    lines = inspect.cleandoc(docstring or "").splitlines()
    result: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        title = line.removesuffix(":")
        if line.endswith(":") and title in SECTIONS:
            block, at = indented(lines, at + 1)
            shown = types or {}
            result += [f"**{'Parameters' if title == 'Args' else title}**", "", *section(title, block, shown)]
        elif line.endswith("::"):
            block, at = indented(lines, at + 1)
            lead = line[:-2] + (":" if line != "::" else "")
            result += [*([inline(lead), ""] if lead else []), "```text", *block, "```", ""]
        else:
            result.append(inline(line))
            at += 1
    while result and not result[-1]:
        result.pop()
    return result


def indented(lines: list[str], at: int) -> tuple[list[str], int]:
    """The indented block that begins at ``at``, without its indentation, and where it ends."""
    end = at
    while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
        end += 1
    return textwrap.dedent("\n".join(lines[at:end])).strip("\n").splitlines(), end


def section(title: str, block: list[str], types: dict[str, str]) -> list[str]:
    if title in ("Returns", "Yields"):
        return [*(inline(line) for line in block), ""]
    entries: list[str] = []
    for line in block:
        match = re.match(r"(\*{0,2}\w+): (.*)", line)
        if match is not None:
            shown = f" ({code(types[match[1]])})" if match[1] in types else ""
            entries.append(f"- `{match[1]}`{shown}: {inline(match[2])}")
        elif line.strip():
            entries.append("  " + inline(line.strip()))
    return [*entries, ""]


def inline(text: str) -> str:
    return text.replace("``", "`")


# --- Errors ------------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    tree = markdown(outpace.errors.__doc__)
    lines = [NOTE, "", "# Errors", "", *tree, ""]
    lines += ["`OutpaceError` and `OutpaceWarning` are in `outpace`, all others in `outpace.errors`."]
    for name, thing in vars(outpace.errors).items():
        if inspect.isclass(thing) and issubclass(thing, outpace.OutpaceError):
            base = thing.__bases__[0].__name__
            lines += ["", f"## `{name}`", "", f"A kind of `{base}`.", "", *markdown(thing.__doc__)]
    return "\n".join(lines) + "\n"


# --- Commands ----------------------------------------------------------------------------------------------------------


def command_page() -> str:
    root: Any = typer.main.get_command(outpace.cli.app)
    lines = [NOTE, "", "# Commands", "", *help_text(root.help), "", *options(root)]
    for name, command in each_command(root):
        lines += [
            "",
            f"## `outpace {name}`",
            "",
            *help_text(command.help),
            *(["", *options(command)] if options(command) else []),
        ]
    return "\n".join(lines) + "\n"


def each_command(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The commands of a group, each followed by its own if it is a group."""
    for name, command in group.commands.items():
        yield before + name, command
        if hasattr(command, "commands"):
            yield from each_command(command, f"{before}{name} ")


def help_text(text: str) -> list[str]:
    """Help, with indented examples as code."""
    result: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("    "):
            if result and result[-1] == "```":  # consecutive examples share a block
                result.pop()
            else:
                result += ["", "```text"]
            result += [*textwrap.dedent(paragraph).splitlines(), "```"]
        else:
            result += ["", *paragraph.splitlines()]
    return result[1:]


def options(command: Any) -> list[str]:
    """Arguments and options as a list."""
    lines = []
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        is_argument = isinstance(parameter, typer.core.TyperArgument)
        is_flag = getattr(parameter, "is_flag", False)
        metavar = parameter.metavar or ("" if is_flag else parameter.name.upper())
        spellings = [metavar] if is_argument else [*parameter.opts, *parameter.secondary_opts]
        value = "" if is_argument or not metavar else f" {metavar}"
        lines.append(f"- {', '.join(code(s) for s in spellings[:-1])}{', ' if len(spellings) > 1 else ''}"
                     f"{code(spellings[-1] + value)}: {parameter.help}{default_of(parameter)}")  # fmt: skip
    return lines


def default_of(parameter: Any) -> str:
    if parameter.required:
        return " Required."
    default = parameter.default
    if default is None or callable(default) or default == ():
        return ""
    if getattr(parameter, "is_flag", False):
        if not parameter.secondary_opts:
            return ""
        default = (parameter.opts if default else parameter.secondary_opts)[0]
    return f" Default: `{default}`."


def main() -> int:
    stale = [name for name, text in pages().items() if not _same(FOLDER / name, text)]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"out of date: {', '.join(stale)}; run python scripts/build_reference.py", file=sys.stderr)
        return bool(stale)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
