"""k0 by batch size: the text form `3`, or `6@4/3@16`: 6 from 4 tokens on, 3 from 16 on, and all k below 4."""

import itertools
import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Schedule:
    """steps: (smallest batch size, k0), ascending; smaller batches take the model's own k.

    first: the batch size from which a plain number applies.
    """

    steps: tuple[tuple[int, int], ...]
    first: int

    def __str__(self) -> str:
        if len(self.steps) == 1 and self.steps[0][0] == self.first:
            return str(self.steps[0][1])
        return "/".join(f"{k0}@{size}" for size, k0 in self.steps)

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(k0 for _, k0 in self.steps)

    def place(self, sizes: Tensor) -> Tensor:
        """For batch sizes [...] int64: 0 for the model's own k, i for the k0 of step i, as [...] int64."""
        # One comparison per step: a tensor of the steps would be copied from the host, which a CUDA graph cannot hold.
        return torch.stack([sizes >= least for least, _ in self.steps], -1).sum(-1)

    def check(self, top_k: int, item: str) -> None:
        """Raises ValueError if a k0 exceeds the model's k."""
        if max(self.values) > top_k:
            raise ValueError(f"{item}: k0 is {max(self.values)}, but a token has {top_k} experts: give at most {top_k}")


@lru_cache
def parse_schedule(text: str, name: str, first: int) -> Schedule:
    """Parses a schedule. first: the smallest batch size allowed after an @, and the one from which a plain number
    applies. Raises ValueError with one line that says what is wrong and what is allowed."""
    steps = []
    for part in text.split("/"):
        found = re.fullmatch(r"(\d{1,4})(?:@(\d{1,9}))?", part.strip())
        if not found or ("/" in text and found[2] is None):
            raise ValueError(f"{name}: k0={text} is neither a number nor k0@batch/k0@batch/..., such as 6@4/3@16")
        steps.append((int(found[2] or first), int(found[1])))
    if min(k0 for _, k0 in steps) < 1:
        raise ValueError(f"{name}: k0={text}: give 1 or more")
    if steps[0][0] < first:
        alone = "a batch of one token keeps the model's k; " if first == 2 else ""
        raise ValueError(f"{name}: k0={text}: {alone}batch sizes begin at {first}")
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"{name}: k0={text}: batch sizes must ascend")
    return Schedule(tuple(steps), first)
