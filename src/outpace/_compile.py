"""Compiling functions with Numba, with a cache on disk where there is one.

Numba looks for a writable cache folder at the moment of decoration, and raises if there is none: in a read-only
installation under a read-only home, importing a module with ``cache=True`` would fail. Here such a function is compiled
anew in each process instead.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
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
        _renew_with_sources(dispatcher)
    result: F = dispatcher
    return result


def _renew_with_sources(dispatcher: Any) -> None:
    """Let a change of any file with compiled functions make a cached one stale.

    Numba looks at the function's own file alone, but the machine code holds that of every function it calls, and the layouts
    that other files define. Without this, an upgrade could follow old layouts through new arrays.
    """
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = (cache_file._source_stamp, source_digest())
    else:  # another version of Numba keeps it elsewhere: rather compile anew than run something old
        dispatcher._cache.disable()


@functools.cache
def source_digest() -> str:
    """A digest of the package's files that hold compiled functions; the layouts that these share are in them too."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source = path.read_bytes()
        if b"outpace._compile" in source:
            digest.update(source)
    return digest.hexdigest()


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
