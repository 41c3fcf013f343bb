"""How the scripts here draw: matplotlib without a screen, one style, and files with the same bytes
for the same runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STYLE = {
    "font.size": 11,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}


@contextmanager
def drawing(salt: str, **style: Any) -> Iterator[Any]:
    """Give pyplot in the common style; `salt` keeps the names inside an SVG file the same from run
    to run.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the pictures need matplotlib: pip install 'bayflower[plots]'") from None
    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt, **style}):
        yield pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure and say where."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(f"written: {path}")
