"""Loads the tables that `epsim calibrate` measured on a machine.

A folder holds `hardware.toml`, whose `tables` lists JSON files in the folder. Each is an object with a `kind`:
`experts` (`ExpertTable`), `exchange` (`ExchangeTable`), `router` (`RouterTable`) or `policies` (`PolicyTable`);
docs/time.md describes their fields.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from epsim.cards import build, known_cards
from epsim.cost.curve import check_axis, check_times, curve
from epsim.cost.experts_time import ExpertTable
from epsim.cost.router_time import RouterTable
from epsim.files import check_source
from epsim.machines.hardware import Hardware, load_hardware
from epsim.models.spec import ModelSpec

HARDWARE = "hardware.toml"
FEWEST = 3


@dataclass(frozen=True)
class ExchangeTable:
    """Measured dispatch and combine on `ranks` ranks of `nodes` nodes.

    device, command: where and how it was measured. implementation: `deep_ep` or `torch`. dtype: type of dispatched
    rows. model, hidden, num_experts, top_k: the model whose rows were sent; "" and 0 if the table does not say. graph:
    whether it was timed in a CUDA graph, without waiting for the host.
    dispatch_bytes, combine_bytes [n], ascending: bytes of the busiest rank, including rows that stay on their rank.
    dispatch_us, combine_us [n]: microseconds of the slowest rank.
    """

    device: str
    command: str
    implementation: str
    dtype: str
    ranks: int
    nodes: int
    dispatch_bytes: tuple[float, ...]
    dispatch_us: tuple[float, ...]
    combine_bytes: tuple[float, ...]
    combine_us: tuple[float, ...]
    kind: Literal["exchange"] = "exchange"
    versions: str = ""
    date: str = ""
    model: str = ""
    hidden: int = 0
    top_k: int = 0
    graph: bool = False
    num_experts: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 0:
            raise ValueError(f"num_experts {self.num_experts} must be 0 or more")
        if self.ranks < 2 or self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(f"{self.ranks} ranks on {self.nodes} nodes: an exchange needs nodes of equally many ranks")
        for way in ("dispatch", "combine"):
            sizes, times = getattr(self, f"{way}_bytes"), getattr(self, f"{way}_us")
            check_axis(f"{way}_bytes", sizes)
            check_times(f"{way}_us", times)
            if len(sizes) != len(times):
                raise ValueError(f"{way}_us must be {len(sizes)} numbers, one for each of {way}_bytes")

    @property
    def of(self) -> str:
        """A description of what was measured."""
        rows = f"{self.model}'s rows of {self.hidden} {self.dtype}, top-{self.top_k}" if self.hidden else self.dtype
        where = f"{self.ranks} ranks on {self.nodes} nodes"
        return f"{where}, {rows}, by {self.implementation}, to {self.dispatch_bytes[-1] / 1e6:.3g} MB"

    def us(self, rows: Tensor, model: ModelSpec, expert_us: float = 0.0) -> Tensor:
        """Microseconds of dispatch and combine, [2, ...], for rows [...] of the busiest rank (`curve`). expert_us:
        dispatch time per expert of a rank (`Calibration.expert_us`), for models with another number of experts."""
        dispatch = curve(self.dispatch_bytes, self.dispatch_us, rows * model.dispatch_row_bytes)
        if self.num_experts:
            more = expert_us * (model.num_experts - self.num_experts) / self.ranks
            dispatch = torch.maximum(dispatch + more, dispatch / 2)
        return torch.stack((dispatch, curve(self.combine_bytes, self.combine_us, rows * model.combine_row_bytes)))


@dataclass(frozen=True)
class PolicyCost:
    """The time that a policy adds to a layer: us [n] at `tokens` [n] per rank, on `ranks` ranks with `redundant`
    redundant experts, without collectives. policy: a router, or a split with its shared policy, in the stack grammar.
    """

    policy: str
    ranks: int
    redundant: int
    tokens: tuple[float, ...]
    us: tuple[float, ...]

    def __post_init__(self) -> None:
        check_axis(f"{self.policy}: tokens", self.tokens)
        check_times(f"{self.policy}: us", self.us)
        if len(self.tokens) != len(self.us) or self.ranks < 1:
            raise ValueError(f"{self.policy}: us must be {len(self.tokens)} numbers, one for each of tokens")


@dataclass(frozen=True)
class CollectiveCost:
    """Microseconds of one collective on a layer's counts, over `ranks` ranks on `nodes` nodes."""

    name: Literal["all_reduce", "all_gather"]
    ranks: int
    nodes: int
    us: float

    def __post_init__(self) -> None:
        check_times(self.name, (self.us,))
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(f"{self.name}: {self.ranks} ranks on {self.nodes} nodes: give nodes of equally many ranks")


