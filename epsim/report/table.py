"""The table on the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epsim.report.content import facts, formulas, headers, rows
from epsim.results import Results

PIPE_WIDTH = 160


def print_table(results: Results) -> None:
    """Prints facts, the stacks and the verdict to stdout; text from traces is printed as it is, never as markup."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, highlight=False)
    for name, value in facts(results):
        console.print(Text(f"{name}: {value}"))
    table = Table()
    for number, header in enumerate(headers(results)):
        table.add_column(Text(header), justify="left" if number == 0 else "right", overflow="fold")
    for cells in rows(results):
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    for name, formula in formulas(results):
        console.print(Text(f"  {name} = {formula}", style="dim"))
    console.print(Text(results["verdict"], style="bold"))
