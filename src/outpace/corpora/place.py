"""Where a corpus is made: beside its place, and put there by one rename."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from outpace._files import sync_folder
from outpace.errors import ConfigError, CorpusError
from outpace.suffix.corpus import FORMAT, MANIFEST

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BUILDING, _REPLACED = "building", "replaced"
_ours: set[Path] = set()  # folders of builds that are under way in this process


def usable_place(out: Path, force: bool) -> Path:
    """The folder to make, as an absolute path without links.

    Raises:
        ConfigError: Something is there that may not be replaced.
    """
    place = Path(os.path.realpath(out))
    _restore_replaced(place)
    if not os.path.lexists(place) or (place.is_dir() and not any(place.iterdir())):
        return place
    if not force:
        raise ConfigError(f"{str(out)!r} exists already; --force replaces a corpus")
    if not is_corpus(place):
        raise ConfigError(f"{str(out)!r} exists and is no corpus: it will not be replaced")
    return place


class Building:
    """A folder in which a corpus is made.

    Attributes:
        folder: Where to make it.
        notes: What was found beside it: left by builds that died, or by one that is under way.
    """

    def __init__(self, place: Path, force: bool) -> None:
        self._place, self._force = place, force
        self.notes: tuple[str, ...] = ()
        own = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.folder, self._old = _beside(place, _BUILDING, own), _beside(place, _REPLACED, own)

    def make(self) -> None:
        """Make the folder, and delete what builds that are dead left beside it."""
        _ours.update((self.folder, self._old))
        self.notes = tuple(_clear(self._place))
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir()

    def publish(self) -> None:
        """Put the folder in its place; its files are on the disk already.

        Raises:
            ConfigError: Somebody else made something there meanwhile.
        """
        sync_folder(self.folder)
        if self._force and self._place.exists():
            os.rename(self._place, self._old)
        try:
            os.rename(self.folder, self._place)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise ConfigError(
                    f"{str(self._place)!r} was made by somebody else meanwhile; --force replaces a corpus"
                ) from error
            raise
        sync_folder(self._place.parent)

    def clean(self) -> None:
        """Leave nothing beside the place; an old corpus goes back unless the new one is there, or somebody else's."""
        if not self.folder.exists():  # it was published
            shutil.rmtree(self._old, ignore_errors=True)
        elif self._old.exists():
            with contextlib.suppress(OSError):
                os.rename(self._old, self._place)
        shutil.rmtree(self.folder, ignore_errors=True)
        _ours.difference_update((self.folder, self._old))


@contextlib.contextmanager
def building_folder(place: Path, force: bool) -> Iterator[Building]:
    """A `Building` whose folder is gone afterwards: published, or deleted."""
    building = Building(place, force)
    try:
        building.make()
        yield building
    finally:
        building.clean()


@contextlib.contextmanager
def translated(place: Path) -> Iterator[None]:
    """Turn errors of the file system into one that says what it means.

    Raises:
        CorpusError: The disk is full, or the folder cannot be written to.
    """
    try:
        yield
    except MemoryError as error:
        raise CorpusError(
            f"not enough memory to build {str(place)!r}: give a smaller --memory, for smaller shards; nothing was left behind"
        ) from error
    except OSError as error:
        # NumPy's writer does not pass the reason on; it says how much was written.
        if error.errno in _FULL or (error.errno is None and "written" in str(error)):
            free = shutil.disk_usage(next(parent for parent in place.parents if parent.exists())).free
            raise CorpusError(
                f"no room to build {str(place)!r}: {error.strerror or error} ({free / 1e9:,.1f} GB free there); a build needs "
                "about 30 bytes a token; nothing was left behind"
            ) from error
        raise CorpusError(f"cannot write {str(place)!r}: {error.strerror or error}") from error


def is_corpus(place: Path) -> bool:
    """Whether a folder is a corpus, a damaged one perhaps, or one of another version."""
    try:
        return json.dumps(FORMAT).encode() in (place / MANIFEST).read_bytes()
    except OSError:
        return False


def _beside(place: Path, what: str, own: str) -> Path:
    return place.parent / f".{place.name}.{what}-{own}"


def _left(place: Path, what: str) -> Iterator[tuple[Path, int, bool]]:
    """Folders beside ``place`` that builds made: each with the number of its process, and whether it may be in use."""
    for folder in sorted(place.parent.glob(f".{_escaped(place.name)}.{what}-*")):
        process = folder.name.removeprefix(f".{place.name}.{what}-").partition("-")[0]
        if process.isdecimal():
            number = int(process)
            # Our own number may have been that of another process, which is dead.
            yield folder, number, folder in _ours if number == os.getpid() else _is_alive(number)


def _clear(place: Path) -> Iterator[str]:
    """Delete what builds that are dead left beside ``place``."""
    for what in (_BUILDING, _REPLACED):
        for folder, process, in_use in _left(place, what):
            if in_use:
                yield f"process {process} seems to build the same corpus, in {str(folder)!r}"
                continue
            shutil.rmtree(folder, ignore_errors=True)
            yield f"deleted what a build that did not end had left: {str(folder)!r}"


def _restore_replaced(place: Path) -> None:
    """Put back a corpus that a build died between moving away and replacing."""
    if os.path.lexists(place):
        return
    for folder, _, in_use in _left(place, _REPLACED):
        if not in_use:
            os.rename(folder, place)
            return


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
