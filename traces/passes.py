"""A recorded forward pass, on its way from the device to the trace."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from epsim.traces.trace import Array, Phase, TokenBlock


@dataclass(frozen=True, slots=True)
class Pass:
    """A finished forward pass of B = batch sequences of n = length tokens.

    valid [B, n] bool: tokens that are no padding, None for all. ids, scores, score_ids [L, B * n, ...], int16 and
    float16. domains, ranks: of each sequence.
    """

    step: int
    batch: int
    length: int
    valid: torch.Tensor | None
    ids: torch.Tensor
    scores: torch.Tensor | None
    score_ids: torch.Tensor | None
    domains: tuple[str, ...]
    ranks: tuple[int, ...]
    phase: Phase

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.ids, self.scores, self.score_ids) if t is not None)

    def to_cpu(self) -> Pass:
        """The same pass, off the device."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.cpu()

        return dataclasses.replace(
            self,
            valid=moved(self.valid),
            ids=self.ids.cpu(),
            scores=moved(self.scores),
            score_ids=moved(self.score_ids),
        )

    def to_block(self) -> TokenBlock:
        """Tokens ordered by source rank, then sequence, then position; without padding."""
        sequence = np.repeat(np.arange(self.batch), self.length)
        order = np.argsort(np.array(self.ranks)[sequence], kind="stable")
        if self.valid is not None:
            order = order[self.valid.reshape(-1).numpy()[order]]
        sequence = sequence[order]

        def tokens(stacked: torch.Tensor | None) -> Array | None:
            return None if stacked is None else stacked.numpy().transpose(1, 0, 2)[order]

        ids = tokens(self.ids)
        assert ids is not None
        return TokenBlock(
            np.array([self.step]),
            np.zeros(len(order), dtype=np.int64),
            np.array(self.ranks, dtype=np.int64)[sequence],
            ids,
            tokens(self.scores),
            tokens(self.score_ids),
            np.array(self.domains, dtype=object)[sequence],
            np.array([self.phase], dtype=object),
        )
