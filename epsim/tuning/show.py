"""The answers on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from epsim.files import printable
from epsim.report.content import amount
from epsim.report.table import rich_table, terminal
from epsim.report.views import HELD_OUT, gains
from epsim.results import ResultsData

MOST_ROWS = 12
HEADERS = ("candidate", "weights per GPU", "gain when choosing", HELD_OUT, "rounds")


def print_tune(results: ResultsData) -> None:
    """Prints the facts, the best candidates, the answers and the commands. Text from traces is never read as markup."""
    console = terminal()
    tuned, trace, setting = results["tune"], results["trace"], results["setting"]
    shape = (
        f"{trace['num_layers']} layers x {trace['num_experts']} experts, top-{trace['top_k']}, {trace['level']} level"
    )
    facts = (
        ("trace", f"{trace['name']} ({trace['origin']}, {shape})"),
        ("cluster", f"{setting['ranks']} GPUs on {setting['nodes']} node{'s' if setting['nodes'] > 1 else ''}"),
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
        console.print(Text(f"  {command}"), soft_wrap=True)  # without line breaks, so that it can be copied
    console.print(Text(printable(results["verdict"]), style="bold"))


def _table(tuned: Mapping[str, Any]) -> Table:
    rows = [row for row in tuned["candidates"] if row["gain"] is not None]
    others = [row for row in tuned["candidates"] if row["gain"] is None]
    shown = (*rows, *others[: max(MOST_ROWS - len(rows), 0)])
    cells = [(printable(row["name"]), amount(row["memory_bytes"]), *gains(row), str(row["rounds"])) for row in shown]
    return rich_table(HEADERS, cells)
