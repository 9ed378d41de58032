"""Compiling functions with Numba, with a cache on disk where there is one.

Numba looks for a writable cache folder at the moment of decoration, and raises if there is none: in a read-only
installation under a read-only home, importing a module with ``cache=True`` would fail. Here such a function is compiled
anew in each process instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``numba.njit`` without the GIL, cached on disk if possible; compiled at its first call."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    # Numba's word for a cache folder that cannot be written, in whatever place it looked.
    with contextlib.suppress(RuntimeError):
        dispatcher.enable_caching()
    result: F = dispatcher
    return result


def inner(function: F) -> F:
    """A function that only compiled functions call. It has no wrapper for Python, which would double its compile time."""
    jit: Any = numba.njit  # its annotations leave these options out
    result: F = jit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return result


def c_function(function: Callable[[Any], None]) -> Any:
    """A C function ``void(void*)``, compiled now or read from the cache.

    Numba's cache notices a change of the function's own file and of the variables that it closes over, but none of other
    files: close over a hash of those.

    Returns:
        Numba's ``CFunc``; its ``address`` is valid as long as the object lives.
    """
    signature = types.void(types.voidptr)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        return numba.cfunc(signature, error_model="numpy")(function)
