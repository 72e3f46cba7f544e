"""Results as text for a terminal."""

import io
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epsim.files import printable
from epsim.report.compare import Row, Side
from epsim.report.comparison import HEADERS, comparison_rows
from epsim.report.content import facts, metrics_table, reasons, stacks_table
from epsim.report.views import view_of
from epsim.results import ResultsData

PIPE_WIDTH = 240


def terminal() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def print_table(results: ResultsData) -> None:
    """Prints facts, stacks, metrics and verdict to stdout. Text from traces is never read as markup."""
    console = terminal()
    for name, value in facts(results):
        console.print(Text(f"{name}: {value}"))
    console.print(rich_table(*stacks_table(results)[1:]))
    console.print(rich_table(*metrics_table(results)[1:], left=(0, 1)))
    for keys, reason in reasons(results):
        console.print(Text(f"no value for {keys}: {reason}", style="dim"))
    console.print(Text(printable(results["verdict"]), style="bold"))


def summary_text(results: ResultsData) -> str:
    """The main table of a kind and the verdict; of a tune also its answers and commands."""
    text = io.StringIO()
    console = Console(file=text, width=PIPE_WIDTH, highlight=False)
    view = view_of(results)
    console.print(rich_table(*view.summary(results)[1:]))
    for about, answer in view.answers(results):
        console.print(Text(f"{about}: {answer}"), soft_wrap=True)
    console.print(Text(printable(results["verdict"])), end="", soft_wrap=True)
    return text.getvalue()


def print_comparison(rows: Sequence[Row], sides: Sequence[Side], verdict: str) -> None:
    """Prints the rows of a comparison, its files, and its verdict to stdout."""
    console = terminal()
    for number, side in enumerate(sides, start=1):
        trace = side.results["trace"]
        kind = "measured" if side.results["kind"] == "run" else "replayed"
        console.print(Text(printable(f"{number}: {side.name}: {trace['name']}, {trace['steps_scored']} steps, {kind}")))
    console.print(rich_table(HEADERS, comparison_rows(rows, [side.name for side in sides]), left=(0, 1, 2)))
    console.print(Text(printable(verdict), style="bold"))


def rich_table(head: Sequence[str], body: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """A table for a terminal. left: the columns that are aligned to the left; the others are aligned to the right."""
    table = Table()
    for number, header in enumerate(head):
        table.add_column(Text(header), justify="left" if number in left else "right", overflow="fold")
    for cells in body:
        table.add_row(*(Text(cell) for cell in cells))
    return table
