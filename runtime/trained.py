"""Runs the model of `epsim model train` with expert-parallel layers, on real text with its own router and attention."""

from contextlib import suppress
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
    """The model's input. text: a file, or None for held-out text of the corpus. sequence: the most tokens per sequence
    in a prefill step, None for the model's limit. context: tokens before each decode token."""

    text: Path | None = None
    sequence: int | None = None
    context: int = 64


class TrainedModel:
    """A model like Qwen2-MoE. Each rank reads its own text, with as many tokens per step as the trace has on this rank.

    Each token of a decode step continues a sequence of its own, after a context of `context` tokens. The model's own
    experts process the context on this rank, once for all stacks and untimed. The tokens of other steps form new
    sequences. text: a description of the source. Raises ValueError if model, job and reading do not match. Collective.
    """

    def __init__(self, folder: Path, job: Job, place: Place, clock: PhaseClock, reading: Reading) -> None:
        self._model: Any = read_model(folder, str(place.device), place.dtype).model
        weights = ModelWeights(self._model)
        if weights.layers != job.layers:
            raise ValueError(
                f"--model {folder} has expert layers {list(weights.layers)}, but the job has {list(job.layers)}: "
                "give a trace of this model, without --layers"
            )
        positions = self._model.config.max_position_embeddings
        self._length, self._context = reading.sequence or positions, reading.context
        for option, length in (("sequence", self._length), ("context", self._context + 1)):
            if length > positions:
                raise ValueError(f"--{option}: {length} tokens per sequence, but {folder} has {positions} positions")
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
        """Prepares a step. Only the number of tokens and the phase are used, because the model's router chooses."""
        self._step, self._num_tokens, self._cache = step, len(tokens.ids), None
        offset = (step * self._place.num_ranks + self._place.rank) * max(self._job.max_tokens, 1)
        if self._num_tokens and tokens.phase == "decode":
            length = self._context + 1
            ids = self._read(offset * length, self._num_tokens * length).view(self._num_tokens, length)
            self._cache, self._apart = DynamicCache(), True
            self._model(input_ids=ids[:, :-1], use_cache=True, past_key_values=self._cache)
            self._apart = False
            self._ids = ids[:, -1:]
        elif self._num_tokens:
            length = min(self._length, self._num_tokens)
            ids = self._read(offset, self._num_tokens)
            # Padding follows the tokens of the last sequence, which do not attend to it. Experts do not process it.
            self._ids = F.pad(ids, (0, -len(ids) % length)).view(-1, length)
        if self._place.group is not None:
            # Without this barrier, the time of the first layer would include the wait for the longest context.
            dist.barrier(self._place.group)

    @torch.no_grad()
    def run(self, stack: int, step: int, tokens: Tokens, poison: bool) -> None:
        self._stack, self._poison, self._decode = stack, poison, tokens.decode
        if self._num_tokens:
            cached = self._cache is not None
            self._model(input_ids=self._ids, use_cache=cached, past_key_values=self._cache)
            if cached:
                self._cache.crop(-1)  # removes the token of this step, because other stacks process it too
            return
        # A rank without tokens still takes part in the collectives.
        nothing = torch.empty(0, self._job.shape.hidden, device=self._place.device, dtype=self._place.dtype)
        for layer in self.layers[stack]:
            layer(nothing, step=step, decode=tokens.decode)

    def experts(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output of expert layer `number` (an index) for hidden [B, N, H], in the same shape."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        real = flat[: self._num_tokens]
        if self._poison:
            real = torch.full_like(real, torch.nan)
        output = self.layers[self._stack][number](real, step=self._step, decode=self._decode)
        return F.pad(output, (0, 0, 0, len(flat) - len(real))).view(hidden.shape)

    def _read(self, start: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens] token ids of the text from offset `start`; after its end the text begins again."""
        at = (start + torch.arange(num_tokens)) % len(self._stream)
        return self._stream[at].to(self._place.device)


class _Switch(torch.nn.Module):
    """Replaces a block of experts. original: the replaced block, which still processes the untimed context."""

    def __init__(self, model: TrainedModel, number: int, original: torch.nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that the model does not become a submodule
        self._number, self._original = number, original

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self._model[0]
        output: torch.Tensor = self._original(hidden) if model._apart else model.experts(self._number, hidden)
        return output


def _text(folder: Path, file: Path | None, seed: int, vocabulary: int) -> tuple[torch.Tensor, str]:
    """Token ids [N] int64, and a description of their source. The corpus is beside the model, or in the cache."""
    corpus = None
    for cache in (folder.resolve().parent, None):
        with suppress(ValueError):
            corpus = corpus_tokens.load(cache)
            break
    if file is None and corpus is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocabulary, (1 << 16,), generator=generator), "random token ids (no corpus prepared)"
    if corpus is None:
        raise ValueError("--text needs the tokenizer of the model's corpus: run `epsim model corpus` first")
    parts = list(corpus.heldout.values())
    words = "held-out text of the prepared corpus"
    if file is not None:
        try:
            parts = [corpus_tokens.encode(corpus.tokenizer, [file.read_text(errors="replace")])]
            words = f"text of {file.name}"
        except OSError as error:
            raise ValueError(f"--text {file}: cannot be read ({error.strerror})") from None
    stream = torch.cat([torch.from_numpy(ids.astype("int64")) for ids in parts])
    if not len(stream) or int(stream.max()) >= vocabulary:
        raise ValueError(f"{words} has {len(stream)} tokens and does not match the model's vocabulary of {vocabulary}")
    return stream, words
