"""Turns a grid into cells: valid combinations, whose keys are hashes of their content. Invalid ones get a reason."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from epsim.cost.layer_time import LayerTiming, load_timing
from epsim.placement.base import Cluster
from epsim.replaying import ReplayOptions
from epsim.sweep.grid import FILL, Grid, NamedStack, Values, command_of
from epsim.sweep.sources import TRACES, Making, Opening, Source, content_key, find_source, imported
from epsim.traces.options import DEFAULT_RANKS, ImportOptions, SynthesisOptions
from epsim.traces.trace import TraceMeta
from epsim.version import VERSION

FORMAT = 1
READING = ("top_k", "experts", "model", "phase", "shared_cost", "batch", "step_tokens", "score_rule")


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay. key: hash of everything that determines its results. axes: its values in the grid. trace, history:
    the traces to open."""

    key: str
    axes: Values
    trace: Opening
    history: Opening | None
    options: ReplayOptions
    trace_name: str
    history_name: str

    @property
    def openings(self) -> list[Opening]:
        """The traces that the replay needs."""
        return [self.trace] if self.history is None else [self.trace, self.history]


@dataclass(slots=True)
class Plan:
    """What a sweep has to do. cells: by key, in the grid's order. makings: traces to make first, by their file.
    skipped: combinations that are not valid, with the reason. excluded: number of combinations that [[except]] removes.
    """

    cells: dict[str, Cell] = field(default_factory=dict)
    makings: dict[Path, Making] = field(default_factory=dict)
    skipped: list[tuple[Values, str]] = field(default_factory=list)
    excluded: int = 0


