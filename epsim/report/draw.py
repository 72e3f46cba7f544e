"""Figures as SVG for the page, at two widths and in the page's colours, and as PNG for Markdown."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WIDE, NARROW = 9.2, 3.7
"""Inches; at 96 pixels an inch and 72 points, a narrow one fits a telephone."""
INK, FAINT = "#101112", "#c0c1c2"
"""Stand-ins in the SVG for the page's own colours, which light and dark define."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
"""Okabe and Ito's colours, told apart by the colour-blind; the first stack has the ink's."""
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
    """key: names files and anchors; axes: what they are, in words; draw(canvas, narrow) fills an empty canvas.

    height: inches of the wide form; narrow_height: of the other. live: drawn by the page's script, for any two stacks
    and any layer; the PNG alone is made.
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
    """A figure's forms: <svg> elements whose text is text, escaped, and whose colours are the page's, and a PNG."""

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
    # Names within the drawing must not meet those of another on the same page.
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{prefix}", text)
    return re.sub(r"<svg ", '<svg aria-hidden="true" focusable="false" ', text, count=1)


@contextmanager
def _canvas(figure: Figure, narrow: bool) -> Iterator[Canvas]:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    size = (NARROW, figure.narrow_height) if narrow else (WIDE, figure.height)
    style: Any = {**STYLE, "svg.hashsalt": figure.key}
    with warnings.catch_warnings(), mpl.rc_context(style):
        # A font lacks some of the world's letters; the picture then shows boxes, and nobody is warned.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        canvas = Canvas(figsize=size, layout="constrained")
        figure.draw(canvas, narrow)
        # Laid out once, where saving would do it, and a drawing nobody sees, each time.
        engine = canvas.get_layout_engine()
        assert engine is not None
        engine.execute(canvas)
        canvas.set_layout_engine("none")
        yield canvas


def colour(number: int) -> str:
    """Of the stack at that place."""
    return INK if number == 0 else SERIES[(number - 1) % len(SERIES)]
