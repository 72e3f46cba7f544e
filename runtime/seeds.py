"""Seeds of what is drawn for a purpose."""

from __future__ import annotations

import hashlib

import torch


def generator(device: torch.device, *purpose: int | str) -> torch.Generator:
    """Seeded by what it is for, such as ("expert", seed, layer, expert)."""
    # 32 bits: PyTorch's generator on CPUs takes no more of a seed.
    seed = int.from_bytes(hashlib.sha256(repr(purpose).encode()).digest()[:4], "little")
    return torch.Generator(device).manual_seed(seed)
