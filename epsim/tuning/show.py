"""The answers on the terminal."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epsim.files import printable
from epsim.report.table import PIPE_WIDTH
from epsim.results import ResultsData
from epsim.tuning.memory import amount

MOST_ROWS = 12
HEADERS = ("candidate", "weights per GPU", "gain when choosing", "gain on held-out steps (95% interval)", "rounds")


def print_tune(results: ResultsData) -> None:
    """Prints the facts, the top candidates, the answers and the commands. Text from traces is never read as markup."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    tuned, trace, setting = results["tune"], results["trace"], results["setting"]
    shape = (
        f"{trace['num_layers']} layers x {trace['num_experts']} experts, top-{trace['top_k']}, {trace['level']} level"
    )
    facts = (
        ("trace", f"{trace['name']} ({trace['origin']}, {shape})"),
        ("cluster", f"{setting['ranks']} GPUs on {setting['nodes']} node(s)"),
        ("time", setting["timing"]),
        ("steps", tuned["split"]),
        *(("note", note) for note in trace["notes"]),
    )
    for name, value in facts:
        console.print(Text(f"{name}: {printable(value)}", style="dim" if name == "note" else ""))
    console.print(_table(tuned))
    for line in tuned["words"]:
        console.print(Text(f"{line['about']}: ", style="bold").append(printable(line["text"]), style="not bold"))
    for command in (command for answer in tuned["answers"] for command in answer["commands"]):
        console.print(Text(f"  {command}"), soft_wrap=True)  # without line breaks, to be copied
    console.print(Text(printable(results["verdict"]), style="bold"))


def _table(tuned: Mapping[str, Any]) -> Table:
    table = Table()
    for number, header in enumerate(HEADERS):
        table.add_column(Text(header), justify="left" if number == 0 else "right", overflow="fold")
    rows = [row for row in tuned["candidates"] if row["gain"] is not None]
    others = [row for row in tuned["candidates"] if row["gain"] is None]
    for row in (*rows, *others[: max(MOST_ROWS - len(rows), 0)]):
        gain, choosing = row["gain"], row["gain_choosing"]
        held_out = "-" if gain is None else f"{gain['mean']:+.2%}"
        if gain is not None and gain["low"] is not None:
            held_out += f" ({gain['low']:+.2%} to {gain['high']:+.2%})"
        cells = (
            row["name"],
            amount(row["memory_bytes"]),
            "-" if choosing is None else f"{choosing:+.2%}",
            held_out,
            str(row["rounds"]),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
