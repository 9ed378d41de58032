"""A memory of earlier responses on disk.

::

    manifest.json         format, tokenizer, and for each namespace its segments with sizes and checksums
    3f0c....frozen        one file a segment, named by the begin of its SHA-256, so that none is ever overwritten
    ...

What the manifest does not name does not count, and the manifest is replaced at once: an interrupted save leaves what was
there before, and at most files too many, which the next save removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from outpace._files import sync_folder
from outpace.errors import CorpusError, InputError, UnknownNameError
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.segments import largest_token

FORMAT = "outpace memory"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_SUFFIX = ".frozen"
_NAME_DIGITS = 32
# What a save writes besides the manifest: segments, and files that an interrupted one left half-written.
_OURS = re.compile(
    rf"[0-9a-f]{{{_NAME_DIGITS}}}\{_SUFFIX}|\.([0-9a-f]{{{_NAME_DIGITS}}}\{_SUFFIX}|manifest\.json)\..+\.part"
)
_CHUNK = 2**23

Segments = Mapping[str, tuple[FrozenAutomaton, ...]]  # of each namespace


def save_segments(folder: Path, found: Segments, fingerprint: str | None) -> None:
    """Write the segments of all namespaces, least recently used first; see `outpace.suffix.memory.ResponseMemory.save`.

    Raises:
        InputError: The folder holds something else, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            _read_manifest(folder)  # a corpus, for instance, is not replaced
        elif not all(_OURS.fullmatch(path.name) for path in folder.iterdir()):
            raise InputError(f"cannot save a memory to {str(folder)!r}: the folder is not empty, and holds no memory")
        spaces: list[dict[str, Any]] = [
            {"name": name, "segments": [_save(folder, s) for s in own]} for name, own in found.items()
        ]
        content: dict[str, Any] = {
            "format": FORMAT, "version": FORMAT_VERSION, "tokenizer": fingerprint, "namespaces": spaces
        }  # fmt: skip
        content["checksum"] = _checksum_of(content)
        _replace(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"cannot save a memory to {str(folder)!r}: {error.strerror or error}") from error
    named = {segment["file"] for space in spaces for segment in space["segments"]}
    for path in folder.iterdir():
        if path.name not in named and _OURS.fullmatch(path.name):
            with contextlib.suppress(OSError):  # some systems keep a file that is mapped; the next save tries again
                path.unlink()


def load_segments(
    folder: Path,
    fingerprint: str | None,
    namespaces: SequenceOf[str] | None = None,
    vocab_size: int | None = None,
) -> dict[str, tuple[FrozenAutomaton, ...]]:
    """Read the segments of all namespaces, or of some; see `outpace.suffix.memory.ResponseMemory.load`.

    Every file is read once and compared with its checksum.

    Raises:
        CorpusError: It is no memory, of another format version or tokenizer, damaged, or holds a token id that is not
            below ``vocab_size``.
        UnknownNameError: It has no such namespace.
    """
    content = _read_manifest(folder)
    other = content["tokenizer"]
    if fingerprint is not None and other is not None and fingerprint != other:
        raise CorpusError(
            f"memory {str(folder)!r} holds ids of the tokenizer with fingerprint {other[:12]}, and this one's is "
            f"{fingerprint[:12]}: their ids mean different texts"
        )
    found = {space["name"]: space["segments"] for space in content["namespaces"]}
    for name in namespaces or ():
        if name not in found:
            raise UnknownNameError("namespace", name, found, f"In memory {str(folder)!r}.")
    opened = {
        name: tuple(_open(folder, segment) for segment in segments)
        for name, segments in found.items()
        if namespaces is None or name in namespaces
    }
    if vocab_size is not None:
        largest = max((largest_token(s.image) for segments in opened.values() for s in segments), default=-1)
        if largest >= vocab_size:
            raise CorpusError(
                f"memory {str(folder)!r} holds token id {largest}, and the model knows {vocab_size} ids: it is another "
                "tokenizer's"
            )
    return opened


def _save(folder: Path, automaton: FrozenAutomaton) -> dict[str, Any]:
    checksum = hashlib.sha256(automaton.image.astype("<i4", copy=False).data).hexdigest()
    path = folder / (checksum[:_NAME_DIGITS] + _SUFFIX)
    if not path.exists() or _checksum_of_file(path) != checksum:
        automaton.save(path)
    return {
        "file": path.name,
        "bytes": automaton.nbytes,
        "documents": automaton.num_documents,
        "tokens": automaton.num_tokens,
        "sha256": checksum,
    }


def _open(folder: Path, segment: Mapping[str, Any]) -> FrozenAutomaton:
    path = folder / segment["file"]
    try:
        size, found = path.stat().st_size, _checksum_of_file(path)
    except OSError as error:
        raise CorpusError(f"memory {str(folder)!r}: {path} cannot be read: {error.strerror or error}") from error
    if size != segment["bytes"]:
        raise CorpusError(f"{path} has {size:,} bytes, and the manifest says {segment['bytes']:,}: it is damaged")
    if found != segment["sha256"]:
        raise CorpusError(
            f"{path} is damaged: its SHA-256 is {found[:12]}..., and the manifest says {segment['sha256'][:12]}..."
        )
    return FrozenAutomaton.open(path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        problem = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise CorpusError(f"{str(folder)!r} is no memory: {problem}") from error
    except OSError as error:
        raise CorpusError(f"cannot read memory {str(folder)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is damaged: invalid JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorpusError(f"{str(folder)!r} is no memory: {MANIFEST} is not of format {FORMAT!r}")
    if content.get("version") != FORMAT_VERSION:
        raise CorpusError(
            f"memory {str(folder)!r} has format version {content.get('version')}, this program reads {FORMAT_VERSION}"
        )
    if content.pop("checksum", None) != _checksum_of(content):
        raise CorpusError(f"{path} was changed or is damaged: its checksum does not fit")
    return content


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum_of_file(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write a file beside, put it into place, and see both onto the disk: nothing of the old state may go before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)
