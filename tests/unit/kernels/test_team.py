"""Kernels run in torch's threads, where its OpenMP library can be found."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from outpace._compile import c_function
from outpace.kernels import team as module
from outpace.kernels.simd import address_of, fetch_add
from outpace.kernels.team import Kernel, Team, find_region, loaded_libraries, team


def count(block):  # type: ignore[no-untyped-def]
    fetch_add(address_of(block), 1)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel(c_function(count))


def calls(team: Team, kernel: Kernel, num_threads: int) -> int:
    block = np.zeros(1, np.int64)
    team.run(kernel, block.ctypes.data, num_threads)
    return int(block[0])


@pytest.mark.skipif(sys.platform != "linux", reason="where torch's OpenMP library is known to be found")
def test_every_thread_of_torchs_team_calls_the_kernel(kernel: Kernel) -> None:
    assert team().shares_threads
    assert team().num_threads == torch.get_num_threads()
    assert str(Path(torch.__file__).parent) in loaded_libraries()[0]
    assert [calls(team(), kernel, n) for n in (1, 2, 5)] == [1, 2, 5]


def test_without_a_library_one_thread_calls_it(kernel: Kernel) -> None:
    alone = Team(None)
    assert not alone.shares_threads
    assert alone.num_threads == 1
    assert calls(alone, kernel, alone.num_threads) == 1


def test_libraries_without_the_entry_point_are_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "libgomp.so"
    broken.write_text("no library")
    assert find_region([]) is None
    assert find_region([str(broken), str(tmp_path / "absent.so")]) is None


def test_a_system_that_lists_no_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAPS", tmp_path / "absent")
    assert loaded_libraries() == []
