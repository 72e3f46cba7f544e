"""The parts that the terminal, report.md and report.html share: the tables of stacks and of metrics, and the facts."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from epsim.files import printable
from epsim.results import ResultsData
from epsim.score.formulas import METRICS, metric_name
from epsim.score.verdict import label

PEAK_OVER_MEAN = "peak/mean: load of the busiest rank / mean load of all ranks; 1.0 is perfect balance."
"""A sentence at the top of every page."""
Table: TypeAlias = tuple[str, list[str], list[list[str]]]
"""Title, headers, rows."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table of stacks. text: what is shown. value: the number to sort by, or None."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: one statistic of one metric. form: the format of values. meaning: the text below the table."""

    key: str
    statistic: str
    form: str
    meaning: str

    @property
    def header(self) -> str:
        return metric_name(self.key) if self.statistic == "mean" else self.statistic


COLUMNS = (
    Column("max_over_mean", "mean", ".3f", "mean over steps and layers"),
    Column("max_over_mean", "p95", ".3f", "95th percentile of peak/mean over steps and layers"),
    Column("optimality_gap", "mean", ".1%", "peak / optimum (lowest peak of this placement) - 1"),
    Column("gap_placement", "mean", ".1%", "cause of imbalance: optimum / mean load - 1"),
    Column("gap_split", "mean", ".1%", "cause of imbalance: peak before rounding / optimum - 1"),
    Column("gap_rounding", "mean", ".1%", "cause of imbalance: rounding to whole tokens raises the peak"),
    Column("gap_shared", "mean", ".1%", "cause of imbalance: shared-expert tokens raise the peak"),
    Column("layer_time_us", "mean", ".1f", "time of a layer on its slowest rank, in microseconds"),
    Column("active_experts", "mean", ".1f", "experts with tokens, on the rank that has the most"),
    Column("kept_mass", "mean", ".3f", "router probability of the experts used / of the model's choice"),
    Column("remote_rank_share", "mean", ".1%", "share of assignments that leave the rank of their token"),
    Column("remote_node_share", "mean", ".1%", "share of assignments that leave the node of their token"),
)
GAIN = (f"{metric_name('throughput_gain')} (95% interval)", "tokens per second / those of the first stack - 1")


def layer_numbers(results: ResultsData) -> list[int]:
    """The model's numbers of the trace's layers."""
    return list(results["trace"].get("layers") or range(results["trace"]["num_layers"]))


def shown_columns(results: ResultsData) -> list[Column]:
    """The columns in which at least one stack has a value."""
    return [c for c in COLUMNS if any(e["metrics"][c.key][c.statistic] is not None for e in results["stacks"])]


def _gains(results: ResultsData) -> bool:
    return any(e["metrics"]["throughput_gain"]["mean"] is not None for e in results["stacks"])


def meanings(results: ResultsData, memory: bool = False) -> list[tuple[str, str]]:
    """(header, meaning) of each column of the stacks' table. memory: whether redundant experts' memory is a column."""
    return [
        ("stack", "the policies, joined by +; kinds of policies that are left out have their default"),
        *((column.header, column.meaning) for column in shown_columns(results)),
        ("vs first (95% interval)", "change of peak/mean from the first stack"),
        *([GAIN] if _gains(results) else []),
        *([("memory per rank", "memory of the redundant experts of all layers")] if memory else []),
    ]


def headers(results: ResultsData, memory: bool = False) -> list[str]:
    return [header for header, _ in meanings(results, memory)]


def cells(results: ResultsData, memory: bool = False) -> list[list[Cell]]:
    columns, gains = shown_columns(results), _gains(results)
    firsts: dict[str, Any] = {}
    is_sweep = results["kind"] == "sweep"
    grid = {cell["key"]: cell for cell in results["sweep"]["cells"]} if is_sweep else {}
    table = []
    for entry in results["stacks"]:
        # In a sweep each cell of the grid has its own first stack.
        cell = entry["cell"] if is_sweep else ""
        first = firsts.setdefault(cell, entry)
        row = [Cell(label(entry))]
        for column in columns:
            value = entry["metrics"][column.key][column.statistic]
            row.append(Cell("-" if value is None else format(value, column.form), value))
        base = first["metrics"]["max_over_mean"]["mean"]
        row.append(Cell("-", 0.0) if entry is first else _versus(entry, "max_over_mean", base))
        if gains:
            row.append(Cell("-", 0.0) if entry is first else _versus(entry, "throughput_gain", 1.0))
        if memory:
            sizes = {key: value for key, value in grid.get(cell, {}).items() if key in ("ranks", "redundant")}
            row.append(_extra(results, results["setting"] | sizes))
        table.append(row)
    return table


def rows(results: ResultsData) -> list[list[str]]:
    return [[cell.text for cell in row] for row in cells(results)]


def _versus(entry: dict[str, Any], key: str, base: float | None) -> Cell:
    interval = entry["versus_first"].get(key)
    if interval is None or not base:
        return Cell("-")
    value = interval["difference"] / base
    words = f"{value:+.1%}"
    if interval["low"] is None:
        return Cell(f"{words} (one step)", value)
    return Cell(f"{words} ({interval['low'] / base:+.1%} to {interval['high'] / base:+.1%})", value)


def stacks_table(results: ResultsData) -> Table:
    return "Stacks side by side", headers(results), rows(results)


def _extra(results: ResultsData, setting: dict[str, Any]) -> Cell:
    """The memory that redundant experts take on a rank."""
    layers = results["trace"]["num_layers"]
    slots = setting["redundant"] / setting["ranks"] * layers
    expert_bytes = setting.get("expert_bytes") or _run(results).get("expert_bytes")
    if expert_bytes:
        return Cell(_bytes(slots * expert_bytes), slots * expert_bytes)
    return Cell(f"{slots:g} experts", slots)


def memory_words(results: ResultsData) -> str:
    """The memory of redundant experts in words; "" if there are none, or if stacks differ in them."""
    setting = results["setting"]
    if not setting["redundant"] or results["kind"] in ("tune", "sweep"):
        return ""
    each = f"{setting['redundant'] / setting['ranks']:g} per rank and layer"
    layers = results["trace"]["num_layers"]
    return f"redundant experts: {each}, {_extra(results, setting).text} per rank for all {layers} layers"


def _bytes(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def _run(results: ResultsData) -> dict[str, Any]:
    """Where and how a run was measured; {} for other kinds."""
    run: dict[str, Any] = results["run"] if results["kind"] == "run" else {}
    return run


def facts(results: ResultsData) -> list[tuple[str, str]]:
    """(name, value) of the facts about the results: trace, cluster, seed, command and notes."""
    trace, setting, run = results["trace"], results["setting"], _run(results)
    shape = f"{trace['num_layers']} layers x {trace['num_experts']} experts, top-{trace['top_k']}"
    nodes = f"{setting['nodes']} node{'s' if setting['nodes'] > 1 else ''}"
    cluster = f"{setting['ranks']} ranks on {nodes}, {setting['redundant']} redundant experts per layer"
    shared = f"work per token, in routed assignments: {setting['shared_cost']:g}" if setting["shared_cost"] else "none"
    kind = f"{trace['origin']}, {trace['level']} level, {trace['phase']}"
    pairs = [
        ("trace", f"{trace['name']} ({kind}), model {trace['model']}"),
        ("shape", shape),
        ("steps", f"{trace['steps_scored']} scored"),
        ("placements", setting["history"]),
        ("cluster", cluster),
        ("shared expert", shared),
        *([("memory", memory_words(results))] if memory_words(results) else []),
        *([("times", setting["timing"])] if "timing" in setting else []),
        *([("run", f"{run['device']}, {run['dtype']}, exchange {run['exchange']}; {run['note']}")] if run else []),
        *((f"stack {label(entry)}", entry["stack"]) for entry in results["stacks"] if label(entry) != entry["stack"]),
        ("seed", str(setting["seed"])),
        ("version", f"epsim {setting['version']}"),
        ("command", setting["command"]),
        *(("note", note) for note in trace.get("notes", [])),
        *_stack_notes(results),
    ]
    return [(name, printable(value)) for name, value in pairs]


def _stack_notes(results: ResultsData) -> list[tuple[str, str]]:
    """The stacks' notes; a note of several stacks appears once, with their names."""
    stacks_of: dict[str, list[str]] = {}
    for entry in results["stacks"]:
        for note in entry.get("notes", []):
            stacks_of.setdefault(note, []).append(label(entry))
    every = len(results["stacks"])
    return [("note" if len(on) == every else f"note on {', '.join(on)}", note) for note, on in stacks_of.items()]


