"""How much memory is free: the machine's files, and those of control groups, written here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest
import torch

from outpace import _memory
from outpace.model import memory

CPU = torch.device("cpu")
GIB = 2**30
V1_UNLIMITED = 9223372036854771712


class Write(Protocol):
    def __call__(self, path: str, *lines: object) -> None: ...


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file below the root; /proc says that 8 GiB are free."""

    def to(path: str, *lines: object) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))

    monkeypatch.setattr(_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(_memory, "_CGROUPS", tmp_path / "cgroup")
    to("proc/meminfo", "MemTotal: 16777216 kB", "MemFree: 1024 kB", f"MemAvailable: {8 * 2**20} kB")
    return to


def test_the_machine_alone(write: Write) -> None:
    assert memory.free_memory(CPU) == 8 * GIB


def test_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_memory, "_PROC", tmp_path)
    monkeypatch.setattr(_memory, "_CGROUPS", tmp_path)
    assert memory.free_memory(CPU) == 4 * GIB


def test_the_limit_of_a_container(write: Write) -> None:
    write("proc/self/cgroup", "0::/")
    write("cgroup/memory.max", 3 * GIB)
    write("cgroup/memory.current", 2 * GIB)
    assert memory.free_memory(CPU) == GIB
    write("cgroup/memory.stat", "anon 77", f"inactive_file {GIB // 2}", "inactive_file_x 5")
    assert memory.free_memory(CPU) == GIB + GIB // 2  # files that were read can go
    write("cgroup/memory.current", 5 * GIB)
    assert memory.free_memory(CPU) == 0
    write("cgroup/memory.max", 100 * GIB)
    assert memory.free_memory(CPU) == 8 * GIB
    write("cgroup/memory.max", "max")
    assert memory.free_memory(CPU) == 8 * GIB


def test_the_tightest_of_nested_groups(write: Write) -> None:
    write("proc/self/cgroup", "0::/outer/inner: with a colon")
    write("cgroup/outer/inner: with a colon/memory.max", 6 * GIB)
    write("cgroup/outer/inner: with a colon/memory.current", GIB)
    write("cgroup/outer/memory.max", 4 * GIB)
    write("cgroup/outer/memory.current", 2 * GIB)
    assert memory.free_memory(CPU) == 2 * GIB


def test_version_1(write: Write) -> None:
    write("proc/self/cgroup", "5:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "0::/")
    write("cgroup/memory/memory.limit_in_bytes", V1_UNLIMITED)
    write("cgroup/memory/memory.usage_in_bytes", 9 * GIB)
    assert memory.free_memory(CPU) == 8 * GIB
    write("cgroup/memory/memory.limit_in_bytes", 11 * GIB)  # the path is the one outside: only the root is there
    assert memory.free_memory(CPU) == 2 * GIB
    write("cgroup/memory/docker/abc/memory.limit_in_bytes", 2 * GIB)
    write("cgroup/memory/docker/abc/memory.usage_in_bytes", GIB)
    write("cgroup/memory/docker/abc/memory.stat", "inactive_file 5", "total_inactive_file 1024")
    assert memory.free_memory(CPU) == GIB + 1024
