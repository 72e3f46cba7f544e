"""Decodes with the small model under a router policy, token by token. On a GPU a step is one CUDA graph."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from epsim.kernels.experts import MOST_TOKENS, decode
from epsim.quality.hook import Reroute, rerouted
from epsim.traces.model import tokens
from epsim.traces.routers import find_routers

TOP_P = 0.95
"""The p of top-p sampling."""


class Cache:
    """Keys and values of every layer [B, heads, length, width], written in place at the positions of the step's tokens.

    It implements only what attention in transformers calls. transformers' own static cache differs between versions and
    reads its length on the host.
    """

    def __init__(self, model: Any, batch_size: int, length: int, positions: torch.Tensor) -> None:
        config = model.config
        width = config.hidden_size // config.num_attention_heads
        size = (config.num_hidden_layers, 2, batch_size, config.num_key_value_heads, length, width)
        self._kept = torch.zeros(size, device=model.device, dtype=model.dtype)
        self.positions = positions

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept_keys, kept_values = self._kept[layer]
        kept_keys.index_copy_(2, self.positions, keys)
        kept_values.index_copy_(2, self.positions, values)
        return kept_keys, kept_values


class Decoder:
    """Continues a batch of prompts of equal length under a policy: call `start`, then `step` for each further token.

    model: from `load_model`. length: tokens of prompt and continuation together. sample: True for top-p 0.95, False for
    the most likely token. After its end a sequence is padding, which activates no expert. endless: no sequence ends.
    """

    def __init__(
        self, model: Any, reroute: Reroute, batch_size: int, length: int, sample: bool = True, endless: bool = False
    ) -> None:
        if length > model.config.max_position_embeddings:
            raise ValueError(f"{length} tokens, but the model has {model.config.max_position_embeddings} positions")
        self.model, self.reroute, self.length, self.sample, self.endless = model, reroute, length, sample, endless
        device = model.device
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._cache = Cache(model, batch_size, length, self._position)
        self.tokens = torch.full((batch_size, 1), tokens.END_ID, device=device)
        """[B, 1] int64: the last token of each sequence, the input of the next step."""
        self.written = torch.full((batch_size, length), tokens.END_ID, device=device)
        """[B, length] int64: all tokens."""
        self._ended = torch.zeros(batch_size, 1, dtype=torch.bool, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        # transformers 5.24 renamed the argument.
        self._named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.no_grad()
    def start(self, prompts: torch.Tensor) -> None:
        """Prefills prompts [B, n], n < length, and chooses the first token. The policy does not act on prefill."""
        count = prompts.shape[1]
        if not 0 < count < self.length or len(prompts) != len(self.tokens):
            raise ValueError(f"prompts {list(prompts.shape)}: give {len(self.tokens)} of 1 to {self.length - 1} tokens")
        self._ended.zero_()
        self.written.fill_(tokens.END_ID)
        self.written[:, :count].copy_(prompts)
        self._cache.positions = torch.arange(count, device=self.tokens.device)
        self._choose(self._logits(self.written[:, :count]))
        self._cache.positions = self._position
        self._position.fill_(count)
        self.written.index_copy_(1, self._position, self.tokens)

    @torch.no_grad()
    def step(self) -> None:
        """Adds a token to every sequence. Raises ValueError if all `length` tokens are written (only on a CPU)."""
        if self._graph is not None:
            self._graph.replay()
            return
        if not self.tokens.is_cuda and int(self._position) + 1 >= self.length:
            raise ValueError(f"all {self.length} tokens are written: give a greater length")
        self._step()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def _step(self) -> None:
        with rerouted(self.model, self.reroute, whole_sequences=False, end_id=tokens.END_ID):
            logits = self._logits(self.tokens)
        self._choose(logits)
        self._position.add_(1)
        self.written.index_copy_(1, self._position, self.tokens)

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        at = self._cache.positions
        seen = torch.arange(self.length, device=at.device)[None] <= at[:, None]
        output = self.model(
            input_ids=inputs,
            attention_mask=seen[None, None].expand(len(inputs), 1, -1, -1),
            position_ids=at[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._named: self._cache},
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _choose(self, logits: torch.Tensor) -> None:
        if self.endless:
            logits[:, tokens.END_ID] = -torch.inf
        if self.sample:
            probability, order = logits.softmax(-1).sort(dim=-1, descending=True)
            beyond = probability.cumsum(-1) - probability >= TOP_P
            # argmax(probability / Exp(1) draws) samples by probability without host synchronization.
            race = probability.masked_fill(beyond, 0.0) / torch.empty_like(probability).exponential_()
            chosen = order.gather(-1, race.argmax(-1, keepdim=True))
        else:
            chosen = logits.argmax(-1, keepdim=True)
        chosen = torch.where(self._ended, tokens.END_ID, chosen)
        self._ended.logical_or_(chosen == tokens.END_ID)
        self.tokens.copy_(chosen)

    @torch.no_grad()
    def capture(self, prompts: torch.Tensor) -> None:
        """Captures a step as a CUDA graph, which later steps replay. Call `start` again afterwards. CUDA only."""
        assert self.tokens.is_cuda
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.start(prompts)
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph


@contextmanager
def small_batch_experts(model: Any) -> Iterator[None]:
    """Inside the `with`, `epsim.kernels.experts.decode` computes the experts of up to 64 rows. More rows keep the
    model's code. Raises ValueError if experts are not gated by SiLU."""
    changed = [router.experts for router in find_routers(model)]
    for experts in changed:
        if not isinstance(experts.act_fn, torch.nn.SiLU) and type(experts.act_fn).__name__ != "SiLUActivation":
            raise ValueError(
                f"experts of {type(experts).__name__} are gated by {type(experts.act_fn).__name__}, not SiLU"
            )

        def forward(
            hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Any = experts
        ) -> torch.Tensor:
            if len(hidden) > MOST_TOKENS:
                out: torch.Tensor = type(experts).forward(experts, hidden, ids, weights)
                return out
            # Entries without an expert have weight 0.
            taken = ids.masked_fill(weights == 0, -1)
            return decode(hidden, taken, weights.float(), experts.gate_up_proj, experts.down_proj)

        experts.forward = forward
    try:
        yield
    finally:
        for experts in changed:
            del experts.forward


def generate(model: Any, reroute: Reroute, prompts: torch.Tensor, num_tokens: int, seed: int) -> torch.Tensor:
    """Samples continuations [sequences, num_tokens] of prompts [sequences, n] in one batch."""
    torch.manual_seed(seed)
    count = prompts.shape[1]
    decoder = Decoder(model, reroute, len(prompts), count + num_tokens)
    decoder.start(prompts)
    decoder.steps(num_tokens - 1)
    return decoder.written[:, count:]
