"""What readers cost a model, sequence by sequence, and what thresholds keep where and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epsim.kernels.reader import ReadBytes, batch_coordinates, coordinates, token_bytes, union_bytes
from epsim.kernels.reader.rotate import rotated
from epsim.policies.reader import TopkChannels
from epsim.policies.stack import parse_stack
from epsim.quality.frontier import standard_error
from epsim.quality.hook import reroute_of, rerouted
from epsim.quality.reader import Reading

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trial:
    """A reading to measure; router: of a stack, for batches of batch_size sequences' t-th tokens."""

    reading: Reading | None
    router: str = "topk"
    batch_size: int = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """Of each sequence [n]: loss above the plain model's and kl from its prediction, nats a token; right: share of
    tokens that it finds likeliest and that come. kept: channels a token keeps in a layer, mean; NaN where not known."""

    loss: Floats = field(repr=False)
    kl: Floats = field(repr=False)
    right: Floats = field(repr=False)
    kept: float

    def to_json(self) -> dict[str, float | None]:
        return {
            "loss": float(self.loss.mean()),
            "loss_standard_error": standard_error(self.loss),
            "kl": float(self.kl.mean()),
            "kl_standard_error": standard_error(self.kl),
            "right": float(self.right.mean()),
            "kept_channels": None if np.isnan(self.kept) else self.kept,
        }


@torch.no_grad()
def measure(
    model: Any,
    text: torch.Tensor,
    trials: Mapping[str, Trial],
    chunk: int = 64,
    progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Figures], Figures]:
    """text [sequences, length + 1] -> figures of every trial, and the plain model's, whose loss is the whole one.

    Teacher-forced: every token is read as in a decode step. `chunk` sequences pass at once.
    """
    found: dict[str, list[list[torch.Tensor]]] = {name: [] for name in trials}
    plain_found: list[list[torch.Tensor]] = []
    for part in torch.split(text, chunk):
        inputs, targets = part[:, :-1].to(model.device), part[:, 1:].to(model.device)
        plain = log_probabilities(model, inputs)
        plain_loss, plain_right = _against(plain, targets)
        plain_found.append([plain_loss, torch.zeros_like(plain_loss), plain_right])
        for name, trial in trials.items():
            with acting(model, trial):
                own = log_probabilities(model, inputs)
            loss, right = _against(own, targets)
            # A sequence at a time, as all at once are gigabytes.
            kl = torch.stack([(p.exp() * (p - q)).sum(-1).double().mean() for p, q in zip(plain, own, strict=True)])
            found[name].append([loss - plain_loss, kl, right])
            progress()
    figures = {}
    for name, trial in trials.items():
        known = trial.reading is not None and bool(trial.reading.counts.any())
        kept = trial.reading.kept_channels() if trial.reading is not None and known else float("nan")
        figures[name] = _figures(found[name], kept)
    return figures, _figures(plain_found, float("nan"))


@contextmanager
def acting(model: Any, trial: Trial) -> Iterator[None]:
    """Inside, the trial's router and reader act on all tokens of a pass."""
    reroute = reroute_of(parse_stack(trial.router).router)
    with rerouted(model, reroute, whole_sequences=True, batch_size=trial.batch_size):
        if trial.reading is None:
            yield
            return
        with trial.reading.on(model, whole_sequences=True):
            yield


def log_probabilities(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.float().log_softmax(-1)


def _against(predicted: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> loss [n], right [n]."""
    loss = -predicted.gather(-1, targets[..., None])[..., 0].double().mean(1)
    return loss, (predicted.argmax(-1) == targets).double().mean(1)


def _figures(parts: list[list[torch.Tensor]], kept: float) -> Figures:
    loss, kl, right = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
    return Figures(loss, kl, right, kept)


@torch.no_grad()
def kept_by_token(model: Any, reading: Reading, text: torch.Tensor, chunk: int = 16) -> Floats:
    """text [sequences, length] -> [sequences, length]: channels that a token keeps, mean over layers."""
    rows = []
    before = reading.record
    for part in torch.split(text, chunk):
        sums = torch.zeros(part.numel(), device=model.device)

        def add(number: int, x: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, sums: torch.Tensor = sums) -> None:
            sums += kept.sum((1, 2))

        reading.record = add
        with reading.on(model, whole_sequences=True):
            model(input_ids=part.to(model.device), use_cache=False, logits_to_keep=1)
        rows.append((sums / len(reading.layers)).view(part.shape).double().cpu())
    reading.record = before
    return torch.cat(rows).numpy()


@torch.no_grad()
def batch_bytes(model: Any, reading: Reading, text: torch.Tensor, batch_sizes: tuple[int, ...]) -> dict[int, Any]:
    """text [sequences, length]: of batches of sequences' t-th tokens, {batch size: what a token alone reads, what the
    batch really reads (the union), and what independent choices would have it read, as shares of the bytes of the
    experts that are active}, means over steps and layers. All t are taken, in batches of the first sequences; where a
    batch chooses as one, `reading.batch_size` says which, and the batch sizes should not be others."""
    reader, sketch = reading.reader, reading.layers[0].screen.sketch
    assert isinstance(reader, TopkChannels)
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

    before, reading.record = reading.record, note
    with reading.on(model, whole_sequences=True):
        model(input_ids=text.to(model.device), use_cache=False, logits_to_keep=1)
    reading.record = before
    found: dict[int, Any] = {}
    for size in batch_sizes:
        rows = [_step_bytes(sizes, reading, step) for step in _steps(seen, len(text), size)]
        alone, union, independent, dense = np.array(rows).mean(0)
        found[size] = {
            "per_token": alone,
            "union": union / dense,
            "union_if_independent": independent / dense,
        }
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
    """A token's share, mean over tokens, and bytes: the union's, the expected ones, those of the active experts. Every
    rank that has any reads signs and U."""
    ids, kept, read = step
    reader, ranks = reading.reader, reading.ranks_of(ids)
    assert isinstance(reader, TopkChannels)
    once = sizes.once if reader.budget < 1 else 0
    own = token_bytes(sizes, ids, kept) + (ranks - 1).clamp(min=0) * once
    experts = torch.unique(ids[ids >= 0])
    several = max(len(torch.unique(reading.rank_of_expert[experts])) - 1, 0) * once
    union = union_bytes(sizes, ids, kept, read, len(reading.rank_of_expert)) + several
    active, tokens = torch.tensor([float(len(experts))]), torch.tensor([float((ids >= 0).sum())])
    expected = reader.bytes_read(tokens, active, sizes.hidden, sizes.intermediate, sizes.weight_bytes, ids.shape[1])
    alone = (own.double() / ((ids >= 0).sum(1).clamp(min=1) * sizes.expert)).mean()
    return float(alone), float(union), float(expected) + several, float(active) * sizes.expert