def metrics_table(results: ResultsData) -> Table:
    """Each metric that has a value: its formula, and the mean of each stack. `reasons` explains the others."""
    stacks = results["stacks"]
    table = []
    for key in dict.fromkeys(key for entry in stacks for key in entry["metrics"]):
        values = [entry["metrics"].get(key, {}).get("mean") for entry in stacks]
        if all(value is None for value in values):
            continue
        total = key.removeprefix("routed_")
        metric = METRICS[total]
        formula = metric.formula if total == key else f"{metric_name(total)}, for the routed load alone"
        means = ("-" if value is None else figure(value, metric.unit) for value in values)
        table.append([metric_name(key), formula, *means])
    return "Every metric", ["metric (mean)", "formula", *(label(entry) for entry in stacks)], table


def reasons(results: ResultsData) -> list[tuple[str, str]]:
    """Why metrics have no value: (metrics with the same reason, reason)."""
    missing: dict[str, dict[str, None]] = {}
    for entry in results["stacks"]:
        for key, value in entry["metrics"].items():
            if "reason" in value:
                missing.setdefault(value["reason"], {})[metric_name(key)] = None
    return [(", ".join(keys), reason) for reason, keys in missing.items()]


def figure(value: float, unit: str) -> str:
    return f"{value:.4f}" if unit in ("ratio", "share") else f"{value:,.2f}"


def amount(size: float, sign: str = "") -> str:
    """A number of bytes as text, in GB, or in MB if they are below 0.1 GB."""
    small = 0 < abs(size) < 1e8
    return f"{size / 1e6:{sign},.3g} MB" if small else f"{size / 1e9:{sign},.1f} GB"


def counted(number: int, noun: str) -> str:
    """counted(1, "cell") is "1 cell", counted(2, "cell") is "2 cells"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
