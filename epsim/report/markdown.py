"""report.md, with pictures beside it."""

from collections.abc import Sequence

from epsim.report.content import PEAK_OVER_MEAN, facts, headers, meanings, memory_words, reasons, rows
from epsim.report.draw import Drawn
from epsim.report.views import tables, view_of
from epsim.results import ResultsData

PICTURES = "pictures"


def markdown(results: ResultsData, drawings: Sequence[Drawn]) -> str:
    """The whole report as Markdown, with links to the files of `pictures`; text from traces is escaped."""
    view = view_of(results)
    source = _escape(view.source(results))
    lines = [f"# {_escape(view.title(results))}", "", f"**{_escape(results['verdict'])}**", ""]
    if flips := view.flips(results):
        lines += [f"{view.flips_title}:", "", *(f"- {_escape(line)}" for line in flips), ""]
    memory = memory_words(results)
    lines += [PEAK_OVER_MEAN, "", source + (f"; {_escape(memory)}" if memory else ""), ""]
    if answers := view.answers(results):
        lines += ["## What to run", "", *(f"- {_escape(name)}: {_escape(text)}" for name, text in answers), ""]
    lines += ["## Stacks side by side", "", *_table(headers(results), rows(results), num_left=1)]
    lines += ["", *(f"- {_escape(header)}: {_escape(meaning)}" for header, meaning in meanings(results))]
    for table in tables(view.leading, results):
        lines += _section(*table)
    for figure in (drawing.figure for drawing in drawings):
        lines += ["", f"## {_escape(figure.title)}", "", f"![{_escape(figure.title)}]({PICTURES}/{figure.key}.png)", ""]
        lines.append(f"{_escape(figure.axes)}. Data: {source}.")
    for table in tables(view.trailing, results):
        lines += _section(*table)
    lines += ["", *(f"- no value for {_escape(keys)}: {_escape(reason)}" for keys, reason in reasons(results))]
    lines += ["", "## Setup", ""]
    lines += [f"- {_escape(name)}: {_escape(value)}" for name, value in facts(results)]
    return "\n".join(lines) + "\n"


def pictures(drawings: Sequence[Drawn]) -> dict[str, bytes]:
    """PNG by file name."""
    return {f"{PICTURES}/{drawing.figure.key}.png": drawing.png for drawing in drawings}


def _section(name: str, head: list[str], body: list[list[str]]) -> list[str]:
    return ["", f"## {_escape(name)}", "", *_table(head, body, num_left=2)]


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
