"""A gate of the time model: the errors of predictions, compared with a limit."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from common import RESULTS

from epsim.reproduce.held_out import MEDIAN, P95

CALIBRATED = RESULTS / "calibrated_h200"
LAYER, TELLING, ORDERED = 0.07, 0.03, 0.95


@dataclass(frozen=True, slots=True)
class Gate:
    """One result.

    number: which of the four gates. what: the measurements. cases: how many of them. figures: name to value.
    aim: the limit, in words. note: what a reader should know, such as why the gate fails.
    """

    number: int
    what: str
    cases: int
    figures: dict[str, float]
    aim: str
    holds: bool
    note: str = ""


def call_gate(what: str, ratios: Sequence[float]) -> Gate:
    """Gate 1. ratios: predicted / measured times."""
    figures = _errors(ratios)
    holds = figures["median"] <= MEDIAN and figures["p95"] <= P95
    return Gate(1, what, len(ratios), figures, f"median {MEDIAN:.0%}, p95 {P95:.0%}", holds)


def layer_gate(what: str, ratios: Sequence[float], note: str = "") -> Gate:
    """Gate 2. ratios: predicted / measured times."""
    figures = _errors(ratios)
    return Gate(2, what, len(ratios), figures, f"median {LAYER:.0%}", figures["median"] <= LAYER, note)


def ranking_gate(what: str, batches: Sequence[Sequence[tuple[float, float]]], note: str = "") -> Gate:
    """Gate 3. batches: for each batch the (predicted, measured) times of its stacks."""
    pairs, share = ordered(batches)
    return Gate(3, what, pairs, {"ordered": share}, f"{ORDERED:.0%} of pairs", share >= ORDERED, note)


def ordered(batches: Sequence[Sequence[tuple[float, float]]]) -> tuple[int, float]:
    """The number of pairs whose measured times differ by more than 3%, and the share predicted in the right order."""
    right = pairs = 0
    for times in batches:
        for (mine, took), (others, theirs) in itertools.combinations(times, 2):
            if max(took, theirs) > (1 + TELLING) * min(took, theirs):
                pairs += 1
                right += (mine < others) == (took < theirs)
    return pairs, right / max(pairs, 1)


def _errors(ratios: Sequence[float]) -> dict[str, float]:
    errors = np.abs(np.asarray(ratios) - 1)
    return {"median": float(np.median(errors)), "p95": float(np.percentile(errors, 95))}
