"""Grouped expert computation on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from epsim.runtime.exchange.base import Received

if TYPE_CHECKING:
    from epsim.runtime.experts import Experts


def compute(experts: Experts, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


def to_float8(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError
