"""Arrays by address, so that one compiled call can work on any number of automata."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from outpace._compile import inner
from outpace.tree import Int32Array


@intrinsic
def _pointer_to(_typing: Any, address: Any) -> Any:
    """A ``void*`` to an address."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@inner
def array_at(address: int, size: int) -> Int32Array:
    """The ``int32[size]`` that lies at an address; whoever passes it sees to it that it stays there."""
    return carray(_pointer_to(address), (size,), np.int32)  # type: ignore[no-any-return]


def address_of(array: Int32Array) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])