def plan_cells(grid: Grid, out: Path) -> Plan:
    """Plans the cells of a grid. out: the sweep's folder, into which recordings of other systems are imported.

    Raises FileNotFoundError or ValueError with one line if a file cannot be read, an [[except]] matches nothing, or the
    grid has no valid cell.
    """
    plan = Plan()
    traces = _Traces(grid, out, plan.makings)
    used: set[str] = set()
    for point in grid.points():
        point["nodes"] = point.get("nodes") or -(-point["ranks"] // point["ranks_per_node"])
        rules = [rule for rule in grid.rules if rule.matches(point)]
        if "redundant" not in point or point["redundant"] == FILL:
            resolved = _resolved(point, traces.meta(point).num_experts)
            rules += [rule for rule in grid.rules if rule not in rules and rule.matches(resolved)]
        else:
            resolved = point
        used.update(rule.where for rule in rules)
        gone = {policy for rule in rules for policy in rule.policies}
        policies = [(given, named) for given, named in grid.policies if not {given, named[0]} & gone]
        if any(not rule.policies for rule in rules) or not policies:
            plan.excluded += 1
            continue
        reason = _misfit(point, resolved, traces.meta(point).num_experts)
        if not reason:
            cell = _cell(grid, resolved, policies, traces)
            other = plan.cells.setdefault(cell.key, cell)
            if other is cell:
                continue
            written = "redundant" if "redundant" in point else "slots_per_rank"
            reason = f"the same cell as another: {written} equals {resolved['redundant']}"
        plan.skipped.append((resolved, reason))
    idle = next((rule for rule in grid.rules if rule.where not in used), None)
    if idle is not None:
        raise ValueError(f"{idle.where}: matches no cell of the grid: correct or remove it")
    if not plan.cells:
        why = f": {plan.skipped[0][1]}" if plan.skipped else ": [[except]] removes all cells"
        raise ValueError(f"{grid.path}: the grid has no cell that can be replayed{why}")
    return plan


def _resolved(point: Values, num_experts: int) -> Values:
    """The point with `redundant` as a number of experts."""
    ranks = point["ranks"]
    redundant = -num_experts % ranks
    if "slots_per_rank" in point:
        redundant = point["slots_per_rank"] * ranks - num_experts
    return {**point, "redundant": redundant}


def _misfit(point: Values, resolved: Values, num_experts: int) -> str:
    """The reason why no cluster can have these values; empty if one can."""
    ranks, per_node = point["ranks"], point.get("ranks_per_node")
    if per_node is not None and ranks > per_node and ranks % per_node:
        return f"{ranks} ranks do not fill nodes of {per_node}"
    if resolved["redundant"] < 0:
        slots = ranks * point["slots_per_rank"]
        least = -(-num_experts // ranks)
        return f"{slots} slots on {ranks} ranks for {num_experts} experts: give slots_per_rank {least} or more"
    try:
        _cluster(resolved).num_physical(num_experts)
    except ValueError as error:
        return str(error).replace("--", "")
    return ""


def _cluster(point: Values) -> Cluster:
    return Cluster(point["ranks"], point["nodes"], point["redundant"], point["groups"])


class _Traces:
    """Opens the grid's traces. Each file is read once, and each recording is imported once."""

    def __init__(self, grid: Grid, out: Path, makings: dict[Path, Making]) -> None:
        self._grid, self._out, self._makings = grid, out, makings
        self._sources: dict[str, Source] = {}
        self._imported: dict[tuple[str, ImportOptions], Opening] = {}
        self._metas: dict[Opening, TraceMeta] = {}
        self._timings: dict[tuple[Any, ...], tuple[LayerTiming, str]] = {}

    def source(self, point: Values, name: str) -> Source:
        if name not in self._sources:
            with _naming(self._grid, point):
                self._sources[name] = find_source(name, self._grid.file(name))
        return self._sources[name]

    def sources(self, point: Values) -> list[Source]:
        return [self.source(point, name) for name in point.get("draw") or [point["path"]]]

    def meta(self, point: Values) -> TraceMeta:
        """The meta of the point's first source. The phase is `mixed` if sources differ in phase."""
        reading = _reading(point, drawing="draw" in point)
        metas = []
        for source in self.sources(point):
            opening = self._open(point, source, reading)
            if opening not in self._metas:
                with _naming(self._grid, point):
                    self._metas[opening] = opening.open().meta
            metas.append(self._metas[opening])
        same = all(meta.phase == metas[0].phase for meta in metas)
        return metas[0] if same else replace(metas[0], phase="mixed")

    def timing(self, point: Values) -> tuple[LayerTiming | None, str | None]:
        """The time model of a point and a hash of all that it consists of; None and None without `hardware`."""
        if "hardware" not in point:
            return None, None
        meta, grid = self.meta(point), self._grid
        model, phase = point.get("model") or meta.model, point.get("only") or meta.phase
        hardware, table = point["hardware"], point.get("expert_table")
        with _naming(grid, point):
            if model == "unknown":
                raise ValueError(
                    "hardware needs the model, and the trace does not name it: add model to this [[trace]]"
                )
            key = (hardware, model, point["nodes"], phase, point["overlap"], table)
            if key not in self._timings:
                is_file = hardware.endswith(".toml") or "/" in hardware
                timing = load_timing(
                    str(grid.file(hardware)) if is_file else hardware,
                    str(grid.file(model)) if model.endswith(".toml") else model,
                    point["nodes"],
                    phase,
                    point["overlap"],
                    None if table is None else grid.file(table),
                )
                self._timings[key] = timing, content_key(asdict(timing))
            return self._timings[key]

    def trace(self, point: Values) -> Opening:
        if "draw" not in point:
            return self._selected(point, self.source(point, point["path"]))
        reading = _reading(point, drawing=True)
        sources = tuple(self._open(point, source, reading) for source in self.sources(point))
        drawing = drawing_of(point)
        digests = [source.digest for source in self.sources(point)]
        target = self._target({"digests": digests, "reading": asdict(reading), "drawing": asdict(drawing)})
        self._makings.setdefault(target, Making(target, sources, drawing))
        return Opening(target, _reading(point))

    def history(self, point: Values) -> Opening | None:
        return None if "history" not in point else self._selected(point, self.source(point, point["history"]))

    def _selected(self, point: Values, source: Source) -> Opening:
        reading = _reading(point)
        opening = self._open(point, source, reading)
        only, least = point.get("only"), point.get("min_tokens", 1)
        if only is None and least == 1:
            return opening
        described = asdict(reading) | ({"ranks": None} if source.ours else {})
        target = self._target({"digest": source.digest, "reading": described, "only": only, "least": least})
        self._makings.setdefault(target, Making(target, (opening,), None, only, least))
        return Opening(target)

    def _open(self, point: Values, source: Source, reading: ImportOptions) -> Opening:
        known = (source.name, reading)
        if known not in self._imported:
            with _naming(self._grid, point):
                self._imported[known] = imported(source, reading, self._out)
        return self._imported[known]

    def _target(self, content: Values) -> Path:
        return self._out / TRACES / f"{content_key({**content, 'version': VERSION})}.parquet"


@contextmanager
def _naming(grid: Grid, point: Values) -> Iterator[None]:
    """Adds the name of the [[trace]] to errors about its files."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{grid.path}: [[trace]] {point['trace']}: {error}") from None


def _reading(point: Values, drawing: bool = False) -> ImportOptions:
    """The import options of a file, as in `epsim replay`; with drawing, as in `epsim traces synthesize`."""
    keys = [key for key in READING if key in point and not ("draw" in point and key == "step_tokens")]
    if "draw" in point and not drawing:
        keys = [key for key in keys if key != "batch"]
    given = {("num_experts" if key == "experts" else key): point[key] for key in keys}
    return ImportOptions(**given, ranks=DEFAULT_RANKS if drawing else point["ranks"])


def drawing_of(point: Values) -> SynthesisOptions:
    seed = int(point["draw_seed"] if "draw_seed" in point else point["seed"])
    return SynthesisOptions(
        num_steps=point["steps"], tokens_per_step=point["step_tokens"], drift=point["drift"], seed=seed
    )


def _cell(grid: Grid, point: Values, policies: Sequence[tuple[str, NamedStack]], traces: _Traces) -> Cell:
    trace, history = traces.trace(point), traces.history(point)
    named = tuple(stack for _, stack in policies)
    timing, timing_key = traces.timing(point)
    trace_name = f"{point['trace']}.parquet" if "draw" in point else Path(point["path"]).name
    history_name = "" if history is None else Path(point["history"]).name
    content = {
        "format": FORMAT,
        "version": VERSION,
        "trace": trace_name,
        "digests": [source.digest for source in traces.sources(point)],
        "reading": asdict(_reading(point)),
        "drawn": [asdict(drawing_of(point)), asdict(_reading(point, drawing=True))] if "draw" in point else None,
        "selected": [point.get("only"), point.get("min_tokens", 1)],
        "history": None if history is None else [history_name, traces.source(point, point["history"]).digest],
        "cluster": asdict(_cluster(point)),
        "policies": [[name, str(stack)] for name, stack in named],
        "setting": [point["seed"], point["plan_share"]],
        "timing": timing_key,
    }
    options = ReplayOptions(
        _cluster(point),
        named,
        point.get("shared_cost"),
        command_of(point, [given for given, _ in policies], trace_name),
        seed=point["seed"],
        plan_share=point["plan_share"],
        timing=timing,
    )
    drawn_from = {"draw": list(point["draw"])} if "draw" in point else {}
    axes = {key: value for key, value in point.items() if key != "draw"} | drawn_from
    return Cell(content_key(content), axes, trace, history, options, trace_name, history_name)
