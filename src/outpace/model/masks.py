"""Which keys a query may see, apart from its tree: a descriptor instead of a mask tensor.

Transformers builds masks from small functions of (batch, head, query index, key index). Our mask function receives such a
function, finds out which of the patterns below it is by asking it at chosen points, and returns the descriptor in the
mask's place. The packed attention then applies the pattern by *position*, which is right for any packing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from outpace.errors import UnsupportedModelError

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A causal pattern over positions.

    Attributes:
        kind: ``full`` sees every earlier position; ``window`` the last ``size`` positions, its own included; ``chunk`` the
            earlier positions of its own chunk of ``size`` positions.
        size: Window or chunk length in tokens; 0 for ``full``.
    """

    kind: Literal["full", "window", "chunk"]
    size: int = 0

    def first_visible(self, position: int) -> int:
        """The lowest position that a query at ``position`` may see."""
        if self.kind == "window":
            return max(0, position - self.size + 1)
        if self.kind == "chunk":
            return position - position % self.size
        return 0

    def allows(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Elementwise: whether position ``query`` may see position ``key`` (broadcast)."""
        allowed = key <= query
        if self.kind == "window":
            allowed = allowed & (key > query - self.size)
        elif self.kind == "chunk":
            allowed = allowed & (
                torch.div(key, self.size, rounding_mode="floor") == torch.div(query, self.size, rounding_mode="floor")
            )
        return allowed


FULL = MaskSpec("full")
_FAR = 2**30  # beyond any window: one whose size we were not told shows here


def classify(mask_function: MaskFunction, size: int | None) -> MaskSpec:
    """Find the pattern behind a mask function of Transformers.

    Args:
        mask_function: Called with a batch index, a head index and broadcastable index tensors.
        size: The window or chunk length that came with it, if any.

    Raises:
        UnsupportedModelError: It is none of the patterns of `MaskSpec`.
    """
    candidates = [FULL]
    if size is not None:
        candidates += [MaskSpec("window", size), MaskSpec("chunk", size)]
    step = size or 16
    near = {p for k in range(4) for p in (k * step - 1, k * step, k * step + 1, k * step + step // 2) if p >= 0}
    points = [*sorted(near), _FAR]
    query = torch.tensor(points)[:, None]
    key = torch.tensor(points)[None, :]
    found = torch.as_tensor(mask_function(torch.tensor(0), torch.tensor(0), query, key)).expand(
        len(points), len(points)
    )
    for candidate in candidates:
        if torch.equal(found.bool(), candidate.allows(query, key)):
            return candidate
    raise UnsupportedModelError(
        "the model asks for an attention mask that is neither causal, nor a sliding window, nor chunks"
        + (f" (its size parameter is {size})" if size is not None else "")
    )
