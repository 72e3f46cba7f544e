"""report.md."""

from __future__ import annotations

from epsim.report.content import facts, headers, key_headers, key_rows, reasons, rows
from epsim.results import Results


def markdown(results: Results) -> str:
    """The whole report as Markdown; text from traces is escaped."""
    lines = ["# epsim replay", "", _escape(results["verdict"]), ""]
    lines += _table(headers(results), rows(results), num_left=1)
    lines += ["", "## Every metric", "", *_table(key_headers(results), key_rows(results), num_left=2), ""]
    lines += [f"- no value for {_escape(keys)}: {_escape(reason)}" for keys, reason in reasons(results)]
    lines += ["", "## What this stands on", ""]
    lines += [f"- {_escape(name)}: {_escape(value)}" for name, value in facts(results)]
    return "\n".join(lines) + "\n"


def _table(head: list[str], body: list[list[str]], num_left: int) -> list[str]:
    rule = ["---"] * num_left + ["---:"] * (len(head) - num_left)
    return [_row([_escape(cell) for cell in head]), _row(rule), *(_row([_escape(c) for c in cells]) for cells in body)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    text = " ".join(text.split())
    for character in "\\`*_[]|#~":
        text = text.replace(character, f"\\{character}")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
