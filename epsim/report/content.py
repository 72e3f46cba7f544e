"""The content that table, Markdown and page share: columns, cells, and the words around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from epsim.files import printable
from epsim.report.compare import Row
from epsim.report.comparison import comparison_headers, comparison_rows
from epsim.results import Results
from epsim.score.formulas import METRICS
from epsim.score.verdict import label


@dataclass(frozen=True, slots=True)
class Cell:
    """text: as it is shown; value: what it sorts by, None for none."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """key: metric; statistic: which of its summary; header and cell: how it is printed; formula: said on the page."""

    key: str
    statistic: str
    header: str
    cell: Callable[[float], str]
    formula: str = ""


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:.1f}"


COLUMNS = (
    Column("max_over_mean", "mean", "peak/mean", _ratio),
    Column("max_over_mean", "p95", "p95", _ratio, "95th percentile of peak / mean"),
    Column("optimality_gap", "mean", "gap", _percent),
    Column("gap_placement", "mean", "placement", _percent),
    Column("gap_split", "mean", "split", _percent),
    Column("gap_rounding", "mean", "rounding", _percent),
    Column("gap_shared", "mean", "shared", _percent),
    Column("layer_time_us", "mean", "layer us", _number),
    Column("active_experts", "mean", "active", _number),
    Column("kept_mass", "mean", "kept", _ratio),
    Column("remote_rank_share", "mean", "off rank", _percent),
    Column("remote_node_share", "mean", "off node", _percent),
)
VERSUS = "vs first (95% interval)"
GAIN = "gain (95% interval)"


def shown_columns(results: Results) -> list[Column]:
    """Those for which at least one stack has a value."""
    return [c for c in COLUMNS if any(e["metrics"][c.key][c.statistic] is not None for e in results["stacks"])]


def _gains(results: Results) -> bool:
    return any(e["metrics"]["throughput_gain"]["mean"] is not None for e in results["stacks"])


def headers(results: Results, memory: bool = False) -> list[str]:
    """memory: with what redundant experts take, as the page shows it."""
    found = ["stack", *(c.header for c in shown_columns(results)), VERSUS, *([GAIN] if _gains(results) else [])]
    return [*found, "memory a rank"] if memory else found


def header_titles(results: Results) -> list[str]:
    """What each header of the page stands for."""
    titles = [column.formula or METRICS[column.key].formula for column in shown_columns(results)]
    gains = [METRICS["throughput_gain"].formula] if _gains(results) else []
    return [
        "policy stack",
        *titles,
        "peak / mean less the first stack's, in percent of the latter",
        *gains,
        "of redundant experts",
    ]


def cells(results: Results, memory: bool = False) -> list[list[Cell]]:
    columns, gains = shown_columns(results), _gains(results)
    firsts: dict[str, Any] = {}
    table = []
    for entry in results["stacks"]:
        # In a sweep every cell of the grid has a first stack of its own.
        first = firsts.setdefault(entry.get("cell", ""), entry)
        row = [Cell(label(entry))]
        for column in columns:
            value = entry["metrics"][column.key][column.statistic]
            row.append(Cell("-" if value is None else column.cell(value), value))
        base = first["metrics"]["max_over_mean"]["mean"]
        row.append(Cell("-", 0.0) if entry is first else _versus(entry, "max_over_mean", base))
        if gains:
            row.append(Cell("-", 0.0) if entry is first else _versus(entry, "throughput_gain", 1.0))
        if memory:
            row.append(_extra(results, _setting(results, entry)))
        table.append(row)
    return table


def _setting(results: Results, entry: dict[str, Any]) -> dict[str, Any]:
    """Ranks and redundant experts of an entry: of a sweep its cell's."""
    cells = {cell["key"]: cell for cell in results.get("sweep", {}).get("cells", ())}
    cell = cells.get(entry.get("cell"), {})
    own = {key: cell[key] for key in ("ranks", "redundant") if isinstance(cell.get(key), int)}
    return {**results["setting"], **own}


def rows(results: Results) -> list[list[str]]:
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


def _extra(results: Results, setting: dict[str, Any]) -> Cell:
    """What the redundant experts take of a rank's memory."""
    if "tune" in results:  # whose candidates tell their own
        return Cell("-")
    layers = results["trace"]["num_layers"]
    slots = setting["redundant"] / setting["ranks"] * layers
    one = setting.get("expert_bytes") or results.get("run", {}).get("expert_bytes")
    return Cell(_bytes(slots * one), slots * one) if one else Cell(f"{slots:g} experts", slots)


