"""Reads a grid file: the traces, clusters, policies and settings of a sweep (docs/sweep.md)."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from epsim.cards import tomllib
from epsim.files import check_source, reason
from epsim.models.known import SCORE_RULES
from epsim.policies.stack import PolicyStack
from epsim.sweep.fields import FLAG, MAX_SEED, Field, check_keys, number, text, texts_of, values_of, whole
from epsim.traces.limits import MAX_EXPERTS
from epsim.traces.options import MAX_DRAWN
from epsim.traces.trace import MAX_SHARED_COST, PHASES

MAX_CELLS = 100_000
MAX_NAME = 60
FILL = "fill"

CLUSTER_AXES: Mapping[str, Field] = {
    "ranks": whole(1),
    "nodes": whole(1),
    "ranks_per_node": whole(1),
    "redundant": whole(0, words=(FILL,)),
    "slots_per_rank": whole(1),
    "groups": whole(1),
}
SETTING_AXES: Mapping[str, Field] = {
    "seed": whole(0, MAX_SEED),
    "plan_share": number(0, 1, open_ends=True),
    "hardware": text(),
    "overlap": FLAG,
    "expert_table": text(),
}
TRACE_AXES: Mapping[str, Field] = {
    "model": text(),
    "phase": text(known=PHASES),
    "shared_cost": number(0, MAX_SHARED_COST),
    "top_k": whole(1, MAX_EXPERTS),
    "experts": whole(1, MAX_EXPERTS),
    "batch": whole(1, 2**31),
    "history": text(),
}
PATH_AXES: Mapping[str, Field] = {
    "path": text(),
    "only": text(known=PHASES),
    "min_tokens": whole(1, MAX_DRAWN),
    "step_tokens": whole(1, 2**31),
    "score_rule": text(known=SCORE_RULES),
}
DRAW_AXES: Mapping[str, Field] = {
    "steps": whole(1, MAX_DRAWN),
    "step_tokens": whole(1, MAX_DRAWN),
    "drift": number(0, 1),
    "draw_seed": whole(0, MAX_SEED),
}
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "groups": (1,),
    "seed": (0,),
    "plan_share": (0.5,),
    "overlap": (False,),
    "steps": (100,),
    "step_tokens": (1024,),
    "drift": (0.1,),
}

Values = dict[str, Any]
NamedStack = tuple[str, PolicyStack]
NameStack = Callable[[str], NamedStack]


@dataclass(frozen=True, slots=True)
class Rule:
    """One [[except]]. It matches cells that have one of the values for each key. policies: stacks that these cells do
    not replay; if there are none, the cells are removed. where: the table, for messages."""

    values: Mapping[str, tuple[Any, ...]]
    policies: tuple[str, ...]
    where: str

    def matches(self, cell: Mapping[str, Any]) -> bool:
        return all(cell.get(key) in wanted for key, wanted in self.values.items())


@dataclass(frozen=True, slots=True)
class Grid:
    """The content of a grid file. policies: texts with their named stacks. traces: each has a single value per key.
    axes: all values of the other keys. rules: the [[except]] tables."""

    path: Path
    policies: tuple[tuple[str, NamedStack], ...]
    traces: tuple[Values, ...]
    axes: Mapping[str, tuple[Any, ...]]
    rules: tuple[Rule, ...]

    def file(self, name: str) -> Path:
        """The path of a file that the grid names. Names are relative to the grid's folder."""
        return self.path.parent / name

    def points(self) -> Iterator[Values]:
        """Yields every combination of values, trace by trace."""
        for trace in self.traces:
            for values in product(*self.axes.values()):
                yield {**trace, **dict(zip(self.axes, values, strict=True))}

    def __len__(self) -> int:
        return math.prod(map(len, (self.traces, *self.axes.values())))


