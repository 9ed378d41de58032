"""Estimates against outcomes, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from outpace.bench.reliability import Bucket, Reliability

_WIDTH = 32  # characters of a bar from 0 to 1


def show_reliability(console: Console, found: tuple[Reliability, ...]) -> None:
    """Tables for all nodes and for each set of origins, each with its diagram: bars of what was accepted, | at the estimate."""
    if not found:
        console.print("no drafted node was judged, so there is no calibration to show")
        return
    alone = len(found) == 2  # one set of origins: the same nodes twice
    for one in found[:1] if alone else found:
        _show_one(console, one, found[1].origins if alone else one.origins)


def _show_one(console: Console, one: Reliability, name: str) -> None:
    from rich import box
    from rich.table import Table

    for kind, curve in (("raw", one.raw), ("corrected", one.corrected)):
        table = Table(title=f"{name}, {kind}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("estimate", "nodes", "estimated", "accepted"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("0" + " " * (_WIDTH - 2) + "1", no_wrap=True)
        for bucket in curve.buckets:
            level = f"{bucket.low:g} - {bucket.high:g}"
            table.add_row(level, f"{bucket.nodes:,}", f"{bucket.estimated:.3f}", f"{bucket.observed:.3f}", _bar(bucket))
        console.print(table)
        console.print(
            f"{curve.nodes:,} judged nodes, expected calibration error {curve.calibration_error:.4f}, "
            f"Brier score {curve.brier:.4f}, log loss {curve.log_loss:.4f}"
        )


def _bar(bucket: Bucket) -> Text:
    """As long as the accepted share, with a mark at the estimate."""
    from rich.text import Text

    filled = round(bucket.observed * _WIDTH)
    mark = min(int(bucket.estimated * _WIDTH), _WIDTH - 1)
    bar = Text("█" * filled + " " * (_WIDTH - filled), style="cyan")
    return Text.assemble(bar[:mark], ("|", "bold red"), bar[mark + 1 :])
