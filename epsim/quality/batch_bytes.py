"""The bytes that a batch of tokens reads together under a reader, and the bytes that each token reads by itself."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from epsim.kernels.reader import ReadBytes, batch_coordinates, coordinates, token_bytes, union_bytes
from epsim.kernels.reader.rotate import rotated
from epsim.policies.reader import Channels
from epsim.quality.reader import Reading


@torch.no_grad()
def batch_bytes(model: Any, reading: Reading, text: torch.Tensor, batch_sizes: tuple[int, ...]) -> dict[int, Any]:
    """{batch size: bytes read by a token alone, by the batch (the union), and by a batch of independent choices}, as
    shares of the active experts' bytes, means over steps and layers. text [sequences, length]: a batch holds the t-th
    tokens of the first sequences, for every t. If the reader chooses per batch, give `reading.batch_size` only."""
    reader, sketch = reading.reader, reading.layers[0].screen.sketch
    assert isinstance(reader, Channels)
    sizes = reader.sizes(sketch.hidden, sketch.intermediate, rank=sketch.rank)
    seen: list[tuple[torch.Tensor, ...]] = []

    def note(number: int, x: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor) -> None:
        turned = rotated(x.float(), reading.layers[number].screen.sketch.signs)
        if reader.quota == "batch":
            counted = torch.where((ids >= 0).any(1, keepdim=True), turned, 0.0)
            read = batch_coordinates(counted, reader.coordinates, *reading.batches(x, text.shape[1]))
        else:
            read = coordinates(turned, reader.coordinates)
        seen.append((ids, kept, read))

    with reading.recording(model, note):
        model(input_ids=text.to(model.device), use_cache=False, logits_to_keep=1)
    found: dict[int, Any] = {}
    for size in batch_sizes:
        rows = [_step_bytes(sizes, reading, step) for step in _steps(seen, len(text), size)]
        alone, union, independent, dense = np.array(rows).mean(0)
        found[size] = {"per_token": alone, "union": union / dense, "union_if_independent": independent / dense}
    return found


def _steps(
    seen: list[tuple[torch.Tensor, ...]], sequences: int, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for ids, kept, read in seen:
        by_step = [t.view(sequences, -1, *t.shape[1:])[:size].transpose(0, 1) for t in (ids, kept, read)]
        yield from zip(*by_step, strict=True)


def _step_bytes(
    sizes: ReadBytes, reading: Reading, step: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[float, float, float, float]:
    """The mean share of a token, and the bytes of the union, the expected bytes, and those of the active experts. Every
    rank with active experts reads signs and U."""
    ids, kept, read = step
    reader, ranks = reading.reader, reading.ranks_of(ids)
    assert isinstance(reader, Channels)
    once = sizes.once if reader.budget < 1 else 0
    own = token_bytes(sizes, ids, kept) + (ranks - 1).clamp(min=0) * once
    experts = torch.unique(ids[ids >= 0])
    several = max(len(torch.unique(reading.rank_of_expert[experts])) - 1, 0) * once
    union = union_bytes(sizes, ids, kept, read, len(reading.rank_of_expert)) + several
    active, tokens = torch.tensor([float(len(experts))]), torch.tensor([float((ids >= 0).sum())])
    expected = reader.bytes_read(tokens, active, sizes.hidden, sizes.intermediate, sizes.weight_bytes, ids.shape[1])
    alone = (own.double() / ((ids >= 0).sum(1).clamp(min=1) * sizes.expert)).mean()
    return float(alone), float(union), float(expected) + several, float(active) * sizes.expert
