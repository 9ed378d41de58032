"""Who takes part in the next step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from outpace.engine.request import Request
from outpace.model import KVArena
from outpace.model.rope import RopeSwitch

_LARGEST_MASK = 2**24  # entries of the mask of one chunk behind cached tokens
_SMALLEST_CHUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's requests.

    Attributes:
        requests: ``B`` of them.
        chunks: Pending tokens that each computes in this step.
        verifies: Whether that is all of its pending tokens, so that tokens can be committed.
    """

    requests: list[Request]
    chunks: list[int]
    verifies: list[bool]

    @property
    def decoding(self) -> int:
        """How many have one pending token and verify."""
        return sum(verifies and chunk == 1 for verifies, chunk in zip(self.verifies, self.chunks, strict=True))

    @property
    def is_plain_decoding(self) -> bool:
        """Whether everybody has one pending token and verifies: a step whose time says what verifying costs."""
        return all(self.verifies) and all(chunk == 1 for chunk in self.chunks)


class Scheduler:
    """First come, first served, up to a batch size, while the arena has room.

    Long prompts are computed in chunks, in the same passes as other requests' verification.

    Args:
        arena: Where keys and values go.
        max_batch_size: Most running requests.
        max_step_tokens: Prompt tokens of one step; more only where a prompt cannot be cut (see `RopeSwitch`).
        rope_switch: The model's, or None.
        on_drop: Told of each request whose keys and values are given up.
    """

    def __init__(
        self,
        arena: KVArena,
        max_batch_size: int,
        max_step_tokens: int,
        rope_switch: RopeSwitch | None,
        on_drop: Callable[[Request], None],
    ) -> None:
        self._on_drop = on_drop
        self._arena = arena
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._switch = rope_switch
        self._last_side = False
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def active(self) -> list[Request]:
        """All requests that have not finished, in the order of their arrival."""
        return [*self.running, *self.waiting]

    def schedule(self) -> Batch:
        """Share out the step's tokens among those who run."""
        requests, chunks, verifies = [], [], []
        budget = self._max_step_tokens
        for request in self._one_side(self.running):
            chunk = self._chunk(request, budget)
            if chunk <= 0:
                continue
            if chunk > 1:  # whoever decodes takes part in every step
                budget -= chunk
            requests.append(request)
            chunks.append(chunk)
            verifies.append(chunk == len(request.sequence.pending))
        return Batch(requests, chunks, verifies)

    def preempt(self, request: Request) -> None:
        """Take back a request's keys and values; it will be computed again when there is room."""
        self.drop_cache(request)
        request.figures.preemptions += 1
        if request in self.running:
            self.running.remove(request)
            self.waiting.appendleft(request)

    def drop_cache(self, request: Request) -> None:
        """Make every token of a request pending again."""
        self._arena.reset(request.sequence.key)
        request.sequence.drop_cache()
        self._on_drop(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has finished."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def admit(self) -> None:
        """Let those run who came first and fit."""
        while self.waiting and len(self.running) < self._max_batch_size:
            unborn = sum(r.num_samples - 1 for r in self.running)
            outstanding = sum(len(r.sequence.pending) + 64 for r in self.running)
            needed = self.waiting[0].sequence.num_tokens + 1
            if self.running and (
                unborn + len(self.running) + self.waiting[0].num_samples > self._max_batch_size
                or outstanding + needed > self._arena.num_available
            ):
                return
            request = self.waiting.popleft()
            self.running.append(request)

    def _one_side(self, requests: list[Request]) -> list[Request]:
        """Requests that may share a pass; both sides of a switch take turns."""
        if self._switch is None:
            return requests
        sides = {self._switch.is_long(request.sequence.num_tokens) for request in requests}
        side = next(iter(sides)) if len(sides) == 1 else not self._last_side
        self._last_side = side
        return [r for r in requests if self._switch.is_long(r.sequence.num_tokens) == side]

    def _chunk(self, request: Request, budget: int) -> int:
        """Pending tokens that the request computes in this step."""
        sequence, switch = request.sequence, self._switch
        if switch is not None and switch.is_long(sequence.num_tokens):
            if switch.recompute and 0 < sequence.num_cached <= switch.length:
                self.drop_cache(request)  # it has crossed the switch
            return len(sequence.pending)  # uncut: the whole pass is rotated by its longest position
        wanted = len(sequence.pending)
        if wanted == 1:
            return 1
        if request.num_samples > 1:
            # Stop before the last prompt token: every sample draws its own token from there.
            wanted = sequence.num_prompt - 1 - sequence.num_cached
        largest = (
            max(_SMALLEST_CHUNK, _LARGEST_MASK // (sequence.num_cached + wanted)) if sequence.num_cached else wanted
        )
        return min(wanted, budget, largest)
