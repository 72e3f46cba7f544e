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
    """Measures the bytes read, as shares of the bytes of the active experts, means over steps and layers. Returns for
    each batch size: by a token alone, by the batch (the union), and by the batch if its tokens chose independently.

    text [sequences, length]: a batch is the t-th tokens of the first sequences, for every t. If the reader chooses for
    a whole batch, the only batch size is `reading.batch_size`."""
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
    shares: dict[int, Any] = {}
    for size in batch_sizes:
        rows = [_step_bytes(sizes, reading, step) for step in _steps(seen, len(text), size)]
        alone, union, independent, dense = np.array(rows).mean(0)
        shares[size] = {"per_token": alone, "union": union / dense, "union_if_independent": independent / dense}
    return shares


def _steps(
    seen: list[tuple[torch.Tensor, ...]], sequences: int, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for ids, kept, read in seen:
        by_step = [t.view(sequences, -1, *t.shape[1:])[:size].transpose(0, 1) for t in (ids, kept, read)]
        yield from zip(*by_step, strict=True)


def _step_bytes(
    sizes: ReadBytes, reading: Reading, step: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[float, float, float, float]:
    """A token's mean share of its experts' bytes; then bytes: of the union, of the union if choices were independent,
    and of the active experts. Every rank with active experts also reads the signs and U of the sketch."""
    ids, kept, read = step
    reader, ranks = reading.reader, reading.ranks_of(ids)
    assert isinstance(reader, Channels)
    once = sizes.once if reader.budget < 1 else 0
    token_bytes_read = token_bytes(sizes, ids, kept) + (ranks - 1).clamp(min=0) * once
    experts = torch.unique(ids[ids >= 0])
    several = max(len(torch.unique(reading.rank_of_expert[experts])) - 1, 0) * once
    union = union_bytes(sizes, ids, kept, read, len(reading.rank_of_expert)) + several
    active, tokens = torch.tensor([float(len(experts))]), torch.tensor([float((ids >= 0).sum())])
    expected = reader.bytes_read(tokens, active, sizes.hidden, sizes.intermediate, sizes.weight_bytes, ids.shape[1])
    alone = (token_bytes_read.double() / ((ids >= 0).sum(1).clamp(min=1) * sizes.expert)).mean()
    return float(alone), float(union), float(expected) + several, float(active) * sizes.expert
