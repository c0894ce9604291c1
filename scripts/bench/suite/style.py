# SPDX-License-Identifier: Apache-2.0
"""How all pictures look, those of demo, sizing and benchmarks."""

from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
# The same picture is the same file.
matplotlib.rcParams["svg.hashsalt"] = "kvtier"

WITHOUT, WITH = "#9aa5b1", "#1f77b4"
"""The tier."""
DEVICE, HOST, COMPUTED, STORE = "#2a9d8f", "#1f77b4", "#d9dee4", "#e9a23b"
INK, LINE, GRID = "#222222", "#5c6770", "#e6e9ed"


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def tidy(axes: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """No frame, and a grid behind everything."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID)
