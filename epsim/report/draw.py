"""Draws a figure as SVG in two widths for the page, and as PNG for Markdown."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

WIDE, NARROW = 9.2, 3.7
"""Inches. At 96 pixels per inch the narrow form fits a telephone."""
INK, FAINT = "#101112", "#c0c1c2"
"""Replaced in the SVG by colours that the page defines for its light and dark form."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart. The first stack is drawn in INK."""
MARKERS, DASHES = "os^vDxP*", ("-", "--", "-.", ":")
STYLE = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.parse_math": False,  # $ in a name is a $
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a page.

    key: its name in files and links; axes: the axes in words; draw(canvas, narrow): fills an empty canvas. height,
    narrow_height: inches of the wide and the narrow form. live: the page's script draws it for any two stacks and any
    layer, so that only the PNG is made.
    """

    key: str
    title: str
    axes: str
    draw: Callable[[Canvas, bool], None]
    height: float = 3.2
    narrow_height: float = 3.4
    live: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure as two <svg> elements, with escaped text and the page's colours, and as PNG."""

    figure: Figure
    wide: str
    narrow: str
    png: bytes


def drawn(figure: Figure) -> Drawn:
    wide = narrow = ""
    if not figure.live:
        with _canvas(figure, narrow=True) as canvas:
            narrow = _svg(canvas, f"{figure.key}-n-")
    with _canvas(figure, narrow=False) as canvas:
        if not figure.live:
            wide = _svg(canvas, f"{figure.key}-w-")
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return Drawn(figure, wide, narrow, buffer.getvalue())


def _svg(canvas: Canvas, prefix: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    canvas.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    # Two drawings on one page must not share names.
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{prefix}", text)
    return re.sub(r"<svg ", '<svg aria-hidden="true" focusable="false" ', text, count=1)


@contextmanager
def _canvas(figure: Figure, narrow: bool) -> Iterator[Canvas]:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    size = (NARROW, figure.narrow_height) if narrow else (WIDE, figure.height)
    style: Any = {**STYLE, "svg.hashsalt": figure.key}
    with warnings.catch_warnings(), mpl.rc_context(style):
        # Letters that the font lacks are drawn as boxes, without a warning.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        canvas = Canvas(figsize=size, layout="constrained")
        figure.draw(canvas, narrow)
        # Saving would lay the figure out again each time.
        engine = canvas.get_layout_engine()
        assert engine is not None
        engine.execute(canvas)
        canvas.set_layout_engine("none")
        yield canvas


def legend(canvas: Canvas, axes: Axes, columns: int, **style: Any) -> None:
    """Puts the legend of `axes` below the figure."""
    handles, names = axes.get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside lower left", ncols=columns, borderaxespad=0, **style)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def colour(number: int) -> str:
    """Of the stack with this index."""
    return INK if number == 0 else SERIES[(number - 1) % len(SERIES)]
