"""report.html: one self-contained page that works offline."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from epsim.files import printable
from epsim.report.charts import before_and_after
from epsim.report.content import PEAK_OVER_MEAN, cells, facts, layer_numbers, meanings, memory_words, reasons
from epsim.report.draw import Drawn
from epsim.report.views import tables, view_of
from epsim.results import ResultsData
from epsim.score.verdict import best_of, label

_BREAKS = re.compile(r"(\w[+_]|\w(?=\()|/)")
"""A long name may be broken after these."""


def page(results: ResultsData, pictures: Sequence[Drawn]) -> str:
    """The whole report as HTML; text from traces is escaped by the template, and the page may fetch nothing."""
    import jinja2
    from markupsafe import Markup, escape

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = lambda text: Markup(_BREAKS.sub(r"\1<wbr>", str(escape(text))))
    script = _file("page.js")
    sections = []
    for picture in pictures:
        figure = picture.figure
        section = {"key": figure.key, "title": figure.title, "axes": figure.axes, "live": figure.live}
        sections.append(section | {"wide": Markup(picture.wide), "narrow": Markup(picture.narrow)})
    trace, setting = results["trace"], results["setting"]
    view = view_of(results)
    return environment.from_string(_file("page.html")).render(
        title=view.title(results),
        style=Markup(_file("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        verdict=results["verdict"],
        flips=view.flips(results),
        flips_title=view.flips_title,
        source=view.source(results),
        memory=memory_words(results),
        command=printable(setting["command"]),
        peak_over_mean=PEAK_OVER_MEAN,
        headers=meanings(results, view.memory),
        rows=cells(results, view.memory),
        best=best_of(results["stacks"]),
        sections=sections,
        leading=tables(view.leading, results),
        trailing=tables(view.trailing, results),
        reasons=reasons(results),
        facts=facts(results),
        answers=view.answers(results),
        names=[label(entry) for entry in results["stacks"]],
        heat_places=list(dict.fromkeys(before_and_after(results))),
        layers=_heat_layers(results),
        ranks=setting["ranks"],
        num_steps=trace["steps_scored"],
        heat=Markup(_heat(results)),
    )


def _file(name: str) -> str:
    return resources.files("epsim.report").joinpath(name).read_text(encoding="utf-8")


def _heat_layers(results: ResultsData) -> list[tuple[int, int]]:
    """(index, number) of the layers with their own heat map."""
    every = all(entry.get("load_over_mean_by_layer") for entry in results["stacks"])
    return list(enumerate(layer_numbers(results))) if every else []


def _heat(results: ResultsData) -> str:
    """The heat maps' values as JSON that is safe inside a script element; "" where there are none."""
    stacks: list[dict[str, Any]] = [
        {"steps": entry.get("load_over_mean_by_step"), "layers": entry.get("load_over_mean_by_layer")}
        for entry in results["stacks"]
    ]
    if not any(stack["steps"] for stack in stacks):
        return ""
    import matplotlib as mpl

    colours = [round(255 * part) for number in range(256) for part in mpl.colormaps["cividis"](number)[:3]]
    data = {
        "ranks": results["setting"]["ranks"],
        "num_steps": results["trace"]["steps_scored"],
        "colours": colours,
        "stacks": stacks,
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
