"""Shapes, shares and types that the tests of tuning have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from epsim.results import ResultsData
from epsim.traces.store import StoredTrace

EXPERTS, LAYERS, TOP_K, GPUS = 16, 2, 2, 4
MODEL = f"""
name = "Small"
source = "made up"
hidden = 7168
intermediate = 2048
num_experts = {EXPERTS}
top_k = {TOP_K}
moe_layers = {LAYERS}
weight_bytes = 1.0
compute = "fp8"
dispatch = "fp8"
rest_parameters = 1e6
rest_us = 10.0
"""
Floats = npt.NDArray[np.float64]
MakeCounts = Callable[..., StoredTrace]
RunTune = Callable[..., ResultsData]


def hot(first: int, number: int = 4, times: float = 6.0) -> Floats:
    """[E] shares: `number` neighbouring experts are `times` as hot as the others: one rank's, in order."""
    weight = np.ones(EXPERTS)
    weight[(first + np.arange(number)) % EXPERTS] = times
    share: Floats = weight / weight.sum()
    return share


def answered(results: ResultsData, kind: str = "any") -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in results["tune"]["answers"] if one["for"] == kind)
    return found