def memory_words(results: Results) -> str:
    """The same in words; "" without redundant experts."""
    setting = results["setting"]
    if not setting["redundant"] or "tune" in results or "sweep" in results:
        return ""
    each = f"{setting['redundant'] / setting['ranks']:g} a rank and layer"
    layers = results["trace"]["num_layers"]
    return f"redundant experts: {each}, {_extra(results, setting).text} a rank over {layers} layers"


def _bytes(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def title(results: Results) -> str:
    trace, ranks = results["trace"], results["setting"]["ranks"]
    if "sweep" in results:
        return f"epsim sweep: {len(results['sweep']['cells'])} cells"
    if "comparison" in results and len(results["comparison"]["files"]) > 1:
        return f"epsim compare: {len(results['comparison']['files'])} results"
    kind = "tune" if "tune" in results else "run" if "run" in results else "replay"
    return printable(f"epsim {kind}: {trace['name']} on {ranks} ranks")


def source(results: Results) -> str:
    """Where figures are from, in one line: data, seed, version."""
    files = results.get("comparison", {}).get("files", ())
    if len(files) > 1:
        parts = [
            f"{file['file']} ({'measured' if file['measured'] else 'replayed'} {file['trace']}, {file['origin']}, "
            f"{file['steps']} steps, seed {file['seed']}, epsim {file['version']})"
            for file in files
        ]
        return printable("; ".join(parts))
    trace, setting = results["trace"], results["setting"]
    measured = "measured in a run of" if "run" in results else "replayed from"
    told = f"{trace['name']} ({trace['origin']}, {trace['steps_scored']} steps)"
    if "sweep" in results:
        told = ", ".join(sorted({str(cell.get("trace")) for cell in results["sweep"]["cells"]}))
        told += f" ({', '.join(sorted({cell['origin'] for cell in results['sweep']['cells']}))})"
    return printable(f"{measured} {told}, seed {setting['seed']}, epsim {setting['version']}")


def facts(results: Results) -> list[tuple[str, str]]:
    """What the figures stand on."""
    trace, setting, run = results["trace"], results["setting"], results.get("run")
    shape = f"{trace['num_layers']} layers x {trace['num_experts']} experts, top-{trace['top_k']}"
    cluster = (
        f"{setting['ranks']} ranks on {setting['nodes']} node(s), {setting['redundant']} redundant experts a layer"
    )
    shared = f"costs {setting['shared_cost']:g} routed assignments a token" if setting["shared_cost"] else "none"
    said = [
        (
            "trace",
            f"{trace['name']} ({trace['origin']}, {trace['level']} level, {trace['phase']}), model {trace['model']}",
        ),
        ("shape", shape),
        ("steps", f"{trace['steps_scored']} scored"),
        ("placements", setting["history"]),
        ("cluster", cluster),
        ("shared expert", shared),
        *([("memory", memory_words(results))] if memory_words(results) else []),
        *([("times", setting["timing"])] if "timing" in setting else []),
        *([("run", f"{run['device']}, {run['dtype']}, exchange {run['exchange']}; {run['note']}")] if run else []),
        *((f"stack {label(entry)}", entry["stack"]) for entry in results["stacks"] if entry.get("name")),
        ("seed, version", f"{setting['seed']}, epsim {setting['version']}"),
        ("command", setting["command"]),
        *(("note", note) for note in trace.get("notes", [])),
        *_stack_notes(results),
    ]
    return [(name, printable(value)) for name, value in said]


def _stack_notes(results: Results) -> list[tuple[str, str]]:
    """Notes on stacks; what is said of all of them is said once."""
    said: dict[str, list[str]] = {}
    for entry in results["stacks"]:
        for note in entry.get("notes", []):
            said.setdefault(note, []).append(label(entry))
    num_stacks = len(results["stacks"])
    return [("note" if len(on) == num_stacks else f"note on {', '.join(on)}", note) for note, on in said.items()]


def key_headers(results: Results) -> list[str]:
    return ["metric (mean)", "formula", *(label(entry) for entry in results["stacks"])]


def key_rows(results: Results) -> list[list[str]]:
    """Every metric that has a value, its formula beside the means of every stack; `reasons` tells of the others."""
    table = []
    for key in results["stacks"][0]["metrics"]:
        values = [entry["metrics"][key]["mean"] for entry in results["stacks"]]
        if all(value is None for value in values):
            continue
        metric = METRICS[key.removeprefix("routed_")]
        formula = "as above, on routed load alone" if key.startswith("routed_") else metric.formula
        table.append([key, formula, *("-" if value is None else figure(value, metric.unit) for value in values)])
    return table


def reasons(results: Results) -> list[tuple[str, str]]:
    """Why a metric has no value: (metrics, reason), metrics of one reason together."""
    missing: dict[str, dict[str, None]] = {}
    for entry in results["stacks"]:
        for key, value in entry["metrics"].items():
            if "reason" in value:
                missing.setdefault(value["reason"], {})[key] = None
    return [(", ".join(keys), reason) for reason, keys in missing.items()]


def figure(value: float, unit: str) -> str:
    return f"{value:.4f}" if unit in ("ratio", "share") else f"{value:,.2f}"


def predicted_headers(results: Results) -> list[str]:
    return ["stack", "metric (mean)", "predicted", "measured", "measured / predicted - 1"]


def predicted_rows(results: Results) -> list[list[str]]:
    """Of a run: every metric with a predicted and a measured mean, metrics of routed load left out."""
    table = []
    for entry in results["stacks"]:
        for key, value in entry.get("predicted", {}).items():
            mean = entry["metrics"].get(key, {}).get("mean")
            if key.startswith("routed_") or value is None or mean is None:
                continue
            unit = METRICS[key].unit
            change = f"{mean / value - 1:+.2%}" if value else "-"
            table.append([label(entry), key, figure(value, unit), figure(mean, unit), change])
    return table


Table: TypeAlias = tuple[str, list[str], list[list[str]]]
"""Title, headers, rows."""


def tables_of(results: Results) -> list[Table]:
    """The tables behind the first one."""
    found: list[Table] = []
    if "comparison" in results:
        rows = [Row(**row) for row in results["comparison"]["rows"]]
        files = [file["file"] for file in results["comparison"]["files"]]
        found.append(("Differences", comparison_headers(), comparison_rows(rows, files)))
        found.append(("Files", ["file", *FILE_KEYS], [_file_row(file) for file in results["comparison"]["files"]]))
    if "tune" in results:
        found.append(("Candidates", list(CANDIDATE_HEADERS), candidate_rows(results["tune"]["candidates"])))
    predicted = predicted_rows(results)
    if predicted:
        found.append(("Predicted beside measured", predicted_headers(results), predicted))
    if "sweep" in results:
        left = [*_left_out(results["sweep"]["failed"], "failed"), *_left_out(results["sweep"]["skipped"], "skipped")]
        return [*found, ("Cells left out", ["cell", "", "reason"], left)] if left else found
    return [*found, ("Every metric", key_headers(results), key_rows(results))]


FILE_KEYS = ("trace", "origin", "steps", "measured", "seed", "version", "command")
CANDIDATE_HEADERS = (
    "candidate",
    "memory a GPU",
    "gain on the steps chosen on",
    "gain on steps held out (95% interval)",
)
MOST_CANDIDATES = 40


def _file_row(file: dict[str, Any]) -> list[str]:
    return [printable(str(file[key])) for key in ("file", *FILE_KEYS)]


def candidate_rows(candidates: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Of `epsim tune`: those whose gain is known on steps held out first."""
    ordered = sorted(candidates, key=lambda row: row["gain"] is None)
    table = []
    for row in ordered[:MOST_CANDIDATES]:
        gain, choosing = row["gain"], row["gain_choosing"]
        held_out = "-" if gain is None else f"{gain['mean']:+.2%}"
        if gain is not None and gain["low"] is not None:
            held_out += f" ({gain['low']:+.2%} to {gain['high']:+.2%})"
        told = "-" if choosing is None else f"{choosing:+.2%}"
        table.append([row["name"], f"{row['memory_bytes'] / 1e9:.1f} GB", told, held_out])
    return table


def _left_out(cells: Sequence[dict[str, Any]], what: str) -> list[list[str]]:
    rows = []
    for cell in cells[:MOST_CANDIDATES]:
        place = ", ".join(f"{key} {value}" for key, value in cell.items() if key not in ("key", "reason", "path"))
        rows.append([printable(place), what, printable(str(cell["reason"]))])
    return rows


def answers(results: Results) -> list[tuple[str, str]]:
    """Of `epsim tune`: (what about, words), then the commands to paste."""
    if "tune" not in results:
        return []
    said = [(line["about"], printable(line["text"])) for line in results["tune"]["words"]]
    commands = [command for one in results["tune"]["answers"] for command in one["commands"]]
    return [*said, *(("command", printable(command)) for command in dict.fromkeys(commands))]
