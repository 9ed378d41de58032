"""Running a kernel in the very threads that torch computes in.

A second pool of threads would fight torch's, whose workers spin for a while after each region. So the kernel is started
through the OpenMP library that torch has loaded, as a region of torch's own team. Every thread calls the kernel once, with
the same parameter block; they share the work by counters in it.

Where that library or its entry point is not found (macOS, Windows, a torch without OpenMP), one thread does it all.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Region = Callable[[int, int, int, int], None]  # (function, data, threads, flags)
_RUNTIMES = ("libgomp", "libiomp5", "libomp")  # all three have GNU's entry point
_MAPS = Path("/proc/self/maps")


class Team:
    """Runs C functions ``void(void*)`` in torch's threads.

    Attributes:
        shares_threads: Whether torch's OpenMP library was found; otherwise there is one thread.

    Args:
        region: GNU OpenMP's ``GOMP_parallel``, or None.
    """

    def __init__(self, region: Region | None) -> None:
        self._region = region
        self.shares_threads = region is not None

    @property
    def num_threads(self) -> int:
        """Threads that a call will use, at most: torch's present number."""
        return torch.get_num_threads() if self.shares_threads else 1

    def run(self, kernel: Kernel, block: int, num_threads: int) -> None:
        """Call a kernel once in each of ``num_threads`` threads, and wait.

        Args:
            kernel: What to call.
            block: Address of the parameter block that each call gets.
            num_threads: At most `num_threads`, or other threads would be started.
        """
        if self._region is None or num_threads == 1:
            kernel.call(block)
        else:
            self._region(kernel.address, block, num_threads, 0)


class Kernel:
    """A compiled C function ``void(void*)``, and what keeps it alive.

    Attributes:
        address: Of its code.
        call: Calls it in this thread, without the GIL.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self.address = int(function.address)
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@functools.cache
def team() -> Team:
    """Torch's team."""
    return Team(find_region(loaded_libraries()))


def loaded_libraries() -> list[str]:
    """Paths of the OpenMP libraries in this process, torch's own first; none where the system does not list them."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    found = sorted(path for path in paths if Path(path).name.startswith(_RUNTIMES))
    home = str(Path(torch.__file__).parent)
    return sorted(found, key=lambda path: not path.startswith(home))


def find_region(paths: Iterable[str]) -> Region | None:
    """``GOMP_parallel`` of the first library that has it."""
    if sys.platform == "win32":
        return None
    for path in paths:
        try:
            function: Any = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        region: Region = function
        return region
    return None
