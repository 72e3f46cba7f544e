"""The table on the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epsim.report.content import facts, headers, key_headers, key_rows, reasons, rows
from epsim.results import Results

PIPE_WIDTH = 240


def print_table(results: Results) -> None:
    """Prints facts, the stacks and the verdict to stdout; text from traces is printed as it is, never as markup."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, highlight=False)
    for name, value in facts(results):
        console.print(Text(f"{name}: {value}"))
    console.print(_table(headers(results), rows(results), num_left=1))
    console.print(_table(key_headers(results), key_rows(results), num_left=2))
    for keys, reason in reasons(results):
        console.print(Text(f"no value for {keys}: {reason}", style="dim"))
    console.print(Text(results["verdict"], style="bold"))


def _table(head: list[str], body: list[list[str]], num_left: int) -> Table:
    table = Table()
    for number, header in enumerate(head):
        table.add_column(Text(header), justify="left" if number < num_left else "right", overflow="fold")
    for cells in body:
        table.add_row(*(Text(cell) for cell in cells))
    return table
