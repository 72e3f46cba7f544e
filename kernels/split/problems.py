"""Split problems for tests and benchmarks: realistic ones, drawn from recorded counts, and hard ones."""

import itertools

import numpy as np
import numpy.typing as npt
import torch


def chain(num_ranks: int, ring: bool = False) -> torch.Tensor:
    """Slots [1, 2R]: expert e has copies on ranks e and e + 1. The ends of a chain also hold an expert with one
    copy."""
    slots = []
    for rank in range(num_ranks):
        slots += [(rank - 1) % num_ranks if ring or rank else num_ranks, rank]
    return torch.tensor([slots])


def clique(num_ranks: int) -> torch.Tensor:
    """Slots [1, R * (R - 1)]: each pair of ranks shares an expert."""
    on_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert, pair in enumerate(itertools.combinations(range(num_ranks), 2)):
        for rank in pair:
            on_rank[rank].append(expert)
    return torch.tensor(on_rank).flatten()[None]


def drifted_counts(
    planned: npt.NDArray[np.generic],
    later: npt.NDArray[np.generic],
    num_assignments: int,
    num_steps: int,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Batches that differ from the history that the placement was planned on: counts [S, L, E] int64, multinomial.

    planned, later [L, E]: recorded counts. The expert probabilities of a batch are a mixture of both, with up to 60% of
    `later`, times lognormal noise per expert with sigma 0.3.
    """
    part = 0.6 * rng.random((num_steps, len(planned), 1))
    old, new = (counts / counts.sum(1, keepdims=True) for counts in (planned, later))
    share = ((1 - part) * old + part * new) * rng.lognormal(0, 0.3, (num_steps, *planned.shape))
    return torch.from_numpy(rng.multinomial(num_assignments, share / share.sum(2, keepdims=True)))


def steady_counts(
    planned: npt.NDArray[np.generic],
    later: npt.NDArray[np.generic],
    num_assignments: int,
    num_steps: int,
    rng: np.random.Generator,
    change: float = 0.02,
) -> torch.Tensor:
    """As `drifted_counts`, but each batch is similar to the previous one, as on a running server.

    Each layer keeps its mixture. The noise of an expert is a stationary random walk with a standard deviation of 0.3
    and steps of `change` per batch.
    """
    part = 0.6 * rng.random((len(planned), 1))
    old, new = (counts / counts.sum(1, keepdims=True) for counts in (planned, later))
    noise = rng.normal(0, 0.3, planned.shape)
    batches = []
    for _ in range(num_steps):
        noise = np.sqrt(1 - (change / 0.3) ** 2) * noise + rng.normal(0, change, planned.shape)
        share = ((1 - part) * old + part * new) * np.exp(noise)
        batches.append(rng.multinomial(num_assignments, share / share.sum(1, keepdims=True)))
    return torch.from_numpy(np.stack(batches))
