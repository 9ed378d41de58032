from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outpace.bench.reliability import Reliability, curve
from outpace.errors import ConfigError, InputError

pytest.importorskip("matplotlib")
from outpace.bench.plots import check_plot_path, draw_lines, draw_reliability


def test_a_panel_for_each_set_of_origins(tmp_path: Path) -> None:
    some = curve([0.2, 0.7, 0.9], [False, True, True])
    found = [Reliability(name, some, some) for name in ("all", "dynamic", "memory", "dynamic+memory")]
    draw_reliability(tmp_path / "many.svg", found, "of chance")
    text = (tmp_path / "many.svg").read_text()
    for name in ("all", "dynamic", "memory", "dynamic+memory", "of chance"):
        assert f">{name}" in text
    draw_reliability(tmp_path / "one.svg", found[:2], "of chance")
    assert ">all" not in (tmp_path / "one.svg").read_text()


def test_lines(tmp_path: Path) -> None:
    draw_lines(tmp_path / "lines.png", {"a": [(5, 1.5), (10, 1.7)]}, "title", "size", "tokens")
    assert (tmp_path / "lines.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(InputError, match="cannot write"):
        draw_lines(tmp_path / "no" / "lines.svg", {"a": [(1, 1)]}, "", "", "")


def test_paths_are_checked_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot_path(tmp_path / "plot.SVG")
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        check_plot_path(tmp_path / "plot.gif")
    with pytest.raises(InputError, match="there is no folder"):
        check_plot_path(tmp_path / "no" / "plot.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"outpace\[plots\]"):
        check_plot_path(tmp_path / "plot.svg")
