"""report.md, with pictures beside it."""

from __future__ import annotations

from collections.abc import Sequence

from epsim.report.content import answers, facts, headers, memory_words, reasons, rows, source, tables_of, title
from epsim.report.draw import Drawn
from epsim.report.flips import flips
from epsim.results import Results

PICTURES = "pictures"


def markdown(results: Results, drawings: Sequence[Drawn]) -> str:
    """The whole report as Markdown, naming the files of `pictures`; text from traces is escaped."""
    lines = [f"# {_escape(title(results))}", "", f"**{_escape(results['verdict'])}**", ""]
    lines += [*(f"- {_escape(line)}" for line in flips(results)), "", _escape(source(results))]
    lines += [f"; {_escape(memory_words(results))}" if memory_words(results) else "", ""]
    if answers(results):
        lines += ["## What to run", "", *(f"- {_escape(name)}: {_escape(text)}" for name, text in answers(results)), ""]
    lines += ["## Stacks side by side", "", *_table(headers(results), rows(results), num_left=1)]
    for figure in (drawing.figure for drawing in drawings):
        lines += ["", f"## {_escape(figure.title)}", "", f"![{_escape(figure.title)}]({PICTURES}/{figure.key}.png)", ""]
        lines.append(f"{_escape(figure.axes)}. Data: {_escape(source(results))}.")
    for name, head, body in tables_of(results):
        lines += ["", f"## {_escape(name)}", "", *_table(head, body, num_left=2)]
    lines += ["", *(f"- no value for {_escape(keys)}: {_escape(reason)}" for keys, reason in reasons(results))]
    lines += ["", "## What this stands on", ""]
    lines += [f"- {_escape(name)}: {_escape(value)}" for name, value in facts(results)]
    return "\n".join(lines) + "\n"


def pictures(drawings: Sequence[Drawn]) -> dict[str, bytes]:
    """PNG by file name."""
    return {f"{PICTURES}/{drawing.figure.key}.png": drawing.png for drawing in drawings}


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
