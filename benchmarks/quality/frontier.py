"""Cross-entropy against active experts for many router policies on one model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from epsim.policies.stack import parse_stack
from epsim.quality.hook import keep, reroute_of, rerouted
from epsim.quality.meter import Meter
from quality.figures import Floats, compare, standard_error

RANKS = (1, 4, 8)
"""Numbers of ranks for which each point has the active experts of the busiest rank."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A policy to measure. family: its group in tables; router: as in a stack; ranks: how many hold the experts."""

    family: str
    router: str
    ranks: int = 1

    @property
    def label(self) -> str:
        return self.router if self.ranks == 1 else f"{self.router} on {self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class Point:
    """A trial at a batch size. active: {ranks: most active experts of a rank}, mean over steps and layers; kept_mass:
    see `Meter`. delta: mean cross-entropy minus the plain model's, in nats per token; kl: from its prediction.
    by_sequence [sequences]: delta of each."""

    trial: Trial
    batch_size: int
    active: dict[int, float]
    kept_mass: float
    delta: float
    kl: float
    by_sequence: Floats = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.trial.family,
            "router": self.trial.router,
            "told_ranks": self.trial.ranks,
            "batch_size": self.batch_size,
            "active_experts": {str(ranks): value for ranks, value in self.active.items()},
            "kept_mass": self.kept_mass,
            "delta": self.delta,
            "delta_standard_error": standard_error(self.by_sequence),
            "kl": self.kl,
        }


def measure(
    model: Any, text: torch.Tensor, trials: Sequence[tuple[Trial, int]], chunk: int = 64
) -> tuple[list[Point], float]:
    """A point for each (trial, batch size), and the plain model's cross-entropy, on text [sequences, length + 1].

    Teacher-forced: the t-th tokens of batch_size sequences are one batch. `chunk` sequences pass at once. It must be a
    multiple of every batch size, and divide the number of sequences.
    """
    for _, batch_size in trials:
        if chunk % batch_size or len(text) % chunk:
            raise ValueError(f"batches of {batch_size}, passes of {chunk} and {len(text)} sequences do not divide")
    meters = [Meter(reroute_of(parse_stack(trial.router).router, trial.ranks), RANKS) for trial, _ in trials]
    forms = [
        partial(rerouted, model, meter, whole_sequences=True, batch_size=batch_size)
        for meter, (_, batch_size) in zip(meters, trials, strict=True)
    ]
    found, plain = compare(model, text, forms, chunk)
    points = []
    for (trial, batch_size), meter, one in zip(trials, meters, found, strict=True):
        read, kept = meter.active_experts(), meter.kept_mass()
        points.append(Point(trial, batch_size, read, kept, float(one.loss.mean()), float(one.kl.mean()), one.loss))
    return points, float(plain.loss.mean())


def active_without_policy(
    model: Any, text: torch.Tensor, batch_sizes: Sequence[int], chunk: int = 64
) -> dict[int, float]:
    """Active experts per layer under the model's own choice, by batch size."""
    found = {}
    for batch_size in batch_sizes:
        meter = Meter(keep)
        with torch.no_grad(), rerouted(model, meter, whole_sequences=True, batch_size=batch_size):
            for first in range(0, len(text), chunk):
                model(input_ids=text[first : first + chunk, :-1].to(model.device), use_cache=False)
        found[batch_size] = meter.active_experts()[1]
    return found


def pareto(points: Sequence[Point], ranks: int = 1) -> list[Point]:
    """The Pareto frontier: points for which no other has fewer active experts and no larger loss, by active experts."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.active[ranks], p.delta)):
        if not kept or point.delta < kept[-1].delta:
            kept.append(point)
    return kept


def loss_at(points: Sequence[Point], active: float, ranks: int = 1) -> float | None:
    """The loss at `active` experts on the Pareto frontier of the points, interpolated; None outside its range."""
    frontier = pareto(points, ranks)
    x = [point.active[ranks] for point in frontier]
    if not x or not x[0] <= active <= x[-1]:
        return None
    return float(np.interp(active, x, [point.delta for point in frontier]))


def default_trials(top_k: int, num_experts: int, active: dict[int, float]) -> Iterator[tuple[Trial, int]]:
    """The trials to measure. active: {batch size: experts read without a policy}; lynx keeps shares of them.

    The general form of OEA is swept at a batch of 16.
    """
    for batch_size, experts in active.items():
        yield Trial("topk", "topk"), batch_size
        for k0 in range(1, top_k):
            yield Trial("pruned", f"pruned(k0={k0})"), batch_size
            yield Trial("oea", f"oea(k0={k0})"), batch_size
            for ranks in (4, 8):
                yield Trial(f"oea-ep {ranks}", f"oea-ep(k0={k0})", ranks), batch_size
        for share in (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95):
            yield Trial("lynx", f"lynx(keep={max(round(share * experts), 1)})"), batch_size
        for least in (2, 3, 4, 6):
            if least <= batch_size:
                yield Trial("mask-low-demand", f"mask-low-demand(least={least})"), batch_size
        if batch_size == 16:
            for arguments in sweep_of(top_k, num_experts):
                yield Trial("oea general", f"oea({arguments})"), batch_size


def sweep_of(top_k: int, num_experts: int) -> list[str]:
    """A small sweep of the arguments of OEA's general form."""
    wider = [top_k + more for more in (1, 2) if top_k + more <= num_experts]
    deeper = [top_k * times for times in (1, 2, 4) if top_k * times < num_experts]
    found = []
    for k0 in range(2, top_k - 1):
        found += [f"k0={k0},p={p}" for p in (0.2, 0.35, 0.5, 0.7)]
        found += [f"k0={k0},kmax={kmax}" for kmax in wider]
        found += [f"k0={k0},maxp={maxp}" for maxp in deeper]
        found += [f"k0={k0},p=0.5,maxp={maxp}" for maxp in deeper[1:2]]
    return found
