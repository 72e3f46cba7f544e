"""report.md."""

from __future__ import annotations

from epsim.report.content import facts, formulas, headers, rows
from epsim.results import Results


def markdown(results: Results) -> str:
    """The whole report as Markdown; text from traces is escaped."""
    head = headers(results)
    lines = ["# epsim replay", "", _escape(results["verdict"]), ""]
    lines += [_row(head), _row(["---"] + ["---:"] * (len(head) - 1))]
    lines += [_row([_escape(cell) for cell in cells]) for cells in rows(results)]
    lines += [
        "",
        *(f"- {name}: {_escape(formula)}" for name, formula in formulas(results)),
        "",
        "## What this stands on",
        "",
    ]
    lines += [f"- {_escape(name)}: {_escape(value)}" for name, value in facts(results)]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    text = " ".join(text.split())
    for character in "\\`*_[]|#~":
        text = text.replace(character, f"\\{character}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
