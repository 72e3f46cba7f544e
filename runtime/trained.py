"""The project's own trained model with its expert layers made expert-parallel: text, router and attention real."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import DynamicCache

from epsim.runtime.job import Job, Place, Tokens, build_layers
from epsim.runtime.phases import PhaseClock
from epsim.runtime.weights import ModelWeights
from epsim.traces.model import tokens as corpus_tokens
from epsim.traces.model.train import read_model


@dataclass(frozen=True, slots=True)
class Reading:
    """What the model is fed with. text: a file, or None for held-out text of the corpus. sequence: most tokens of one
    in a step that is no decode step, None for as many as the model reads. context: tokens read before a decode step."""

    text: Path | None = None
    sequence: int | None = None
    context: int = 64


class TrainedModel:
    """A Qwen2-MoE-like model; each rank reads its own text, as many tokens of it in a step as the trace has there.

    A decode step's tokens are one of each of as many sequences, which have read `context` tokens before: those were
    read by the model's own experts on this rank, once for all stacks, and are not timed. The tokens of any other step
    are sequences of their own. text: where it comes from, in words. Raises ValueError where model, job and reading do
    not fit together. Collective.
    """

    def __init__(self, folder: Path, job: Job, place: Place, clock: PhaseClock, reading: Reading) -> None:
        self._model: Any = read_model(folder, str(place.device), place.dtype).model
        weights = ModelWeights(self._model)
        if weights.layers != job.layers:
            raise ValueError(
                f"--model {folder} has expert layers {list(weights.layers)}, the job {list(job.layers)}: "
                "give a trace of this model, without --layers"
            )
        positions = self._model.config.max_position_embeddings
        self._length, self._context = reading.sequence or positions, reading.context
        for option, length in (("sequence", self._length), ("context", self._context + 1)):
            if length > positions:
                raise ValueError(f"--{option}: {length} tokens of a sequence, and {folder} reads {positions}")
        self.layers = build_layers(job, place, clock, weights)
        for number, block in enumerate(block for block in self._model.layers if hasattr(block.mlp, "gate")):
            block.mlp = _Switch(self, number, block.mlp)
        self._stack, self._step, self._poison, self._apart = 0, 0, False, False
        self._job, self._place = job, place
        self._stream, source = _text(folder, reading.text, job.seed, self._model.config.vocab_size)
        self.text = f"{source}, decode steps after {self._context} tokens of context"
        self._ids = torch.empty(0, 0, dtype=torch.int64)
        self._num_tokens = 0
        self._decode = torch.empty(0, dtype=torch.bool)
        self._cache: Any = None

    @torch.no_grad()
    def begin(self, step: int, tokens: Tokens) -> None:
        """tokens tell how many there are, and the step's phase, no more: the model's router chooses."""
        self._step, self._num_tokens, self._cache = step, len(tokens.ids), None
        place = (step * self._place.num_ranks + self._place.rank) * max(self._job.max_tokens, 1)
        if self._num_tokens and tokens.phase == "decode":
            length = self._context + 1
            ids = self._read(place * length, self._num_tokens * length).view(self._num_tokens, length)
            self._cache, self._apart = DynamicCache(), True
            self._model(input_ids=ids[:, :-1], use_cache=True, past_key_values=self._cache)
            self._apart = False
            self._ids = ids[:, -1:]
        elif self._num_tokens:
            length = min(self._length, self._num_tokens)
            ids = self._read(place, self._num_tokens)
            # What fills the last sequence up follows its tokens, which do not look ahead; no layer's experts see it.
            self._ids = F.pad(ids, (0, -len(ids) % length)).view(-1, length)
        if self._place.group is not None:
            dist.barrier(self._place.group)  # else the first layer's time would hold the wait for the longest context

    @torch.no_grad()
    def run(self, stack: int, step: int, tokens: Tokens, poison: bool) -> None:
        self._stack, self._poison, self._decode = stack, poison, tokens.decode
        if self._num_tokens:
            cached = self._cache is not None
            self._model(input_ids=self._ids, use_cache=cached, past_key_values=self._cache)
            if cached:
                self._cache.crop(-1)  # the step's own token, which other stacks read too
            return
        # The collectives are still to be made.
        nothing = torch.empty(0, self._job.shape.hidden, device=self._place.device, dtype=self._place.dtype)
        for layer in self.layers[stack]:
            layer(nothing, step=step, decode=tokens.decode)

    def experts(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, N, H] of the model's place `number` of its expert layers -> the same shape."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        real = flat[: self._num_tokens]
        if self._poison:
            real = torch.full_like(real, torch.nan)
        output = self.layers[self._stack][number](real, step=self._step, decode=self._decode)
        return F.pad(output, (0, 0, 0, len(flat) - len(real))).view(hidden.shape)

    def _read(self, start: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens] of the text from a place on, over and over."""
        at = (start + torch.arange(num_tokens)) % len(self._stream)
        return self._stream[at].to(self._place.device)


class _Switch(torch.nn.Module):
    """Takes the place of a block of experts; `own`: what it was, for what is read apart from the job."""

    def __init__(self, model: TrainedModel, number: int, own: torch.nn.Module) -> None:
        super().__init__()
        self._model, self._number, self._own = [model], number, own  # in a list: it is no part of this module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self._model[0]
        output: torch.Tensor = self._own(hidden) if model._apart else model.experts(self._number, hidden)
        return output


def _text(folder: Path, file: Path | None, seed: int, vocabulary: int) -> tuple[torch.Tensor, str]:
    """[N] int64 token ids, and where they come from. The corpus is the one beside the model, or the cache's."""
    corpus = None
    for cache in (folder.resolve().parent, None):
        try:
            corpus = corpus_tokens.load(cache)
            break
        except ValueError:
            continue
    if file is None and corpus is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocabulary, (1 << 16,), generator=generator), "random token ids, as no corpus is prepared"
    if corpus is None:
        raise ValueError("--text needs the tokenizer of the model's corpus: run `epsim model corpus` first")
    parts = list(corpus.heldout.values())
    words = "held-out text of the prepared corpus"
    if file is not None:
        try:
            parts, words = (
                [corpus_tokens.encode(corpus.tokenizer, [file.read_text(errors="replace")])],
                f"text of {file.name}",
            )
        except OSError as error:
            raise ValueError(f"--text {file}: cannot be read ({error.strerror})") from None
    stream = torch.cat([torch.from_numpy(ids.astype("int64")) for ids in parts])
    if not len(stream) or int(stream.max()) >= vocabulary:
        raise ValueError(f"{words} has {len(stream)} tokens, of a vocabulary that is not the model's {vocabulary}")
    return stream, words
