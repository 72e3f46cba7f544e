"""One view for each kind of results: what its page shows, section by section."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epsim.files import printable
from epsim.report.charts import stack_figures
from epsim.report.compare import Row
from epsim.report.comparison import HEADERS, comparison_rows
from epsim.report.content import Table, amount, counted, figure, metrics_table, stacks_table
from epsim.report.draw import Figure
from epsim.report.flips import flips_by_cell, flips_of_stacks
from epsim.report.frontiers import frontier_figures
from epsim.report.sweeps import sweep_figures
from epsim.results import ResultsData
from epsim.score.formulas import METRICS, metric_name
from epsim.score.verdict import label

MOST_ROWS = 40
HELD_OUT = "gain on held-out steps (95% interval)"
FILE_KEYS = ("file", "trace", "origin", "steps", "measured", "seed", "version", "command")
TUNE_LIMITS = ("does not pay", "limits")
"""Sentences of a tune that say when its answer does not hold."""


@dataclass(frozen=True, slots=True)
class View:
    """The parts of a page that depend on its kind. Every page also has the verdict, the table of stacks and the facts.

    source: where the figures come from, in one line. flips: where another stack is better than the best one, under the
    heading flips_title. summary: the table that a terminal or a notebook shows. answers: (about, text) of `epsim tune`.
    leading, trailing: tables before and after the figures; a table without rows is left out. memory: whether the
    stacks' table has a column for the memory of redundant experts.
    """

    title: Callable[[ResultsData], str]
    source: Callable[[ResultsData], str]
    flips: Callable[[ResultsData], list[str]] = flips_of_stacks
    flips_title: str = "Where another stack is better"
    summary: Callable[[ResultsData], Table] = stacks_table
    answers: Callable[[ResultsData], list[tuple[str, str]]] = lambda results: []
    leading: tuple[Callable[[ResultsData], Table], ...] = ()
    stack_figures: Callable[[ResultsData], list[Figure]] = stack_figures
    trailing: tuple[Callable[[ResultsData], Table], ...] = (metrics_table,)
    memory: bool = True

    def figures(self, results: ResultsData) -> list[Figure]:
        return self.stack_figures(results) + frontier_figures(results)


def view_of(results: ResultsData) -> View:
    return VIEWS[results["kind"]]


def tables(parts: Sequence[Callable[[ResultsData], Table]], results: ResultsData) -> list[Table]:
    """The tables of `parts` that have rows."""
    return [table for table in (part(results) for part in parts) if table[2]]


def _title(results: ResultsData) -> str:
    return printable(f"epsim {results['kind']}: {results['trace']['name']} on {results['setting']['ranks']} ranks")


def _source(results: ResultsData) -> str:
    trace, setting = results["trace"], results["setting"]
    how = "measured in a run of" if results["kind"] == "run" else "replayed from"
    where = f"{trace['name']} ({trace['origin']}, {trace['steps_scored']} steps)"
    return printable(f"{how} {where}, seed {setting['seed']}, epsim {setting['version']}")


def predicted_table(results: ResultsData) -> Table:
    """Each metric of a run that has a predicted and a measured mean, without those of the routed load."""
    table = []
    for entry in results["stacks"]:
        for key, predicted in entry.get("predicted", {}).items():
            measured = entry["metrics"].get(key, {}).get("mean")
            if key.startswith("routed_") or predicted is None or measured is None:
                continue
            unit = METRICS[key].unit
            change = f"{measured / predicted - 1:+.2%}" if predicted else "-"
            table.append([label(entry), metric_name(key), figure(predicted, unit), figure(measured, unit), change])
    headers = ["stack", "metric (mean)", "predicted", "measured", "measured / predicted - 1"]
    return "Predicted and measured", headers, table


def differences_table(results: ResultsData) -> Table:
    rows = [Row(**row) for row in results["comparison"]["rows"]]
    files = [file["file"] for file in results["comparison"]["files"]]
    return "Differences", list(HEADERS), comparison_rows(rows, files)


def _files_table(results: ResultsData) -> Table:
    files = results["comparison"]["files"]
    return "Files", list(FILE_KEYS), [[printable(str(file[key])) for key in FILE_KEYS] for file in files]


def _comparison_title(results: ResultsData) -> str:
    number = len(results["comparison"]["files"])
    return f"epsim compare: {number} results" if number > 1 else f"epsim compare: {printable(results['trace']['name'])}"


def _comparison_source(results: ResultsData) -> str:
    parts = [
        f"{file['file']} ({'measured' if file['measured'] else 'replayed'} {file['trace']}, {file['origin']}, "
        f"{file['steps']} steps, seed {file['seed']}, epsim {file['version']})"
        for file in results["comparison"]["files"]
    ]
    return printable("; ".join(parts))


def candidates_table(results: ResultsData) -> Table:
    """The candidates of a tune; those with a known gain on held-out steps come first."""
    candidates = sorted(results["tune"]["candidates"], key=lambda row: row["gain"] is None)[:MOST_ROWS]
    table = [[row["name"], amount(row["memory_bytes"]), *gains(row)] for row in candidates]
    headers = ["candidate", "memory per GPU", "gain on the steps used to choose", HELD_OUT]
    return "Candidates", headers, table


def gains(row: dict[str, Any]) -> tuple[str, str]:
    """The gain of a candidate on the steps used to choose, and on held-out steps."""
    gain, choosing = row["gain"], row["gain_choosing"]
    held_out = "-" if gain is None else f"{gain['mean']:+.2%}"
    if gain is not None and gain["low"] is not None:
        held_out += f" ({gain['low']:+.2%} to {gain['high']:+.2%})"
    return "-" if choosing is None else f"{choosing:+.2%}", held_out


def answers(results: ResultsData) -> list[tuple[str, str]]:
    """The sentences of a tune, then the commands to paste."""
    sentences = [(line["about"], printable(line["text"])) for line in results["tune"]["words"]]
    commands = dict.fromkeys(command for one in results["tune"]["answers"] for command in one["commands"])
    return [*sentences, *(("command", printable(command)) for command in commands)]


def _sweep_source(results: ResultsData) -> str:
    cells, setting = results["sweep"]["cells"], results["setting"]
    traces = ", ".join(sorted({str(cell.get("trace")) for cell in cells}))
    origins = ", ".join(sorted({cell["origin"] for cell in cells}))
    return printable(f"replayed from {traces} ({origins}), seed {setting['seed']}, epsim {setting['version']}")


def _left_out_table(results: ResultsData) -> Table:
    table = []
    for what in ("failed", "skipped"):
        for cell in results["sweep"][what][:MOST_ROWS]:
            place = ", ".join(f"{key} {value}" for key, value in cell.items() if key not in ("key", "reason", "path"))
            table.append([printable(place), what, printable(cell["reason"])])
    return "Cells without results", ["cell", "status", "reason"], table


VIEWS: dict[str, View] = {
    "replay": View(_title, _source),
    "run": View(_title, _source, leading=(predicted_table,)),
    "tune": View(
        _title,
        _source,
        flips=lambda results: [line["text"] for line in results["tune"]["words"] if line["about"] in TUNE_LIMITS],
        flips_title="When it does not pay",
        summary=candidates_table,
        answers=answers,
        leading=(candidates_table,),
        memory=False,
    ),
    "comparison": View(
        _comparison_title,
        _comparison_source,
        flips=lambda results: flips_of_stacks(results) if len(results["comparison"]["files"]) == 1 else [],
        summary=differences_table,
        leading=(differences_table,),
        trailing=(_files_table, metrics_table),
    ),
    "sweep": View(
        lambda results: f"epsim sweep: {counted(len(results['sweep']['cells']), 'cell')}",
        _sweep_source,
        flips=flips_by_cell,
        flips_title="By cell",
        stack_figures=sweep_figures,
        trailing=(_left_out_table,),
    ),
}
