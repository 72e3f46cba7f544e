"""Writes docs/figures.md from benchmarks/figures_template.md and the JSON files in benchmarks/results.

    python benchmarks/figures.py [--check]

The template is the page with fields in place of numbers: `{split[cpu]}` is the entry "cpu" of split.json. The line
after `@each FILE KEY.KEY {"name": value, ...}` is written once for each `row` of that list that has these values.
Formats besides Python's own: `pc` is a percentage with two digits, `us` are microseconds, whole numbers from 100 on. A
missing value is shown as "-", True and False as "yes" and "NO". `facts` are computed by `facts()`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from common import RESULTS, ROOT, script_parser

PAGE, TEMPLATE = ROOT / "docs/figures.md", ROOT / "benchmarks/figures_template.md"
SOLVERS = {
    "ours, GPU": "`lplb`, GPU",
    "ours, CPU": "`lplb`, CPU",
    "ours, whole tokens, CPU": "`lplb(counts=gathered)`, whole tokens",
    "OR-Tools GLOP": "OR-Tools GLOP",
    "HiGHS": "HiGHS",
    "LPLB, true maximum": "LPLB, five steps, step length corrected",
    "LPLB as published": "LPLB, five steps, as published",
    "lplb-ipm (SGLang's form)": "`lplb-ipm`, SGLang's form of LPLB",
    "pairwise edges": "pairwise edge balancing",
    "even": "`even`",
    "ours, sampled per token": "`lplb-sampled`: the exact split, sampled per token",
    "lplb-ipm, sampled per token": "`lplb-ipm`, sampled per token",
    "even, sampled per token": "`random`: the even split, sampled per token",
}
Load = Callable[[str], Any]


def load(name: str) -> Any:
    """A file of benchmarks/results, by its name without .json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def percent(part: float) -> str:
    """Two significant digits. Values below a millionth of a percent are rounding errors of sums and count as 0."""
    if abs(part) < 1e-8:
        return "0"
    number = 100 * part
    return f"{number:.0f}%" if number >= 99.5 else f"{number:#.2g}".rstrip(".") + "%"


