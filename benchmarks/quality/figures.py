"""The loss that policies cost a model, for each sequence, and the channels that a reader's threshold keeps."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epsim.kernels.reader import ReadBytes
from epsim.policies.stack import parse_stack
from epsim.quality.hook import reroute_of, rerouted
from epsim.quality.reader import Reading, reads

Floats = npt.NDArray[np.float64]
Acting = Callable[[], AbstractContextManager[object]]
PUBLISHED = (("Qwen3-30B-A3B", 2048, 768), ("Gemma-4-26B-A4B", 2816, 704), ("Qwen3.5-35B-A3B", 2048, 512))
"""Models of the paper: hidden, intermediate; all top-8."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A reader to measure, under a router that sees batches of the t-th tokens of batch_size sequences."""

    reading: Reading | None
    router: str = "topk"
    batch_size: int = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """Values of each sequence [n].

    loss: above the plain model's, and kl: from its prediction, both in nats a token. right: the share of tokens that
    were predicted as the likeliest. kept: the mean number of channels that a token keeps in a layer, NaN if unknown.
    """

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


def standard_error(values: Floats) -> float:
    """The standard error of the mean of independent values [n]."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def measure(
    model: Any, text: torch.Tensor, trials: Mapping[str, Trial], chunk: int = 64
) -> tuple[dict[str, Figures], Figures]:
    """Figures of each trial on text [sequences, length + 1], and those of the plain model with its whole loss.

    Teacher-forced: every token is read as in a decode step. A pass has `chunk` sequences.
    """
    figures_of_trials, plain = compare(model, text, [partial(acting, model, trial) for trial in trials.values()], chunk)
    figures = {}
    for (name, trial), measured in zip(trials.items(), figures_of_trials, strict=True):
        known = trial.reading is not None and trial.reading.counts.any()
        figures[name] = replace(measured, kept=trial.reading.kept_channels()) if known else measured
    return figures, plain


@torch.no_grad()
def compare(model: Any, text: torch.Tensor, forms: Sequence[Acting], chunk: int) -> tuple[list[Figures], Figures]:
    """Figures of the model inside each form's context, and those of the plain model."""
    parts_of_forms: list[list[list[torch.Tensor]]] = [[] for _ in forms]
    plain_found: list[list[torch.Tensor]] = []
    for part in torch.split(text, chunk):
        inputs, targets = part[:, :-1].to(model.device), part[:, 1:].to(model.device)
        plain = log_probabilities(model, inputs)
        plain_loss, plain_right = _against(plain, targets)
        plain_found.append([plain_loss, torch.zeros_like(plain_loss), plain_right])
        for parts, form in zip(parts_of_forms, forms, strict=True):
            with form():
                changed = log_probabilities(model, inputs)
            loss, right = _against(changed, targets)
            # Sequence by sequence: all at once take gigabytes.
            kl = torch.stack([(p.exp() * (p - q)).sum(-1).double().mean() for p, q in zip(plain, changed, strict=True)])
            parts.append([loss - plain_loss, kl, right])
    return [_figures(parts) for parts in parts_of_forms], _figures(plain_found)


@contextmanager
def acting(model: Any, trial: Trial) -> Iterator[None]:
    """A context in which the trial's router and reader act on all tokens of a pass."""
    reroute = reroute_of(parse_stack(trial.router).router)
    together = rerouted(model, reroute, whole_sequences=True, batch_size=trial.batch_size)
    with together, reads(trial.reading, model, whole_sequences=True):
        yield


def log_probabilities(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.float().log_softmax(-1)


def _against(predicted: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each sequence [n]: the loss, and the share of tokens predicted as the likeliest."""
    loss = -predicted.gather(-1, targets[..., None])[..., 0].double().mean(1)
    return loss, (predicted.argmax(-1) == targets).double().mean(1)


def _figures(parts: list[list[torch.Tensor]]) -> Figures:
    loss, kl, right = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
    return Figures(loss, kl, right, float("nan"))


@torch.no_grad()
def kept_by_token(model: Any, reading: Reading, text: torch.Tensor, chunk: int = 16) -> Floats:
    """text [sequences, length] -> [sequences, length]: channels that a token keeps, mean over layers."""
    rows = []
    for part in torch.split(text, chunk):
        sums = torch.zeros(part.numel(), device=model.device)

        def add(number: int, x: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, sums: torch.Tensor = sums) -> None:
            sums += kept.sum((1, 2))

        with reading.recording(model, add):
            model(input_ids=part.to(model.device), use_cache=False, logits_to_keep=1)
        rows.append((sums / len(reading.layers)).view(part.shape).double().cpu())
    return torch.cat(rows).numpy()


def drift_of(
    model: Any, reading: Reading, written: torch.Tensor, names: list[str], prompt: int, k: int
) -> dict[str, Any]:
    """The channels that a threshold keeps, over k: by position, by domain, and for the last tokens, where they are and
    moved to the end of the prompt. written [sequences, length]; names: the domain of each sequence."""
    kept = kept_by_token(model, reading, written) / k
    by_position = {f"{b}": float(kept[:, b : b + 128].mean()) for b in range(prompt, written.shape[1], 128)}
    window = min(256, (written.shape[1] - prompt) // 2)
    moved_text = torch.cat([written[:, :prompt], written[:, -window:]], 1)
    moved = kept_by_token(model, reading, moved_text)[:, prompt:] / k
    by_domain: dict[str, list[float]] = {name: [] for name in names}
    for name, row in zip(names, kept[:, prompt:], strict=True):
        by_domain[name].append(float(row.mean()))
    print("kept by position", {name: round(value, 3) for name, value in by_position.items()}, flush=True)
    return {
        "by_position": by_position,
        "by_domain": {name: float(np.mean(rows)) for name, rows in by_domain.items()},
        "late_window_in_place": float(kept[:, -window:].mean()),
        "late_window_after_prompt": float(moved.mean()),
    }


def published_sizes() -> dict[str, dict[str, float]]:
    """The sizes of the paper's models at its budgets, over the bytes of their experts."""
    shares = {}
    for (name, h, i), budget in itertools.product(PUBLISHED, (0.128, 0.178)):
        sizes = ReadBytes(h, i)
        shares[f"{name} {budget}"] = {
            "screen_of_read": ReadBytes(h, i, coordinates=128).screen / (budget * sizes.expert),
            "map_of_experts": (i * 64 + h * 64 / 8) / sizes.expert,
            "sketch_of_experts": (h * sizes.code_row + h // 128 * 2 * i * 4 + 2 * i) / sizes.expert,
            "budget": budget,
        }
    return shares
