"""Memory of earlier responses: for each namespace a short list of frozen automata that grows like a log.

Words, beside those of `outpace.suffix.frozen`:

- A **response** is a document: the output of one request. Matches never reach from one into another.
- A **segment** is a frozen automaton over consecutive responses. Together the segments of a namespace hold all its
  responses that were not dropped, each once, oldest first.
- A new response becomes a segment of its own, or is merged with the last segments into one: so many that sizes shrink
  at least by a ratio from each to all that are newer, and that at most `MOST_SEGMENTS` remain. The ratio follows from
  the sizes. A token is so rebuilt about 11 times in 4 million, at about half a microsecond each.
- Over its limit of tokens, a namespace drops its oldest responses, down to seven eighths of it: what is left of the
  oldest segment is built anew, which would cost too much for every response.

Example: with segments of 9000 and 2000 tokens, 300 new tokens are a third segment; then 300 more give 9000, 2000, 600.

A suffix automaton can neither forget its oldest text nor grow under readers. Here a reader takes the tuple of segments
at one moment and keeps it as long as it likes; merging makes another tuple and puts it in its place.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from outpace.errors import ConfigError, InputError, LifecycleError, OutpaceError
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.memory_files import load_segments, save_segments
from outpace.suffix.segments import Texts, built, largest_token, lengths_of
from outpace.tree import Int32Array

_SPARE = 8  # over the limit, this part of the limit is freed
_EXIT_SECONDS = 30.0
_LARGEST = 2**31 - 1


@dataclass(slots=True)
class _Namespace:
    texts: Texts = field(default_factory=Texts)
    lengths: deque[int] = field(default_factory=deque)  # tokens of each response that was not dropped
    num_tokens: int = 0


@dataclass(slots=True)
class _Worker:
    """The thread that builds, while there is something to build."""

    thread: threading.Thread | None = None
    stops: bool = False


class ResponseMemory:
    """Earlier responses of each namespace, as frozen automata that others can match against.

    Segments are built in a thread of their own, which ends when there is nothing more to build. A process that ends waits
    for the segment that is being built, up to 30 seconds; what is remembered or saved later is built by its caller. A
    process that was forked has what was remembered before. Any thread may call any method.

    Args:
        max_tokens: Most tokens of a namespace. Of a longer response only the last ``max_tokens`` are remembered.
        background: Build in another thread. False: `remember` returns when the response can be found.
        max_namespaces: Beyond this many, the namespace that was used (remembered or asked for) least recently is dropped.
            A token takes about 24 bytes.
        fingerprint: Of the tokenizer, see `outpace.tokenizers.fingerprint`; saved, and compared when loaded.

    Raises:
        ConfigError: A limit is below 1.
    """

    def __init__(
        self,
        max_tokens: int = 2**22,
        background: bool = True,
        max_namespaces: int = 256,
        fingerprint: str | None = None,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_namespaces", max_namespaces)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of a memory must be an integer of at least 1, found {value!r}")
        self.max_tokens, self.max_namespaces = max_tokens, max_namespaces
        self.background, self.fingerprint = background, fingerprint
        self._spaces: OrderedDict[str, _Namespace] = OrderedDict()
        self._failure: Exception | None = None
        self._closed = False
        self._worker = _Worker()
        self._changed, self._process = threading.Condition(), os.getpid()
        self._building = threading.Lock()  # held by who builds: nobody else may replace segments meanwhile
        weakref.finalize(self, _stop, self._worker)  # also at the interpreter's exit

    # --- using it ----------------------------------------------------------------------------------------------------

    def remember(self, namespace: str, tokens: Int32Array | SequenceOf[int]) -> None:
        """Take a finished response in; a copy is made. An empty one leaves nothing.

        Args:
            namespace: Whose it is.
            tokens: ``int32[n]``.

        Raises:
            InputError: They are no integers, or an id is negative or does not fit into 32 bits.
            LifecycleError: The memory is closed.
            OutpaceError: What went wrong in the background since the last call. The response is taken in nevertheless.
        """
        text = _ids_of(tokens[-self.max_tokens :])
        with self._lock():
            if len(text):
                space = self._used(namespace)
                space.lengths.append(len(text))
                space.num_tokens += len(text)
                space.texts = self._trimmed(space, (*space.texts.pending, text))
            elif namespace in self._spaces:
                self._spaces.move_to_end(namespace)
            if self.background:
                self._start()
        if not self.background:
            self._build_all()
        self._raise_failure()

    def segments(self, namespace: str) -> tuple[FrozenAutomaton, ...]:
        """The automata of a namespace at this moment, oldest first, at most `MOST_SEGMENTS`; none if it is not known.

        Raises:
            LifecycleError: The memory is closed.
        """
        with self._lock():
            space = self._spaces.get(namespace)
            if space is None:
                return ()
            self._spaces.move_to_end(namespace)
            return space.texts.segments

    @property
    def token_counts(self) -> Mapping[str, int]:
        """Tokens remembered in each namespace, whether they can be found yet or not; least recently used first."""
        with self._lock():
            return {name: space.num_tokens for name, space in self._spaces.items()}

    def largest_token(self) -> int:
        """The largest token id that is remembered; -1 if nothing is.

        Raises:
            LifecycleError: The memory is closed.
        """
        with self._lock():
            found = [space.texts for space in self._spaces.values()]
        images = (largest_token(segment.image) for texts in found for segment in texts.segments)
        return max(max(images, default=-1), max((int(t.max()) for texts in found for t in texts.pending), default=-1))

    def flush(self) -> None:
        """Wait until everything that was remembered can be found.

        Raises:
            LifecycleError: The memory is closed.
            OutpaceError: What went wrong in the background since the last call.
        """
        while True:
            with self._lock():
                if not self._next_work():
                    break
                stops = self._worker.stops
                if not stops:
                    self._start()
                    self._changed.wait(0.1)  # a thread that somebody killed must not be waited for
            if stops:
                self._build_all(to_the_end=True)
        self._raise_failure()

    def close(self) -> None:
        """Forget everything, and wait up to 30 seconds for the thread to build what it is building. May be called again."""
        with contextlib.suppress(LifecycleError), self._lock():
            self._closed = True
            self._spaces.clear()
        _stop(self._worker)

    # --- on disk -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write everything to a folder: one file a segment, as `FrozenAutomaton.save` writes it, and a manifest.

        The manifest is replaced last and at once, so that the folder holds one whole state at any time; segments that were
        saved before are not written again, those that no longer belong to it are removed.

        Raises:
            InputError: It cannot be written.
            LifecycleError: The memory is closed.
            OutpaceError: What went wrong in the background since the last call.
        """
        self.flush()
        with self._lock():
            found = {name: space.texts.segments for name, space in self._spaces.items() if space.texts.segments}
        save_segments(Path(folder), found, self.fingerprint)

    def load(
        self, folder: str | Path, namespaces: SequenceOf[str] | None = None, vocab_size: int | None = None
    ) -> None:
        """Take in what `save` wrote; the segments are mapped, not read into memory.

        Args:
            folder: The folder.
            namespaces: Which of its namespaces; all by default. What this memory knew of them is forgotten.
            vocab_size: How many token ids the model knows, to refuse text with larger ones; not compared by default.

        Raises:
            CorpusError: It is no such folder, of another format version or tokenizer, damaged, or holds larger token ids;
                nothing was loaded.
            UnknownNameError: It has no such namespace.
            LifecycleError: The memory is closed.
        """
        found = load_segments(Path(folder), self.fingerprint, namespaces, vocab_size)
        with self._lock():
            for name, segments in found.items():
                self._spaces.pop(name, None)
                space = self._used(name)
                for automaton in segments:
                    space.lengths.extend(lengths_of(automaton.image).tolist())
                    space.num_tokens += automaton.num_tokens
                space.texts = Texts(segments)
                space.texts = self._trimmed(space, ())
            if self.background:
                self._start()
        if not self.background:
            self._build_all()

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock, as long as names and counts change."""
        self._own_locks()
        with self._changed:
            if self._closed:
                raise LifecycleError("the memory of earlier responses is closed")
            yield

    def _own_locks(self) -> None:
        """A forked process needs locks of its own: nobody there gives those back that others held."""
        if self._process != os.getpid():
            self._changed, self._building, self._process = threading.Condition(), threading.Lock(), os.getpid()
            self._worker.thread = None

    def _used(self, namespace: str) -> _Namespace:
        """A namespace that now is the most recently used one; made if it is new."""
        space = self._spaces.setdefault(namespace, _Namespace())
        self._spaces.move_to_end(namespace)
        while len(self._spaces) > self.max_namespaces:
            self._spaces.popitem(last=False)
        return space

    def _trimmed(self, space: _Namespace, pending: tuple[Int32Array, ...]) -> Texts:
        """The namespace's texts with other pending ones, and what is over the limit marked as dropped."""
        stale = space.texts.stale
        if space.num_tokens > self.max_tokens:
            least = self.max_tokens - self.max_tokens // _SPARE
            while space.num_tokens > least and len(space.lengths) > 1:
                space.num_tokens -= space.lengths.popleft()
                stale += 1
        return Texts(space.texts.segments, pending, stale)

    def _next_work(self) -> _Namespace | None:
        return next((space for space in self._spaces.values() if space.texts.has_work), None)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            kind = type(failure).__name__
            raise OutpaceError(f"memory of earlier responses: building failed with {kind}: {failure}") from failure

    # --- building ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """See that a thread builds, unless the process ends; the lock is held."""
        thread = self._worker.thread
        if self._worker.stops or self._next_work() is None or (thread is not None and thread.is_alive()):
            return
        self._worker.thread = threading.Thread(target=self._work, name="outpace-memory", daemon=True)
        self._worker.thread.start()

    def _work(self) -> None:
        try:
            self._build_all()
        finally:
            with contextlib.suppress(LifecycleError), self._lock():
                self._worker.thread = None
                self._start()  # what came when this thread had already found nothing
                self._changed.notify_all()

    def _build_all(self, to_the_end: bool = False) -> None:
        """Build until nothing is left, or, if not told to go on to the end, until the process ends."""
        self._own_locks()
        while to_the_end or not self._worker.stops:
            with self._building:
                if not self._build_next():
                    return

    def _build_next(self) -> bool:
        """Build the segments of one namespace; whether there was one to build, and the memory is open."""
        space = before = None
        with contextlib.suppress(LifecycleError), self._lock():
            space = self._next_work()
            before = space.texts if space is not None else None
        if space is None or before is None:
            return False
        try:
            segments = built(before)
        except Exception as error:  # shown at the next call, whatever it is
            with self._changed:
                self._failure = error
                self._give_up(space, before)
        else:
            with self._changed:
                now = space.texts
                space.texts = Texts(segments, now.pending[len(before.pending) :], now.stale - before.stale)
        return True

    def _give_up(self, space: _Namespace, before: Texts) -> None:
        """Forget the responses that could not be built in; if there were none, what could not be built again."""
        now, num_pending = space.texts, len(before.pending)
        segments = before.segments if num_pending else ()
        old = sum(segment.num_documents for segment in before.segments)
        lost = (old, old + num_pending) if num_pending else (0, old)  # counted with the stale ones, which come first
        first, last = (max(place - now.stale, 0) for place in lost)
        lengths = list(space.lengths)
        space.lengths = deque(lengths[:first] + lengths[last:])
        space.num_tokens = sum(space.lengths)
        gone = max(min(lost[1], now.stale) - lost[0], 0)
        space.texts = Texts(segments, now.pending[num_pending:], now.stale - gone)


def _ids_of(tokens: Int32Array | SequenceOf[int]) -> Int32Array:
    """A copy of token ids, ``int32[n]``.

    Raises:
        InputError: They are no integers from 0 to 2**31 - 1.
    """
    found = np.asarray(tokens).reshape(-1)
    if not len(found):
        return np.empty(0, np.int32)
    if found.dtype.kind not in "iu":  # of Python's integers that fit no type of NumPy's, others
        raise InputError(f"token ids must be integers from 0 to {_LARGEST}, found {found.dtype} numbers")
    for value in (found.min(), found.max()):
        if not 0 <= value <= _LARGEST:
            raise InputError(f"token ids must be from 0 to {_LARGEST}, found {value}")
    return found.astype(np.int32)


def _stop(worker: _Worker) -> None:
    worker.stops = True
    thread = worker.thread
    if thread is not None and thread.is_alive() and thread is not threading.current_thread():
        thread.join(_EXIT_SECONDS)
