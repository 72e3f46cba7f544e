"""Random generators that are seeded by their purpose."""

import hashlib

import torch


def generator(device: torch.device, *purpose: int | str) -> torch.Generator:
    """A generator whose seed is a hash of its purpose, such as ("expert", seed, layer, expert)."""
    # 32 bits, because PyTorch's CPU generator uses no more of a seed.
    seed = int.from_bytes(hashlib.sha256(repr(purpose).encode()).digest()[:4], "little")
    return torch.Generator(device).manual_seed(seed)
