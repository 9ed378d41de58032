"""Who takes part in the next step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from outpace.engine.request import Request
from outpace.model import KVArena
from outpace.model.rope import RopeSwitch


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
    def is_plain_decoding(self) -> bool:
        """Whether everybody has one pending token and verifies: a step whose time says what verifying costs."""
        return all(self.verifies) and all(chunk == 1 for chunk in self.chunks)


class Scheduler:
    """First come, first served, up to a batch size, while the arena has room.

    Long prompts are computed in chunks, in the same passes as other requests' verification.

    Args:
        arena: Where keys and values go.
        max_batch_size: Most running requests.
        max_step_tokens: Pending tokens of one step; more only where a prompt cannot be cut (see `RopeSwitch`).
        rope_switch: The model's, or None.
    """

    def __init__(
        self, arena: KVArena, max_batch_size: int, max_step_tokens: int, rope_switch: RopeSwitch | None
    ) -> None:
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
            wanted = self._drop_cache_at_switch(request)
            uncut = self._switch is not None and self._switch.is_long(request.sequence.num_tokens)
            chunk = wanted if uncut else min(wanted, budget)
            if chunk <= 0:
                continue
            budget -= chunk
            requests.append(request)
            chunks.append(chunk)
            verifies.append(chunk == len(request.sequence.pending))
        return Batch(requests, chunks, verifies)

    def preempt(self, request: Request) -> None:
        """Take back a request's keys and values; it will be computed again when there is room."""
        self._arena.reset(request.sequence.key)
        request.sequence.drop_cache()
        request.figures.preemptions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)

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

    def _drop_cache_at_switch(self, request: Request) -> int:
        """Pending tokens that the request wants to compute now; all of them again where it has crossed the switch."""
        sequence = request.sequence
        switch = self._switch
        if switch is not None and switch.recompute and switch.is_long(sequence.num_tokens):
            if 0 < sequence.num_cached <= switch.length:
                self._arena.reset(sequence.key)
                sequence.drop_cache()
        elif request.num_samples > 1:
            # Stop before the last prompt token: every sample draws its own token from there.
            return min(len(sequence.pending), sequence.num_prompt - 1 - sequence.num_cached)
        return len(sequence.pending)
