"""One recorded forward pass, and its conversion to a block of a trace."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from epsim.traces.trace import Array, Phase, TokenBlock

OBJECT_BYTES = 4096


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The key-value cache in a model's arguments, or None. The argument's name differs between versions."""
    return next((kwargs[name] for name in ("past_key_values", "cache") if kwargs.get(name) is not None), None)


def real_tokens(mask: Any, batch: int, length: int, cache: Any) -> torch.Tensor | None:
    """Which tokens of a pass are not padding: a new [batch, length] bool, or None for all.

    mask: [batch, tokens]; or, as generate() passes it with a static cache, [batch, 1, length, keys] with True or 0.0
    for attended keys, or a dict of such masks by attention type. In these a token that attends to itself is not
    padding. Raises ValueError for other masks.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return None
    past = 0 if cache is None else int(cache.get_seq_length())
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= length:
        # A mask for a static cache extends beyond this pass; a mask for this pass only does not cover the past.
        start = past if mask.shape[1] >= past + length else mask.shape[1] - length
        return mask[:, start : start + length].to(torch.bool, copy=True)
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[3] >= past + length:
        attended = mask if mask.dtype == torch.bool else mask == 0
        return attended[:, 0].diagonal(past, 1, 2).expand(batch, length).clone()
    shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    raise ValueError(f"record: attention_mask {shape} does not say which tokens are padding: give [sequences, tokens]")


@dataclass(frozen=True, slots=True)
class Pass:
    """A finished forward pass of B = batch sequences of n = length tokens.

    valid [B, n] bool: tokens that are not padding, None for all. ids, scores, score_ids [L, B * n, ...]: int16,
    float16, int16. domains, ranks: one per sequence.
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
        """Approximate size, including Python objects, which dominate in passes of one or two tokens."""
        tensors = [t for t in (self.ids, self.scores, self.score_ids) if t is not None]
        return OBJECT_BYTES + sum(t.numel() * t.element_size() for t in tensors)

    def to_cpu(self) -> Pass:
        """The same pass, with its tensors on the CPU."""

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
        """The pass as a block without padding, ordered by source rank, then sequence, then position."""
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


def blocks_of(passes: Sequence[Pass]) -> Iterator[TokenBlock]:
    """Joins consecutive passes that all have scores, or all have none, into one block, to save kilobytes per pass."""
    for _, run in itertools.groupby(passes, lambda p: p.scores is None):
        blocks = [p.to_block() for p in run]

        def joined(name: str, blocks: list[TokenBlock] = blocks) -> Any:
            arrays = [getattr(block, name) for block in blocks]
            return None if arrays[0] is None else np.concatenate(arrays)

        sizes = [len(block.token_step) for block in blocks]
        yield TokenBlock(
            joined("steps"),
            np.repeat(np.arange(len(blocks)), sizes),
            *map(joined, ("source_rank", "expert_ids", "scores", "score_ids", "domain", "phase")),
        )
