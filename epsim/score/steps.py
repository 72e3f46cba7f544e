"""What results tell of the scored steps themselves: which they were, and their hottest experts."""

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
    """counts [S, L, E] -> [S] int64: a key by content, 0 for a step without tokens; others are alike by chance alone.

    A linear form modulo 2^64 with random coefficients, so that the key of a sum of steps is the sum of their keys.
    """
    flat = counts.reshape(len(counts), -1)
    return flat @ _coefficients(flat.shape[1])


@lru_cache(maxsize=4)
def _coefficients(number: int) -> Ints:
    return np.random.default_rng(0).integers(-(2**63), 2**63, number, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SeenSteps:
    """What results tell of S steps. keys [S]: `step_keys`. busy_layers [S]: layers with tokens. total [L, E]: the sum
    of the counts."""

    keys: Ints
    busy_layers: Ints
    total: Ints

    @staticmethod
    def joined(parts: Sequence[SeenSteps]) -> SeenSteps:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        return SeenSteps(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.busy_layers for part in parts]),
            np.sum([part.total for part in parts], axis=0),
        )


def seen_steps(counts: Ints, assignments: Ints) -> SeenSteps:
    """counts [S, L, E]: as recorded; assignments [S, L]: their sums over experts."""
    return SeenSteps(step_keys(counts), (assignments > 0).sum(1), counts.sum(0))


class ScoredSteps:
    """Gathers what results tell of the scored steps, block by block, in order."""

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
        """The entry `scored` of results.json. stretches: how many the stacks' detail joins steps to.

        key: of the steps' counts; the same in two results means the same steps. steps, busy_steps, busy_layers: numbers
        of steps, of those with tokens, and of their layers with tokens, by stretch.
        """
        assert self._total is not None
        layers = np.concatenate(self._busy_layers)
        mean = np.maximum(self._total.mean(1, keepdims=True), 1e-9)
        over = self._total / mean
        order = np.argsort(-over, axis=None, kind="stable")[:NUM_HOT]
        places = [(int(layer), int(expert)) for layer, expert in zip(*np.unravel_index(order, over.shape), strict=True)]
        return {
            "key": hashlib.sha256(self.keys.astype("<i8").tobytes()).hexdigest()[:32],
            "steps": step_weights(np.ones(len(layers)), stretches),
            "busy_steps": step_weights((layers > 0).astype(np.float64), stretches),
            "busy_layers": step_weights(layers.astype(np.float64), stretches),
            "hot_experts": [
                {"layer": layer, "expert": expert, "load_over_mean": round(float(over[layer, expert]), 4)}
                for layer, expert in places
                if over[layer, expert] > 0
            ],
        }


def add_copies(entries: Sequence[dict[str, Any]], placements: Sequence[Placement], scored: dict[str, Any]) -> None:
    """Adds to each stack's entry the ranks that hold copies of each of the hot experts."""
    for entry, placement in zip(entries, placements, strict=True):
        slots = placement.physical_to_logical
        entry["hot_copies"] = [
            [
                slot // placement.slots_per_rank
                for slot in (slots[hot["layer"]] == hot["expert"]).nonzero()[:, 0].tolist()
            ]
            for hot in scored["hot_experts"]
        ]
