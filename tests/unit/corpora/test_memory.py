from __future__ import annotations

import os

import pytest

from outpace.corpora.memory import num_cpus, parse_size, peak_resident, resident, size_text
from outpace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("800M", 8 * 10**8),
        ("4000000", 4 * 10**6),
        ("3kb", 3000),
        ("7 b", 7),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2 GBs", "1,5GB", "2ib", "many"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size such as 2GB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000 + "GB", "9999999999 GB", str(2**63)])
def test_more_than_any_machine_has(text: str) -> None:
    with pytest.raises(ConfigError, match=r"less than 2\^63 bytes, found 9"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [size_text(size) for size in (0, 999, 1250, 33_500_000, 218e6, 2e9, 2.5e12)] == [
        "0 bytes", "999 bytes", "1.25 KB", "33.5 MB", "218 MB", "2 GB", "2,500 GB"
    ]  # fmt: skip


def test_what_a_process_holds() -> None:
    assert 0 <= resident([os.getpid()]) <= peak_resident()
    assert resident([2**31 - 1]) == 0
    assert num_cpus() >= 1
