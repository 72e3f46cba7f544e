"""Reads a grid file: the traces, clusters, policies and settings of a sweep (docs/sweep.md)."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from epsim.files import check_source, reason
from epsim.models.known import SCORE_RULES
from epsim.policies.stack import PolicyStack
from epsim.sweep.fields import FLAG, MAX_SEED, Field, check_keys, number, text, texts_of, values_of, whole
from epsim.traces.limits import MAX_EXPERTS
from epsim.traces.options import MAX_DRAWN
from epsim.traces.trace import MAX_SHARED_COST, PHASES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    """One [[except]]. It matches cells with these values; policies: texts of stacks that such cells do not replay."""

    values: Mapping[str, tuple[Any, ...]]
    policies: tuple[str, ...]
    where: str

    def matches(self, cell: Mapping[str, Any]) -> bool:
        return all(cell.get(key) in wanted for key, wanted in self.values.items())


@dataclass(frozen=True, slots=True)
class Grid:
    """path: the file; traces: every trace with one value per key; axes: values of the other keys."""

    path: Path
    policies: tuple[tuple[str, NamedStack], ...]
    traces: tuple[Values, ...]
    axes: Mapping[str, tuple[Any, ...]]
    rules: tuple[Rule, ...]

    def file(self, name: str) -> Path:
        """The path of a file, whose name is relative to the grid's folder."""
        return self.path.parent / name

    def points(self) -> Iterator[Values]:
        """Yields every combination, all those of one trace together."""
        for trace in self.traces:
            for values in product(*self.axes.values()):
                yield {**trace, **dict(zip(self.axes, values, strict=True))}

    def __len__(self) -> int:
        number = len(self.traces)
        for values in self.axes.values():
            number *= len(values)
        return number


def read_grid(path: Path, name_stack: NameStack) -> Grid:
    """Reads a grid file. name_stack: turns `[NAME=]STACK` into (name or "", stack).

    Raises FileNotFoundError or ValueError with one line, which names the file and the key and says what to give.
    """
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
    for one, other in (("nodes", "ranks_per_node"), ("redundant", "slots_per_rank")):
        if one in content and other in content:
            raise ValueError(f"{where}: {one} and {other} both set the same value: give one of them")
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
    found = []
    for given in texts_of(content, "policies", where):
        try:
            found.append((given, name_stack(given)))
        except ValueError as error:
            raise ValueError(f"{where}: policies: {error}") from None
    names = [name or str(stack) for _, (name, stack) in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"{where}: policies: {twice!r} is in the list twice: name each with NAME=STACK")
    return tuple(found)


def _tables(content: Values, key: str, where: str) -> list[Values]:
    tables = content.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{where}: {key} is not a list of tables: begin each with [[{key}]]")
    return tables


def _axes(table: Values, fields: Mapping[str, Field], where: str) -> dict[str, tuple[Any, ...]]:
    found = {key: values_of(table, key, field, where, DEFAULTS.get(key, ())) for key, field in fields.items()}
    return {key: values for key, values in found.items() if values}


def _traces(content: Values, where: str) -> tuple[Values, ...]:
    tables = _tables(content, "trace", where)
    if not tables:
        raise ValueError(f'{where}: no [[trace]]: give at least one, with path = "FILE" or draw = ["FILE", ...]')
    found: list[Values] = []
    owner: dict[str, tuple[int, str]] = {}
    for place, table in enumerate(tables):
        here = f"{where}: [[trace]] {place + 1}"
        if ("path" in table) == ("draw" in table):
            raise ValueError(
                f'{here}: give path = "FILE" to read a recording, or draw = ["FILE", ...] to draw from some'
            )
        for trace in _crossed(table, here):
            if trace in found:
                raise ValueError(f"{here}: trace {trace['trace']!r} is given twice with equal values: give it once")
            own = (place, trace.get("path", ""))
            if owner.setdefault(trace["trace"], own) != own:
                raise ValueError(f"{here}: two traces are named {trace['trace']!r}: give each a [[trace]] and a name")
            found.append(trace)
    return tuple(found)


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
            raise ValueError(
                f"{where}: drift changes the mixture of recordings, but draw has one: give several to draw from"
            )
    else:  # what has a default where traces are drawn is asked for by few recordings alone
        axes = {key: values for key, values in axes.items() if key in table}
    for values in product(*axes.values()):
        trace = {**fixed, **dict(zip(axes, values, strict=True))}
        yield {"trace": name or ("drawn" if "draw" in table else Path(trace["path"]).stem), **trace}


def _rules(content: Values, policies: tuple[tuple[str, NamedStack], ...], where: str) -> tuple[Rule, ...]:
    fields = {**CLUSTER_AXES, **SETTING_AXES, **TRACE_AXES, **PATH_AXES, **DRAW_AXES, "trace": text()}
    fields["step_tokens"] = whole(1, 2**31)
    rules = []
    for place, table in enumerate(_tables(content, "except", where)):
        here = f"{where}: [[except]] {place + 1}"
        check_keys(table, ("policies", *fields), here)
        if not table:
            raise ValueError(f"{here}: is empty and would remove every cell: name the values to remove")
        values = {key: values_of(table, key, fields[key], here, ()) for key in table if key != "policies"}
        named = texts_of(table, "policies", here) if "policies" in table else ()
        known = [given for given, _ in policies] + [name for _, (name, _) in policies if name]
        strange = next((one for one in named if one not in known), None)
        if strange is not None:
            raise ValueError(f"{here}: policies {strange!r} is not in the grid: give one of {', '.join(known)}")
        rules.append(Rule(values, named, here))
    return tuple(rules)
