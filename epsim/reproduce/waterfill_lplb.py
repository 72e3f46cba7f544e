"""Compares SGLang's published table of Waterfill and LPLB with predictions.

The free parameters are fitted on the published baseline columns only: the requests per batch and the tokens per step
(one value for all rows), and for each workload the time of a step outside its expert layers.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

from epsim.cost.layer_time import LayerTiming
from epsim.placement.base import Cluster, Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack, placement_policy
from epsim.reproduce.workloads import DrawOptions, Topics, Workload, draw, regimes

BASELINE = "random"
PUBLISHED = {"waterfill": "random+waterfill(load=routed+local)", "lplb": "lplb-ipm"}
OURS = {"waterfill": "random+waterfill(candidates=all)", "lplb": "lplb", "both": "lplb+waterfill"}
PLACEMENTS: dict[str, int | None] = {"none": None, "red0": 0, "red16": 16, "red32": 32}
REQUESTS = (16, 32, 64, 128)
TOKENS = (8192, 16384, 32768, 65536)
NODES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. baseline, predicted_baseline: tokens per second. published, predicted, ours: the gain of
    each policy over the baseline, as a share."""

    workload: str
    placement: str
    baseline: float
    predicted_baseline: float
    published: Mapping[str, float]
    predicted: Mapping[str, float]
    ours: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """rows; fit: the fitted parameters, in words; scores: (claim, whether it holds, figures). elsewhere: for other
    numbers of tokens per step, which claims fail, in words."""

    rows: tuple[Row, ...]
    fit: str
    scores: tuple[tuple[str, bool, str], ...]
    elsewhere: tuple[str, ...]


def published_rows(table: str) -> list[dict[str, Any]]:
    """The published rows of a table: `deepseek-v3` or `deepseek-v4-flash`."""
    content = json.loads(resources.files("epsim.reproduce").joinpath("published/waterfill-lplb.json").read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content[table]]


def workloads(topics: Topics, requests: int) -> dict[str, Workload]:
    """The workloads by name. narrow: one topic with 448 requests (as many as GPQA has) that placements are planned on.
    medium: batches of prompts of one topic each; placements are planned on generated text. broad: all topics evenly;
    placements are planned on the same topics."""
    prompts, generated = topics.pick("prefill"), topics.pick("decode")
    return {
        "narrow": Workload((prompts[-1],), requests, pool=448),
        "medium": Workload(tuple(prompts), requests, by_step=True, known=tuple(generated)),
        "broad": Workload((*prompts, *generated), requests),
    }


class _Case:
    """One workload with a fixed number of requests per batch: its tokens, its placements, and stacks' layer times."""

    def __init__(self, topics: Topics, workload: Workload, timing: LayerTiming, options: DrawOptions) -> None:
        self.block, known = draw(topics, workload, options)
        self.topics, self.timing, self.options = topics, timing, options
        self._counts = torch.from_numpy((known * 1e9).astype(np.int64))[None]
        self._placements: dict[str, Placement] = {}
        self._loads: dict[tuple[str, str], Load] = {}

    def placement(self, name: str) -> Placement:
        if name not in self._placements:
            redundant = PLACEMENTS[name]
            policy = placement_policy("contiguous" if redundant is None else "eplb")
            cluster = Cluster(self.options.num_ranks, NODES, redundant or 0)
            self._placements[name] = policy.plan(self._counts, cluster)
        return self._placements[name]

    def layers_us(self, placement: str, split_and_shared: str, tokens: int) -> float:
        """Microseconds of the model's expert layers at `tokens` tokens per step: a layer's mean times their number."""
        key, model = (placement, split_and_shared), self.timing.model
        stack = parse_stack(f"{'contiguous' if PLACEMENTS[placement] is None else 'eplb'}+{split_and_shared}")
        if key not in self._loads:
            setting = Setting(self.options.seed, model.shared_cost, self.options.top_k, self.topics.layers, rows=True)
            self._loads[key] = bind(stack, self.placement(placement), setting).load(self.block)
        scaled = _scaled(self._loads[key], tokens / self.options.tokens)
        return float(self.timing.layer_us(scaled, stack, bool(PLACEMENTS[placement])).mean()) * model.moe_layers