@dataclass(frozen=True)
class PolicyTable:
    """Measured costs of policies and of their collectives. num_experts, top_k: of the measured model, 0 if the table
    does not say."""

    device: str
    command: str
    costs: tuple[PolicyCost, ...] = ()
    collectives: tuple[CollectiveCost, ...] = ()
    kind: Literal["policies"] = "policies"
    versions: str = ""
    date: str = ""
    num_experts: int = 0
    top_k: int = 0

    @property
    def of(self) -> str:
        """A description of the measured model's experts."""
        return f"{self.num_experts} experts, top-{self.top_k}" if self.num_experts else "unknown experts"

    def us(self, policy: str, ranks: int, tokens: Tensor) -> Tensor | None:
        """Microseconds [...] of a policy for tokens [...] per rank; None if the policy was not measured. Uses the
        measurements on the nearest number of ranks. Several at the same number of tokens are averaged."""
        known = [cost for cost in self.costs if cost.policy == policy]
        if not known:
            return None
        near = min(known, key=lambda cost: abs(math.log(cost.ranks / ranks))).ranks
        points: dict[float, list[float]] = {}
        for cost in known:
            for number, us in zip(cost.tokens, cost.us, strict=True) if cost.ranks == near else ():
                points.setdefault(number, []).append(us)
        numbers = sorted(points)
        return curve(numbers, [fmean(points[number]) for number in numbers], tokens)

    def collective_us(self, name: str, ranks: int, nodes: int) -> float | None:
        """Microseconds of a collective, from the measurement on `nodes` nodes with the nearest number of ranks; None if
        there is no measurement on `nodes` nodes."""
        known = [cost for cost in self.collectives if cost.name == name and cost.nodes == nodes]
        near = min(known, key=lambda cost: abs(math.log(cost.ranks / ranks)), default=None)
        return None if near is None else near.us


Table: TypeAlias = ExpertTable | ExchangeTable | PolicyTable | RouterTable