def read_grid(path: Path, name_stack: NameStack) -> Grid:
    """Reads a grid file. name_stack: turns `[NAME=]STACK` into (name or "", stack). Raises FileNotFoundError or
    ValueError in one line with the file, the key and what to give."""
    where = str(path)
    check_source(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not TOML: {error}") from None
    except OSError as error:
        raise ValueError(f"{where}: {reason(error)}: give a file that can be read") from None
    axis_fields = {**CLUSTER_AXES, **SETTING_AXES}
    check_keys(content, ("policies", "trace", *axis_fields, "except"), where)
    policies = _policies(content, name_stack, where)
    if "ranks" not in content:
        raise ValueError(f"{where}: key 'ranks' is missing: give numbers of ranks, such as ranks = [16, 32]")
    for key, same_as in (("nodes", "ranks_per_node"), ("redundant", "slots_per_rank")):
        if key in content and same_as in content:
            raise ValueError(f"{where}: {key} and {same_as} both set the same value: give one of them")
    axes = _axes(content, axis_fields, where)
    if "hardware" not in axes and ("expert_table" in axes or axes["overlap"] != (False,)):
        raise ValueError(f"{where}: overlap and expert_table need predicted times: give hardware")
    if "ranks_per_node" not in axes:
        axes.setdefault("nodes", (1,))
    if "slots_per_rank" not in axes:
        axes.setdefault("redundant", (0,))
    grid = Grid(path, policies, _traces(content, where), axes, _rules(content, policies, where))
    if len(grid) > MAX_CELLS:
        raise ValueError(f"{where}: {len(grid):,} combinations, more than {MAX_CELLS:,}: give fewer values")
    return grid


def _policies(content: Values, name_stack: NameStack, where: str) -> tuple[tuple[str, NamedStack], ...]:
    stacks = []
    for given in texts_of(content, "policies", where):
        try:
            stacks.append((given, name_stack(given)))
        except ValueError as error:
            raise ValueError(f"{where}: policies: {error}") from None
    names = [name or str(stack) for _, (name, stack) in stacks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"{where}: policies: {twice!r} is in the list twice: name each with NAME=STACK")
    return tuple(stacks)


def _tables(content: Values, key: str, where: str) -> list[Values]:
    tables = content.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{where}: {key} is not a list of tables: begin each with [[{key}]]")
    return tables


def _axes(table: Values, fields: Mapping[str, Field], where: str) -> dict[str, tuple[Any, ...]]:
    axes = {key: values_of(table, key, field, where, DEFAULTS.get(key, ())) for key, field in fields.items()}
    return {key: values for key, values in axes.items() if values}


def _traces(content: Values, where: str) -> tuple[Values, ...]:
    tables = _tables(content, "trace", where)
    if not tables:
        raise ValueError(f'{where}: no [[trace]]: give at least one, with path = "FILE" or draw = ["FILE", ...]')
    traces: list[Values] = []
    owner: dict[str, tuple[int, str]] = {}
    for index, table in enumerate(tables):
        title = f"{where}: [[trace]] {index + 1}"
        if ("path" in table) == ("draw" in table):
            raise ValueError(
                f'{title}: give path = "FILE" to read a recording, or draw = ["FILE", ...] to draw from recordings'
            )
        for trace in _crossed(table, title):
            if trace in traces:
                raise ValueError(f"{title}: trace {trace['trace']!r} is given twice with equal values: give it once")
            table_and_path = (index, trace.get("path", ""))
            if owner.setdefault(trace["trace"], table_and_path) != table_and_path:
                raise ValueError(f"{title}: two traces are named {trace['trace']!r}: give each a [[trace]] and a name")
            traces.append(trace)
    return tuple(traces)


def _crossed(table: Values, where: str) -> Iterator[Values]:
    """The traces of one [[trace]], each with one value per key."""
    fields = {**(DRAW_AXES if "draw" in table else PATH_AXES), **TRACE_AXES}
    check_keys(table, ("name", *(["draw"] if "draw" in table else []), *fields), where)
    name = values_of(table, "name", text(crossed=False), where, ("",))[0]
    if "/" in name or len(name) > MAX_NAME:
        raise ValueError(f"{where}: name {name!r}: give up to {MAX_NAME} characters without /")
    axes = _axes({key: value for key, value in table.items() if key not in ("name", "draw")}, fields, where)
    fixed: Values = {}
    if "draw" in table:
        fixed["draw"] = texts_of(table, "draw", where)
        if len(fixed["draw"]) == 1 and len(axes["drift"]) > 1:
            raise ValueError(f"{where}: drift changes the mixture of recordings, but draw has only one: give several")
    else:  # defaults such as step_tokens are only for drawn traces
        axes = {key: values for key, values in axes.items() if key in table}
    for values in product(*axes.values()):
        trace = {**fixed, **dict(zip(axes, values, strict=True))}
        yield {"trace": name or ("drawn" if "draw" in table else Path(trace["path"]).stem), **trace}


def _rules(content: Values, policies: tuple[tuple[str, NamedStack], ...], where: str) -> tuple[Rule, ...]:
    fields = {**CLUSTER_AXES, **SETTING_AXES, **TRACE_AXES, **PATH_AXES, **DRAW_AXES, "trace": text()}
    fields["step_tokens"] = whole(1, 2**31)
    rules = []
    for index, table in enumerate(_tables(content, "except", where)):
        title = f"{where}: [[except]] {index + 1}"
        check_keys(table, ("policies", *fields), title)
        if not table:
            raise ValueError(f"{title}: is empty and would remove every cell: give the values to remove")
        values = {key: values_of(table, key, fields[key], title, ()) for key in table if key != "policies"}
        named = texts_of(table, "policies", title) if "policies" in table else ()
        known = [given for given, _ in policies] + [name for _, (name, _) in policies if name]
        strange = next((name for name in named if name not in known), None)
        if strange is not None:
            raise ValueError(f"{title}: policies {strange!r} is not in the grid: give one of {', '.join(known)}")
        rules.append(Rule(values, named, title))
    return tuple(rules)


def command_of(point: Mapping[str, Any], policies: Sequence[str], trace_name: str) -> str:
    """The command line that gives the results of this single cell, if it is run in the grid's folder."""
    words: list[str] = []

    def say(*keys: str) -> None:
        for key in keys:
            if key in point and point[key] != DEFAULTS.get(key, (None,))[0]:
                option = f"--{key.replace('_', '-')}"
                words.extend([option] if point[key] is True else [option, str(point[key])])

    about = ("top_k", "experts", "model", "phase", "shared_cost")
    if "draw" in point:
        words += ["epsim", "traces", "synthesize", *point["draw"], "-o", trace_name]
        say("steps", "step_tokens", "drift", *about, "batch")
        words += ["--seed", str(point.get("draw_seed", point["seed"]))]
        words.append("&&")
    words += ["epsim", "replay", trace_name if "draw" in point else point["path"]]
    words += ["--ranks", str(point["ranks"]), "--nodes", str(point["nodes"]), "--redundant", str(point["redundant"])]
    say("groups", "history", "plan_share", "only", "min_tokens", "seed", "hardware", "overlap", "expert_table", *about)
    if "draw" not in point:
        say("batch", "score_rule")
        if "step_tokens" in point:
            words += ["--step-tokens", str(point["step_tokens"])]
    for policy in policies:
        words += ["--policy", policy]
    return shlex.join(words).replace(" '&&' ", " && ")