def reproduce(
    topics: Topics,
    timing: LayerTiming,
    table: str = "deepseek-v3",
    options: DrawOptions | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Reproduction:
    """Fits the free parameters on the published baselines, predicts the gains, and scores them."""
    options = options or DrawOptions(top_k=timing.model.top_k)
    published = published_rows(table)
    names = list(dict.fromkeys(row["workload"] for row in published))
    best: tuple[float, int, int, dict[str, float]] | None = None
    kept: dict[str, _Case] = {}
    for requests in REQUESTS:
        progress(f"fitting baselines, {requests} requests per batch")
        made = workloads(topics, requests)
        cases = {name: _Case(topics, made[name], timing, options) for name in names}
        for tokens in TOKENS:
            rest, error = _fit(cases, published, tokens)
            if best is None or error < best[0]:
                best, kept = (error, requests, tokens, rest), cases
    assert best is not None
    error, requests, tokens, rest = best
    progress("predicting gains")
    rows = [_predict(kept[row["workload"]], row, tokens, rest[row["workload"]]) for row in published]
    elsewhere = []
    for other in TOKENS:
        if other != tokens:
            other_rest, other_error = _fit(kept, published, other)
            other_rows = [_predict(kept[row["workload"]], row, other, other_rest[row["workload"]]) for row in published]
            failing = [claim for claim, holds, _ in _scores(other_rows) if not holds]
            elsewhere.append(f"at {other} (baselines off by {other_error:.1%}) {', '.join(failing) or 'nothing'} fails")
    fit = (
        f"{requests} requests and {tokens} tokens per step; outside expert layers "
        + ", ".join(f"{name} {value / 1e3:.0f} ms" for name, value in rest.items())
        + f"; baselines off by {error:.1%} (root mean square)"
    )
    scores = list(_scores(rows))
    if table == "deepseek-v3":
        progress("regimes of drift")
        scores.append(_regimes(topics, timing, options, requests, tokens, rest["medium"]))
    return Reproduction(tuple(rows), fit, tuple(scores), tuple(elsewhere))


def _fit(
    cases: Mapping[str, _Case], published: Sequence[Mapping[str, Any]], tokens: int
) -> tuple[dict[str, float], float]:
    """For each workload, the microseconds outside expert layers that fit its baselines best. Also the root mean square
    of the logarithmic errors of all rows."""
    rest, squares = {}, []
    for name, case in cases.items():
        rows = [row for row in published if row["workload"] == name]
        layers = np.array([case.layers_us(row["placement"], BASELINE, tokens) for row in rows])
        wanted = np.array([tokens * 1e6 / row["baseline"] for row in rows])
        value = max(float((wanted - layers).mean()), 0.0)
        for _ in range(20):  # least squares of logarithms, by Newton
            value = max(value - float(np.log((layers + value) / wanted).mean()) * float((layers + value).mean()), 0.0)
        rest[name] = value
        squares += list(np.log((layers + value) / wanted) ** 2)
    return rest, float(np.sqrt(np.mean(squares)))


def _predict(case: _Case, row: Mapping[str, Any], tokens: int, rest: float) -> Row:
    placement = row["placement"]
    base = case.layers_us(placement, BASELINE, tokens) + rest
    measured = {kind: row[kind] / row["baseline"] - 1 for kind in PUBLISHED if row[kind]}

    def gains(stacks: Mapping[str, str], kinds: Sequence[str]) -> dict[str, float]:
        return {kind: base / (case.layers_us(placement, stacks[kind], tokens) + rest) - 1 for kind in kinds}

    both = ["both"] if "lplb" in measured else []
    predicted, ours = gains(PUBLISHED, list(measured)), gains(OURS, [*measured, *both])
    return Row(row["workload"], placement, row["baseline"], tokens * 1e6 / base, measured, predicted, ours)


def _scores(rows: Sequence[Row]) -> list[tuple[str, bool, str]]:
    water = [row.predicted["waterfill"] for row in rows]
    positive = sum(gain > 0 for gain in water)
    scores = [
        (f"Waterfill gains in all {len(rows)} rows", positive == len(rows), f"in {positive}, least {min(water):+.2%}")
    ]
    lplb = {(row.workload, row.placement): row.predicted["lplb"] for row in rows if "lplb" in row.predicted}
    if lplb:
        for name, sign in (("red0", -1), ("red16", 1), ("red32", 1)):
            gains = [gain for (_, placement), gain in lplb.items() if placement == name]
            words = f"LPLB {'gains' if sign > 0 else 'loses'} at {name}"
            scores.append((words, all(gain * sign > 0 for gain in gains), ", ".join(f"{g:+.2%}" for g in gains)))
        drifting, other = lplb["medium", "red32"], max(lplb["narrow", "red32"], lplb["broad", "red32"])
        larger = drifting > max(other, lplb["medium", "red16"])
        scores.append(("LPLB gains most at red32 of the drifting workload", larger, f"{drifting:+.2%}, {other:+.2%}"))
    both = [(row.predicted[kind], gain) for row in rows for kind, gain in row.published.items()]
    correlation = rank_correlation(*zip(*both, strict=True))
    scores.append(
        ("gains in the published order (rank correlation above 0.5)", correlation > 0.5, f"{correlation:.2f}")
    )
    return scores


def _regimes(
    topics: Topics, timing: LayerTiming, options: DrawOptions, requests: int, tokens: int, rest: float
) -> tuple[str, bool, str]:
    gains = []
    for words, workload in regimes(topics.pick("prefill"), requests):
        case = _Case(topics, workload, timing, options)
        base = case.layers_us("red32", BASELINE, tokens) + rest
        gains.append((words, base / (case.layers_us("red32", PUBLISHED["lplb"], tokens) + rest) - 1))
    values = [gain for _, gain in gains]
    top = values.index(max(values))
    holds = 0 < top < len(values) - 1
    return ("LPLB's gain rises and falls with drift", holds, "; ".join(f"{w} {g:+.2%}" for w, g in gains))


def _scaled(load: Load, factor: float) -> Load:
    """The same batch with `factor` times the tokens and the same active experts."""
    names = ("routed", "routed_real", "shared", "shared_tokens", "tokens", "rank_rows", "node_rows")
    parts: dict[str, Any] = {name: getattr(load, name) * factor for name in names}
    return dataclasses.replace(load, **parts)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; ties are broken by index."""
    a, b = (
        np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64) for values in (first, second)
    )
    return float(np.corrcoef(a, b)[0, 1])
