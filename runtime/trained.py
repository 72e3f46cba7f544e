"""The project's own trained model with its expert layers made expert-parallel: text, router and attention real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from epsim.runtime.job import Job, Place, Tokens, build_layers
from epsim.runtime.phases import PhaseClock
from epsim.runtime.weights import ModelWeights
from epsim.traces.model import tokens as corpus_tokens
from epsim.traces.model.train import read_model


class TrainedModel:
    """A Qwen2-MoE-like model; each rank reads its own text, as many tokens of it in a step as the trace has there.

    A step's tokens are one sequence. text: where it comes from, in words. Raises ValueError where model and job do not
    fit together. Collective.
    """

    def __init__(self, folder: Path, job: Job, place: Place, clock: PhaseClock) -> None:
        self._model: Any = read_model(folder, str(place.device), place.dtype).model
        weights = ModelWeights(self._model)
        if weights.layers != job.layers:
            raise ValueError(
                f"--model {folder} has expert layers {list(weights.layers)}, the job {list(job.layers)}: "
                "give a trace of this model, without --layers"
            )
        positions = self._model.config.max_position_embeddings
        if job.max_tokens > positions:
            raise ValueError(
                f"a rank has {job.max_tokens} tokens in a step, the model reads {positions}: give more ranks"
            )
        self.layers = build_layers(job, place, clock, weights)
        switches = [self._switch(number) for number in range(len(job.layers))]
        blocks = [block for block in self._model.layers if hasattr(block.mlp, "gate")]
        for block, switch in zip(blocks, switches, strict=True):
            block.mlp = switch
        self._stack, self._step, self._poison = 0, 0, False
        self._job, self._place = job, place
        self._stream, self.text = _text(job.seed, self._model.config.vocab_size)

    @torch.no_grad()
    def run(self, stack: int, step: int, tokens: Tokens, poison: bool) -> None:
        """tokens tell how many there are, no more: the model's router chooses."""
        self._stack, self._step, self._poison = stack, step, poison
        num_tokens = len(tokens.ids)
        if not num_tokens:  # the collectives are still to be made
            nothing = torch.empty(0, self._job.shape.hidden, device=self._place.device, dtype=self._place.dtype)
            for layer in self.layers[stack]:
                layer(nothing, step=step)
            return
        room = max(len(self._stream) - num_tokens, 1)
        start = (step * self._place.num_ranks + self._place.rank) * self._job.max_tokens % room
        text = self._stream[start : start + num_tokens].to(self._place.device)
        self._model(input_ids=text[None], use_cache=False)

    def _switch(self, number: int) -> torch.nn.Module:
        """Takes the place of a block of experts."""
        model = self

        class Switch(torch.nn.Module):
            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                flat = hidden.reshape(-1, hidden.shape[-1])
                if model._poison:
                    flat = torch.full_like(flat, torch.nan)
                output: torch.Tensor = model.layers[model._stack][number](flat, step=model._step)
                return output.view(hidden.shape)

        return Switch()


def _text(seed: int, vocabulary: int) -> tuple[torch.Tensor, str]:
    """[N] int64 token ids, and where they come from."""
    try:
        heldout = corpus_tokens.load().heldout
    except ValueError:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocabulary, (1 << 16,), generator=generator), "random token ids, as no corpus is prepared"
    parts = [torch.from_numpy(ids.astype("int64")) for ids in heldout.values()]
    return torch.cat(parts), "held-out text of the prepared corpus"
