"""Models with random weights for tests of channel readers."""

from __future__ import annotations

from typing import Any

import torch

from epsim.traces.model.config import ModelShape, build_model


def random_model(seed: int, std: float, hidden: int, max_positions: int) -> Any:
    """2 layers of 8 experts of 40 channels, top-3, 64 tokens; all weights normal."""
    shape = ModelShape(
        vocabulary=64,
        num_layers=2,
        hidden=hidden,
        num_heads=2,
        num_experts=8,
        top_k=3,
        intermediate=40,
        max_positions=max_positions,
    )
    torch.manual_seed(seed)
    made = build_model(shape).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return made
