"""Conditions of `epsim compare --fail-if`: NAME.METRIC.STATISTIC, an operator and a number (docs/commands.md)."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epsim.report.compare import Row, Side
from epsim.score.formulas import metric_key, metric_name
from epsim.score.verdict import label

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
OF_A_STACK = ("mean", "p50", "p95", "p99", "max")
OF_A_PAIR = ("difference", "low", "high")
_SHAPE = re.compile(r"\s*(.+)\.([\w/ ]+)\.([a-z_0-9]+)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition on the stack `name` of the last file. metric: its name in tables, or its key. statistic: one
    of OF_A_STACK, or of OF_A_PAIR for the difference from the first file."""

    text: str
    name: str
    metric: str
    statistic: str
    operator: str
    number: float


def parse_condition(text: str) -> Condition:
    """Raises ValueError in one line."""
    found = _SHAPE.fullmatch(text)
    example = 'give NAME.METRIC.STATISTIC, a comparison and a number, as "best.peak/mean.mean > 1.05"'
    if found is None:
        raise ValueError(f"--fail-if {text!r}: {example}")
    name, metric, statistic, sign, number = found.groups()
    if statistic not in OF_A_STACK + OF_A_PAIR:
        raise ValueError(f"--fail-if {text!r}: {statistic!r} is not one of {', '.join(OF_A_STACK + OF_A_PAIR)}")
    try:
        limit = float(number)
    except ValueError:
        raise ValueError(f"--fail-if {text!r}: {number!r} is not a number; {example}") from None
    if limit != limit:
        raise ValueError(f"--fail-if {text!r}: nothing compares with nan; {example}")
    return Condition(text, name.strip(), metric.strip(), statistic, sign, limit)


def holds(condition: Condition, sides: Sequence[Side], rows: Sequence[Row]) -> tuple[bool, float]:
    """(whether the condition holds, the value). Raises ValueError where there is no such stack, metric or value."""
    last = sides[-1]
    stacks = {label(entry): entry for entry in last.results["stacks"]}
    by_text = {entry["stack"]: entry for entry in last.results["stacks"]}
    entry = stacks.get(condition.name) or by_text.get(condition.name)
    where = f"--fail-if {condition.text!r}"
    if entry is None:
        raise ValueError(f"{where}: {last.name} has no stack {condition.name!r}, only {', '.join(stacks)}")
    key = metric_key(condition.metric, entry["metrics"])
    if key is None:
        names = ", ".join(map(metric_name, entry["metrics"]))
        raise ValueError(f"{where}: no metric {condition.metric!r}; there are {names}")
    metric = entry["metrics"][key]
    value: float | None
    if condition.statistic in OF_A_STACK:
        value = metric[condition.statistic]
        why = metric.get("reason", "")
    else:
        wanted = (last.name, label(entry), key)
        row = next((one for one in rows if (one.second_file, one.second_stack, one.metric) == wanted), None)
        value = None if row is None else getattr(row, condition.statistic)
        why = "it is the first stack, or these results give no interval"
    if value is None:
        raise ValueError(f"{where}: has no value: {why}")
    return OPERATORS[condition.operator](value, condition.number), value
