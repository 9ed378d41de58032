"""Figures drawn to files by matplotlib, which is needed for nothing else: ``pip install 'outpace[plots]'``."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from outpace.bench.reliability import Curve, Reliability
from outpace.errors import ConfigError, InputError

FORMATS = (".svg", ".png")
_MOST_PANELS = 6


def check_plot_path(path: str | Path) -> None:
    """Refuse what `draw_reliability` could not write, before any work is done for it.

    Raises:
        ConfigError: matplotlib is not installed, or the name ends in no known format.
        InputError: The folder does not exist.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"a plot's name must end in {' or '.join(FORMATS)}, found {str(path)!r}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    _matplotlib()


def draw_reliability(path: str | Path, found: SequenceOf[Reliability], title: str) -> None:
    """A reliability diagram for all nodes and for each set of origins: observed acceptance by estimate, raw and corrected.

    The area of a dot grows with its bucket's nodes; on the diagonal an estimate is right. Of many sets of origins the five
    with the most nodes are drawn.

    Args:
        path: An SVG or PNG file.
        found: As `outpace.bench.ReplayResult.calibration` has it.
        title: Above the diagram.

    Raises:
        ConfigError: matplotlib is not installed.
        InputError: The file cannot be written.
    """
    if len(found) == 2:  # one set of origins: all nodes
        found = found[1:]
    panels = found[:_MOST_PANELS]
    columns = max(min(3, len(panels)), 1)
    rows = max(-(-len(panels) // columns), 1)
    figure = _new_figure(4.2 * columns, 4.0 * rows + 0.4)
    for index, one in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.plot([0, 1], [0, 1], color="0.75", linewidth=1)
        for label, curve, color in (("raw", one.raw, "tab:orange"), ("corrected", one.corrected, "tab:blue")):
            _draw_curve(axes, curve, f"{label}, error {curve.calibration_error:.3f}", color)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="estimated", ylabel="accepted", aspect="equal")
        axes.set_title(f"{one.origins} ({one.raw.nodes:,} nodes)", fontsize=10)
        axes.legend(loc="upper left", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def draw_lines(
    path: str | Path, lines: Mapping[str, SequenceOf[tuple[float, float]]], title: str, x: str, y: str
) -> None:
    """Lines through points, one for each name.

    Raises:
        ConfigError: matplotlib is not installed.
        InputError: The file cannot be written.
    """
    figure = _new_figure(5.6, 3.8)
    axes = figure.add_subplot(1, 1, 1)
    for name, points in lines.items():
        axes.plot([point[0] for point in points], [point[1] for point in points], marker="o", markersize=3, label=name)
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)
    axes.grid(color="0.9")
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path)


def _draw_curve(axes: Any, curve: Curve, label: str, color: str) -> None:
    x = [bucket.estimated for bucket in curve.buckets]
    y = [bucket.observed for bucket in curve.buckets]
    most = max((bucket.nodes for bucket in curve.buckets), default=1)
    axes.plot(x, y, color=color, linewidth=1, label=label)
    axes.scatter(
        x, y, s=[6 + 60 * bucket.nodes / most for bucket in curve.buckets], color=color, alpha=0.8, linewidths=0
    )


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'outpace[plots]'") from error
    return matplotlib


def _new_figure(width: float, height: float) -> Any:
    """A figure in inches, without pyplot: no display, no state of the process."""
    _matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: str | Path) -> None:
    matplotlib = _matplotlib()
    # The same figures give the same bytes: no date, and no chance in the names of an SVG's parts. Text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "outpace", "svg.fonttype": "none"}):
        try:
            figure.savefig(path, metadata={"Date": None} if str(path).lower().endswith(".svg") else None)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
