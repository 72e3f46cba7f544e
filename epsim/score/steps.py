"""The entry `scored` of results.json: a key of the scored steps, their sizes, and their hottest experts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from epsim.placement.base import Placement
from epsim.score.detail import step_weights
from epsim.traces.trace import Ints

NUM_HOT = 12


def step_keys(counts: Ints) -> Ints:
    """counts [S, L, E] -> [S] int64: a hash of each step's counts, 0 for a step without tokens. It is a linear form
    modulo 2^64 with random coefficients, so the key of a sum of steps is the sum of their keys."""
    flat = counts.reshape(len(counts), -1)
    return flat @ _coefficients(flat.shape[1])


@lru_cache(maxsize=4)
def _coefficients(number: int) -> Ints:
    return np.random.default_rng(0).integers(-(2**63), 2**63, number, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SeenSteps:
    """Facts about S recorded steps. keys [S]: `step_keys`. busy_layers [S]: the number of layers with tokens. total
    [L, E]: the sum of the counts over the steps."""

    keys: Ints
    busy_layers: Ints
    total: Ints

    @staticmethod
    def joined(parts: Sequence[SeenSteps]) -> SeenSteps:
        """Concatenates successive parts."""
        if len(parts) == 1:
            return parts[0]
        return SeenSteps(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.busy_layers for part in parts]),
            np.sum([part.total for part in parts], axis=0),
        )


def seen_steps(counts: Ints, assignments: Ints) -> SeenSteps:
    """counts [S, L, E] as recorded, and their sums over experts, assignments [S, L]."""
    return SeenSteps(step_keys(counts), (assignments > 0).sum(1), counts.sum(0))


class ScoredSteps:
    """Gathers facts about the scored steps, block by block, in order."""

    def __init__(self) -> None:
        self._keys: list[Ints] = []
        self._busy_layers: list[Ints] = []
        self._total: Ints | None = None

    def add(self, seen: SeenSteps) -> None:
        self._keys.append(seen.keys)
        self._busy_layers.append(seen.busy_layers)
        self._total = seen.total if self._total is None else self._total + seen.total

    @property
    def keys(self) -> Ints:
        """[S]: `step_keys` of the scored steps."""
        return np.concatenate(self._keys)

    def entry(self, stretches: int) -> dict[str, Any]:
        """The entry `scored` of results.json. stretches: the number of stretches in the stacks' detail.

        key: two results with the same key have the same scored steps. steps, busy_steps, busy_layers: for each stretch
        the number of steps, of steps with tokens, and of layers with tokens.
        """
        assert self._total is not None
        layers = np.concatenate(self._busy_layers)
        mean = np.maximum(self._total.mean(1, keepdims=True), 1e-9)
        over_mean = self._total / mean
        order = np.argsort(-over_mean, axis=None, kind="stable")[:NUM_HOT]
        hottest = zip(*(indices.tolist() for indices in np.unravel_index(order, over_mean.shape)), strict=True)
        return {
            "key": hashlib.sha256(self.keys.astype("<i8").tobytes()).hexdigest()[:32],
            "steps": step_weights(np.ones(len(layers)), stretches),
            "busy_steps": step_weights((layers > 0).astype(np.float64), stretches),
            "busy_layers": step_weights(layers.astype(np.float64), stretches),
            "hot_experts": [
                {"layer": layer, "expert": expert, "load_over_mean": round(float(over_mean[layer, expert]), 4)}
                for layer, expert in hottest
                if over_mean[layer, expert] > 0
            ],
        }


def add_copies(entries: Sequence[dict[str, Any]], placements: Sequence[Placement], scored: dict[str, Any]) -> None:
    """Adds `hot_copies` to each stack's entry: the ranks that hold a copy, for each of the hot experts."""
    for entry, placement in zip(entries, placements, strict=True):
        slots = placement.physical_to_logical
        entry["hot_copies"] = [
            ((slots[hot["layer"]] == hot["expert"]).nonzero()[:, 0] // placement.slots_per_rank).tolist()
            for hot in scored["hot_experts"]
        ]
