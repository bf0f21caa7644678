"""What benchmarks print: a figure, what it has to be, and what it might become."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Table:
    """The rows so far: what, figure, bound, goal, the machine's load then, peers."""

    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(
        self,
        what: str,
        values: Sequence[float],
        form: str,
        bound: float | None = None,
        goal: float | None = None,
        peers: str = "",
        *,
        at_least: bool = False,
    ) -> None:
        """Add the median of ``values``; ``form`` says how to write one, its unit behind a blank.

        The limits are the most that it may be, or with ``at_least`` the least.
        """
        number, _, unit = form.partition(" ")
        low, middle, high = (format(pick(values), number) for pick in (min, statistics.median, max))
        spread = "" if len(values) == 1 else f" ({low} to {high})"
        limits = ["" if limit is None else f"{'≥' if at_least else '≤'} {limit:g}" for limit in (bound, goal)]
        sign = -1 if at_least else 1
        verdict = "" if bound is None else "yes" if sign * statistics.median(values) <= sign * bound else "NO"
        load = f"{os.getloadavg()[0]:.1f}"
        self.rows.append((what, f"{middle} {unit}".strip() + spread, limits[0], verdict, limits[1], load, peers))
        print("; ".join(filter(None, self.rows[-1])), flush=True)

    def show(self) -> None:
        """Print all of it."""
        rows = [("what", "figure", "bound", "met", "goal", "load", "peers"), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            print("  ".join([*cells, row[6]]).rstrip())
