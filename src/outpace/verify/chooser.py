"""What one request remembers between verify steps, and how it chooses a token."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from outpace.config import SamplingParams
from outpace.errors import ConfigError, ConstraintError, NonFiniteLogitsError
from outpace.tree import BoolArray, Int32Array
from outpace.verify.processors import History, LogitsPipeline, Text
from outpace.verify.sampling import gumbel_argmax


class Chooser:
    """One request's way of choosing tokens, and what it depends on: parameters, seed and the committed text.

    It knows nothing of trees. `verify` looks ahead through a `Cursor` and leaves the chooser as it was; the engine then
    says with `commit` what the request really keeps.

    Attributes:
        params: The request's parameters.
        seed: The seed that is used, drawn if neither argument nor parameters give one.
        vocab_size: Width of the model's logits.
        position: Index, in prompt and output together, of the next token to be chosen.

    Args:
        params: The request's parameters.
        prompt_tokens: ``int[prompt]``.
        vocab_size: Width of the model's logits.
        seed: In place of ``params.seed``.

    Raises:
        ConfigError: ``logit_bias`` names a token that the model does not have.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: Int32Array | SequenceOf[int],
        vocab_size: int,
        seed: int | None = None,
    ) -> None:
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(63)
        if seed < 0:
            raise ConfigError(f"seed must be at least 0, found {seed}")
        self.params, self.seed, self.vocab_size = params, int(seed), vocab_size
        self.position = len(prompt_tokens)
        self._pipeline = LogitsPipeline(params, vocab_size)
        self._history = History(np.asarray(prompt_tokens)) if self._pipeline.needs_history else None
        self._text = Text(np.asarray(prompt_tokens)) if params.processor is not None else None
        self._state: Any = None
        self._started = False
        self._behind: tuple[int, ...] = ()  # committed tokens that the constraint has not seen

    @property
    def plain_greedy(self) -> bool:
        """Whether the arg max of the model's own logits decides, with nothing to process."""
        return self.params.plain_greedy

    def commit(self, tokens: SequenceOf[int] | Int32Array, states: SequenceOf[Any] | None = None) -> None:
        """Take note of what the request keeps.

        Args:
            tokens: Committed tokens, or as many of them as the engine keeps.
            states: What `verify` returned for this request, so that its constraint is not asked to advance twice.
        """
        self.position += len(tokens)
        if self._history is not None:
            for token in tokens:
                self._history.push(int(token))
        if self._text is not None:
            for token in tokens:
                self._text.push(int(token))
        if self.params.constraint is not None:
            known = 0
            if states:
                known = min(len(tokens), len(states) - 1)
                self._state, self._behind, self._started = states[known], (), True
            self._behind += tuple(int(token) for token in tokens[known:])

    def fork(self, seed: int) -> Chooser:
        """An independent copy at this moment, with another seed."""
        twin = object.__new__(Chooser)
        twin.__dict__.update(self.__dict__)
        twin.seed = int(seed)
        twin._history = None if self._history is None else self._history.copy()
        twin._text = None if self._text is None else self._text.copy()
        return twin

    def state(self) -> Any:
        """The constraint's state after the committed text.

        Raises:
            ConstraintError: The constraint raised something.
        """
        constraint = self.params.constraint
        if constraint is None:
            return None
        if not self._started or self._behind:
            try:
                state = self._state if self._started else constraint.start()
                for token in self._behind:
                    state = constraint.advance(state, token)
            except Exception as error:  # a user's code: whatever it raises ends this request alone
                raise _constraint_error(error) from error
            self._state, self._behind, self._started = state, (), True
        return self._state

    def cursor(self) -> Cursor:
        """A look ahead from the committed text; the chooser stays as it is."""
        return Cursor(self)


class Cursor:
    """One walk down a draft tree: chooses at a node, then steps to a child, as plain decoding would.

    A context manager: leaving it takes back the steps.

    Attributes:
        states: The constraint's state at each node where a token was chosen, the root's first.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._position = chooser.position
        self._steps: list[tuple[int, bool]] = []
        self.states: list[Any] = []

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        history = self._chooser._history
        if history is not None:
            for token, was_new in reversed(self._steps):
                history.pop(token, was_new)
        if self._chooser._text is not None:
            self._chooser._text.pop(len(self._steps))

    def choose(self, logits: torch.Tensor) -> int:
        """The token after the current node.

        Args:
            logits: ``[V]``, the model's own, any float dtype and device. Unchanged.

        Raises:
            NonFiniteLogitsError: NaN, +inf, or nothing but -inf.
            ConstraintError: No token is allowed, the mask has a wrong shape, or the constraint or the processor raised
                something.
        """
        chooser = self._chooser
        row = torch.empty(len(logits), dtype=torch.float32, device="cpu").copy_(logits.detach())
        best = float(row.max())
        if not math.isfinite(best):
            raise non_finite(best, self._position)
        state = self._reached_state()
        allowed = self._allowed(state)
        scores = chooser._pipeline.process(row, chooser._history, allowed, chooser._text).numpy()
        self.states.append(state)
        if chooser.params.greedy:
            return int(scores.argmax())
        return gumbel_argmax(scores, chooser.seed, self._position)

    def step(self, token: int) -> None:
        """Go to the child that holds ``token``."""
        history = self._chooser._history
        self._steps.append((token, history.push(token) if history is not None else False))
        if self._chooser._text is not None:
            self._chooser._text.push(token)
        self._position += 1

    def _reached_state(self) -> Any:
        constraint = self._chooser.params.constraint
        if constraint is None or not self._steps:
            return self._chooser.state()
        try:
            return constraint.advance(self.states[-1], self._steps[-1][0])
        except Exception as error:  # a user's code: whatever it raises ends this request alone
            raise _constraint_error(error) from error

    def _allowed(self, state: Any) -> BoolArray | None:
        constraint = self._chooser.params.constraint
        if constraint is None:
            return None
        try:
            return constraint.allowed(state)
        except Exception as error:  # a user's code: whatever it raises ends this request alone
            raise _constraint_error(error) from error


def non_finite(best: float, position: int) -> NonFiniteLogitsError:
    """The error for a row of logits whose largest is ``best``, at which token ``position`` was to be chosen."""
    found = "NaN" if math.isnan(best) else "+infinity" if best > 0 else "nothing but -infinity"
    return NonFiniteLogitsError(
        f"the model's logits for the token at position {position} must be finite, found {found}; "
        "half precision may overflow (try float32); if it is float32 already, the weights may be damaged"
    )


def _constraint_error(error: Exception) -> ConstraintError:
    return ConstraintError(f"the constraint raised {type(error).__name__}: {error}")