class Field:
    """A value of a template: its entries are fields too, and it knows the formats above."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, key: str | int) -> Field:
        if isinstance(self.value, dict):
            return Field(self.value.get(str(key)))
        return Field(self.value[int(key)] if isinstance(self.value, list) else None)

    def __format__(self, spec: str) -> str:
        if self.value is None:
            return "-"
        if isinstance(self.value, bool):
            return "yes" if self.value else "NO"
        if spec == "pc":
            return percent(self.value)
        if spec == "us":
            return f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return format(self.value, spec)


class Fields(dict[str, Field]):
    """Files of results, read when a template asks for them."""

    def __init__(self, load: Load, **rows: Any) -> None:
        super().__init__({name: Field(value) for name, value in rows.items()})
        self.load = load

    def __missing__(self, name: str) -> Field:
        self[name] = Field(facts(self.load) if name == "facts" else self.load(name))
        return self[name]


def facts(load: Load) -> dict[str, Any]:
    """Numbers and rows that are computed from several entries."""
    gpu, runtime, model = load("split_gpu")["rows"], load("runtime")["parts"], load("model")
    searched = [(row["planned"], row["eplb"] - row["searched"]) for row in load("placement")["searched"]]
    gains = {
        name: [gain for planned, gain in searched if (planned == "all others") == others]
        for name, others in (("others", True), ("single", False))
    }
    most = {
        kind: max(row["graph_most"] for row in runtime["balance"] if row["collective"] == kind and "graph_most" in row)
        for kind in ("nccl", "peer")
    }
    own = {row["batch"]: row["0.178"]["us"] for row in load("reader_speed")["rows"] if row["shape"] == "qwen3-30b-a3b"}
    moe, dense = (model[form]["heldout_cross_entropy"] for form in ("moe", "dense"))
    proved = [row[kind] for row in solvers(load) if row["ours"] for kind in ("real", "pairs", "hard")]
    return {
        "split_gpu": {
            "problems": sum(row["problems"] for row in gpu),
            "unproven": sum(row["unproven"] for row in gpu),
            "bits": "equal those of the CPU bit for bit"
            if all(row["equal"] and row["equal_whole"] and row["equal_warm"] for row in gpu)
            else "do NOT equal those of the CPU",
        },
        "searched": {
            name: {
                "better": sum(x > 0 for x in part),
                "of": len(part),
                "mean": sum(part) / len(part),
                "worst": -min(part),
            }
            for name, part in gains.items()
        },
        "balance": most,
        "over_bare": max(row["over_bare_graph"] for row in runtime["exchange"] if "over_bare_graph" in row),
        "solvers": solvers(load),
        "reader_batch": [
            {**row, "own": own[row["batch"]], "gain over own": own[row["batch"]] / row["us"]}
            for row in load("reader_batch_speed")["rows"]
        ],
        "reader_steps": reader_steps(load("reader_predicted")),
        "bandwidth": load("reader_speed")["bandwidth"] / 1e12,
        "router_losses": [
            point
            for point in load("oea_quality")["points"]
            if point["batch_size"] == 16 and point["family"] != "oea general"
        ],
        "joint": [
            {"stack": rows[0]["stack"], "means": [row["max_over_mean"]["mean"] for row in rows]}
            for rows in zip(*(problem["rows"] for problem in load("joint")["problems"]), strict=True)
        ],
        "unproven": sum(part["unproven"] for part in proved),
        "answered": sum(part["answered"] for part in proved),
        "resident": max(row["resident_mib"] for row in load("replay")["rows"]) / 1024,
        "tune_resident": load("tune")["resident_mib"] / 1024,
        "domains": [
            {
                "domain": domain,
                "tokens": count / 1e6,
                "moe": moe[domain],
                "dense": dense[domain],
                "difference": moe[domain] - dense[domain],
                "skew": ", ".join(f"{layer['max_over_mean']:.2f}" for layer in model["skew"][domain]),
            }
            for domain, count in model["corpus_tokens"].items()
        ],
        **gates(load("gates")["gates"]),
    }


def solvers(load: Load) -> list[dict[str, Any]]:
    """One row per solver of the split: `real`, `pairs` and `hard` have its figures on that kind of problems."""
    rows: dict[str, dict[str, Any]] = {
        name: {"name": words, "ours": name in ("ours, CPU", "ours, GPU")} for name, words in SOLVERS.items()
    }
    for part in load("split_h200")["summary"] + load("split")["summary"]:
        rows[part["solver"]][part["kind"]] = part
    return list(rows.values())


def reader_steps(found: dict[str, Any]) -> list[dict[str, Any]]:
    """By batch: gains of Qwen3-30B-A3B's layer and step that bytes allow, beside those with measured layers."""
    rows = {row["batch"]: dict(row) for row in found["measured"]["rows"]}
    for row in found["rows"]:
        if row["shape"] == "qwen3-30b-a3b":
            form = "set" if "batch" in row["reader"] else "own"
            rows[row["batch"]] |= {f"{form} layer": row["layer"], f"{form} step": row["model"]}
    return list(rows.values())


def gates(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Gates with their errors as text; their notes, those of failed gates first."""
    rows, notes = [], dict[str, list[str]]()
    for gate in sorted(found, key=lambda gate: gate["holds"]):
        if gate["note"]:
            notes.setdefault(gate["note"], []).append(gate["what"])
    for gate in found:
        errors = ", ".join(f"{name} {100 * value:.1f}%" for name, value in gate["figures"].items())
        rows.append({**gate, "errors": errors, "result": "holds" if gate["holds"] else "FAILS"})
    failed = sum(not gate["holds"] for gate in found)
    shown = [{"what": "; ".join(whose), "note": note} for note, whose in notes.items()]
    return {"gates": rows, "gate_notes": shown, "gates_failed": failed, "num_gates": len(found)}


def page(load: Load = load) -> str:
    """The text of docs/figures.md for these results."""
    fields, lines = Fields(load), iter(TEMPLATE.read_text().splitlines())
    written = []
    for line in lines:
        if not line.startswith("@each "):
            written.append(line.format_map(fields))
            continue
        _, file, keys, wanted = line.split(maxsplit=3)
        row_line, rows = next(lines), fields[file]
        for key in keys.split("."):
            rows = rows[key]
        for row in rows.value:
            if all(row.get(name) == value for name, value in json.loads(wanted).items()):
                written.append(row_line.format_map(Fields(load, row=row)))
    return "\n".join(written) + "\n"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether docs/figures.md is up to date")
    if parser.parse_args().check:
        sys.exit(
            None if PAGE.read_text() == page() else "docs/figures.md is out of date: run python benchmarks/figures.py"
        )
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