@dataclass(frozen=True, slots=True)
class Calibration:
    """Hardware, and the tables measured on it."""

    hardware: Hardware
    experts: tuple[ExpertTable, ...] = ()
    exchange: tuple[ExchangeTable, ...] = ()
    policies: PolicyTable | None = None
    routers: tuple[RouterTable, ...] = ()

    def decode_for(self, model: ModelSpec) -> ExpertTable | None:
        """The table of the small-batch kernel for experts of the model's shape and type, or None."""
        shape = (model.hidden, model.intermediate, model.compute, "decode")
        fits = (t for t in self.experts if (t.hidden, t.intermediate, t.dtype, t.implementation) == shape)
        return next(fits, None)

    def router_for(self, model: ModelSpec, given: bool) -> RouterTable | None:
        """The table of the model's router, or None. given: whether the experts come from a trace (`RouterTable`)."""
        return next((table for table in self.routers if table.fits(model, given)), None)

    def table_for(self, model: ModelSpec) -> ExpertTable | None:
        """The table of grouped products for experts of the model's shape and type; None if no table has the shape.
        Raises ValueError if all tables of that shape are in another type than the model computes in."""
        shape = (model.hidden, model.intermediate)
        fits = [t for t in self.experts if (t.hidden, t.intermediate) == shape and t.implementation != "decode"]
        if not fits:
            return None
        same = [table for table in fits if table.dtype == model.compute]
        if not same:
            raise ValueError(
                f"the expert tables of {self.hardware.name} for {model.hidden} x {model.intermediate} are in "
                f"{fits[0].dtype}, but {model.name} computes in {model.compute}: give --model a .toml file with "
                f"compute = {fits[0].dtype!r}, or the name of a shipped one (deepseek-v3-bf16)"
            )
        return same[0]

    def exchange_for(self, model: ModelSpec, ranks: int, nodes: int) -> ExchangeTable | None:
        """The table for `ranks` ranks on `nodes` nodes, with rows of the model's width and type, or None. Of several
        tables it prefers deep_ep, then the nearest top-k, then the nearest number of experts, then the first. Tables
        without a row width are used only if no other matches."""
        candidates = [t for t in self.exchange if (t.ranks, t.nodes, t.dtype) == (ranks, nodes, model.dispatch)]
        fits = [t for t in candidates if t.hidden == model.hidden] or [t for t in candidates if not t.hidden]

        def distance(table: ExchangeTable) -> tuple[bool, int, int]:
            experts_apart = abs(table.num_experts - model.num_experts)
            return table.implementation != "deep_ep", abs(table.top_k - model.top_k), experts_apart

        return min(fits, key=distance, default=None)

    def expert_us(self, table: ExchangeTable) -> float:
        """Microseconds that a deep_ep dispatch takes for each expert of a rank. Before any row moves, one thread sends
        the counts of all experts to every rank (DeepEP, csrc/kernels/intranode.cu, `notify_dispatch`).

        It is a least-squares slope over the tables with the same ranks and nodes. A table's time is the mean of its
        FEWEST smallest sizes, where rows matter little. Two runs may differ by more than experts cost. So if a run
        measured several numbers of experts, only such runs are used, each relative to its own mean. 0 if fewer than two
        numbers of experts were measured.
        """
        if table.implementation != "deep_ep":
            return 0.0
        group = ("deep_ep", table.ranks, table.nodes)
        same = [t for t in self.exchange if t.num_experts and (t.implementation, t.ranks, t.nodes) == group]
        if len({t.num_experts for t in same}) < 2:
            return 0.0
        runs: dict[tuple[object, ...], list[ExchangeTable]] = {}
        for t in same:
            runs.setdefault((t.device, t.command, t.date, t.hidden, t.dtype), []).append(t)
        comparable = [run for run in runs.values() if len({t.num_experts for t in run}) > 1]
        experts: list[float] = []
        dispatch_us: list[float] = []
        for run in comparable or [same]:
            numbers = [t.num_experts / t.ranks for t in run]
            times = [fmean(t.dispatch_us[:FEWEST]) for t in run]
            experts += [number - fmean(numbers) for number in numbers]
            dispatch_us += [time - fmean(times) for time in times]
        return max(linear_regression(experts, dispatch_us).slope, 0.0)


def load_calibration(name: str) -> Calibration:
    """Loads shipped hardware by name, a TOML file, or a folder that `epsim calibrate` wrote. Raises ValueError or
    FileNotFoundError with one line."""
    path = Path(name)
    if name and name.lower() not in known_cards("machines") and path.is_dir():
        path = path / HARDWARE
        if not path.is_file():
            raise ValueError(f"--hardware {name}: a folder without {HARDWARE}: give one that `epsim calibrate` wrote")
        name = str(path)
    hardware = load_hardware(name)
    tables = [read_table(path.parent / file) for file in hardware.tables]
    policies = [table for table in tables if isinstance(table, PolicyTable)]
    return Calibration(
        hardware,
        tuple(table for table in tables if isinstance(table, ExpertTable)),
        tuple(table for table in tables if isinstance(table, ExchangeTable)),
        reduce(_merged, policies) if policies else None,
        tuple(table for table in tables if isinstance(table, RouterTable)),
    )


def _merged(first: PolicyTable, second: PolicyTable) -> PolicyTable:
    """Both tables in one. It describes the experts of the first table with costs: a table of collectives has none."""
    costs, collectives = first.costs + second.costs, first.collectives + second.collectives
    return dataclasses.replace(first if first.costs else second, costs=costs, collectives=collectives)


def read_table(path: Path) -> Table:
    """Reads a JSON table. Without a `kind` it is an `ExpertTable`. Raises ValueError or FileNotFoundError in one
    line."""
    check_source(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object with {', '.join(ExpertTable.__dataclass_fields__)}")
    kinds: dict[str, type[Table]] = {
        "experts": ExpertTable, "exchange": ExchangeTable, "policies": PolicyTable, "router": RouterTable
    }  # fmt: skip
    kind = content.get("kind", "experts")
    if str(kind) not in kinds:
        raise ValueError(f"{path}: kind {kind!r} is not one of {', '.join(kinds)}")
    return build(kinds[kind], content, str(path))
