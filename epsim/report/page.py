"""report.html: one self-contained page that works offline."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from importlib import resources

from epsim.report.content import facts, headers, key_headers, key_rows, reasons, rows
from epsim.results import Results
from epsim.verdict import label

CAUSES = (
    ("gap_placement", "placement"),
    ("gap_split", "split"),
    ("gap_rounding", "rounding"),
    ("gap_shared", "shared"),
)


def page(results: Results) -> str:
    """The whole report as HTML; text from traces is escaped by the template."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        resources.files("epsim.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.render(
        verdict=results["verdict"],
        headers=headers(results),
        rows=rows(results),
        key_headers=key_headers(results),
        key_rows=key_rows(results),
        reasons=reasons(results),
        facts=facts(results),
        pictures=[
            ("Peak over mean, and what it is made of", _png(_causes, results)),
            ("Layer by layer: peak over mean, mean over steps", _png(_layers, results)),
            ("Rank by rank: load over the mean load, mean over steps and layers", _png(_ranks, results)),
        ],
    )


def _png(draw: object, results: Results) -> str:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # A font lacks some of the world's letters; the picture then shows boxes, and nobody is warned.
    warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    assert callable(draw)
    draw(axes, results)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


def _plain(text: str) -> str:
    """matplotlib reads $...$ as mathematics."""
    return text.replace("$", r"\$")


def _causes(axes: object, results: Results) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    names = [_plain(label(entry)) for entry in results["stacks"]]
    # Causes multiply, so their bars are stacked as successive factors: each is drawn from the product so far.
    left = [1.0] * len(names)
    for key, cause in CAUSES:
        gaps = [entry["metrics"][key]["mean"] or 0.0 for entry in results["stacks"]]
        widths = [product * gap for product, gap in zip(left, gaps, strict=True)]
        axes.barh(names, widths, left=left, label=cause)
        left = [product + width for product, width in zip(left, widths, strict=True)]
    axes.set_xlim(left=1.0)
    axes.invert_yaxis()
    axes.set_xlabel("product of the mean gaps + 1 (1 = perfectly balanced)")
    axes.legend(fontsize="small")


def _layers(axes: object, results: Results) -> None:
    layers = results["trace"].get("layers") or list(range(results["trace"]["num_layers"]))
    _lines(axes, results, "max_over_mean_by_layer", layers, "layer", "peak / mean")


def _ranks(axes: object, results: Results) -> None:
    _lines(axes, results, "load_over_mean_by_rank", range(results["setting"]["ranks"]), "rank", "load / mean")


def _lines(axes: object, results: Results, key: str, places: Sequence[int], across: str, up: str) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

    assert isinstance(axes, Axes)
    for number, entry in enumerate(results["stacks"]):
        values = [float("nan") if value is None else value for value in entry.get(key, [])]
        if not values:
            continue
        # Lines that coincide stay visible: each is thinner than the one below it.
        width = 1 + 0.8 * (len(results["stacks"]) - 1 - number)
        marker = "os^vDxP*"[number % 8]
        axes.plot(places, values, marker=marker, markersize=width + 2, linewidth=width, label=_plain(label(entry)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(fontsize="x-small")
