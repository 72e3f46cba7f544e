"""Tokens for benchmarks/whole_host.py: which experts they choose, and what placements are planned on.

DeepSeek-V3's recordings hold counts of several workloads. Its tokens are drawn from them, each step with its own
mixture of two, and placements are planned on a third. gpt-oss-20b's and the sample's tokens are recorded, in order;
placements are planned on those before. If a run needs more tokens than there are, they repeat. Without a recording,
experts are drawn with a lognormal popularity that has drifted since it was planned on.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gates.draw import OTHER, PLANNED, SCORED, SEED, drawn, recorded

from epsim.models.shapes import LayerShape
from epsim.traces.importing import open_trace
from epsim.traces.trace import Phase, TokenBlock

V3_LAYER, OSS_LAYER, SAMPLE_LAYER = 22, 11, 2


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Tokens with their experts.

    ids [N, k] int16; scores [N, E] float32 for router policies, or None; history [E]: counts that placements are
    planned on. shape: the layer, with the source's number of experts and top-k. phase: of all steps. moment: this many
    tokens in a row are drawn alike, and each step takes those of the next moment; 0: steps take tokens in order.
    """

    name: str
    what: str
    shape: LayerShape
    ids: np.ndarray
    history: torch.Tensor
    phase: Phase = "prefill"
    scores: np.ndarray | None = None
    moment: int = 0

    def block(self, num_ranks: int, tokens: int, num_steps: int) -> TokenBlock:
        """Steps of `tokens` tokens on each rank."""
        at = np.arange(num_ranks * tokens * num_steps)
        if self.moment:
            step, place = np.divmod(at, num_ranks * tokens)
            turn, moment = np.divmod(step, len(self.ids) // self.moment)
            at = moment * self.moment + (turn * num_ranks * tokens + place) % self.moment
        at %= len(self.ids)
        return TokenBlock(
            np.arange(num_steps),
            np.repeat(np.arange(num_steps), num_ranks * tokens),
            np.tile(np.repeat(np.arange(num_ranks), tokens), num_steps),
            self.ids[at][:, None],
            None if self.scores is None else self.scores[at][:, None],
        )


def fitted(base: LayerShape, num_experts: int, top_k: int) -> LayerShape:
    """The widths of `base` with other numbers of experts."""
    return dataclasses.replace(base, num_experts=num_experts, top_k=top_k)


def sources(folder: Path | None, base: LayerShape, per_step: int, steps: int, device: torch.device) -> Iterator[Source]:
    """The most important sources first. folder: holds deepseek-v3-sglang/ and gpt-oss-20b/, or one of them. per_step,
    steps: the largest run's tokens of all ranks, and steps. device: where tokens are drawn."""
    v3 = None if folder is None else folder / "deepseek-v3-sglang"
    if v3 is not None and v3.is_dir():
        yield deepseek(v3, base, per_step, steps, device)
    else:
        yield lognormal(base, per_step * steps, device)
    oss = None if folder is None else folder / "gpt-oss-20b" / "gptoss20b_decode_ids_256seq.npz"
    if oss is not None and oss.is_file():
        yield gpt_oss(oss, base)
    yield sample(base)


def deepseek(folder: Path, base: LayerShape, per_step: int, steps: int, device: torch.device) -> Source:
    counts, shares = ({name: c[V3_LAYER] for name, c in of.items()} for of in recorded(folder))
    shape = fitted(base, len(counts[PLANNED]), 8)
    source = torch.Generator(device).manual_seed(SEED)
    parts = 0.5 * torch.rand(steps, generator=torch.Generator().manual_seed(SEED))
    ids = [
        drawn(((1 - part) * shares[SCORED] + part * shares[OTHER]).to(device), per_step, shape.top_k, source)
        for part in parts.tolist()
    ]
    what = f"drawn by DeepSeek-V3's recorded counts of layer {V3_LAYER}"
    return Source("deepseek-v3", what, shape, _small(torch.cat(ids)), counts[PLANNED], moment=per_step)


def gpt_oss(path: Path, base: LayerShape) -> Source:
    found = np.load(path)
    ids, lengths = torch.from_numpy(found["expert_ids"][:, :, OSS_LAYER].astype(np.int64)), found["lengths"]
    there = torch.arange(ids.shape[1]) < torch.from_numpy(lengths.astype(np.int64))[:, None]
    there[:, :16] = False  # planned on
    history = torch.bincount(ids[:, :16].flatten(), minlength=256)[:32]
    # In the order of positions: a decode step's tokens are one of each sequence.
    tokens = ids.transpose(0, 1)[there.T]
    what = f"gpt-oss-20b's recorded tokens of layer {OSS_LAYER}"
    return Source("gpt-oss-20b", what, fitted(base, 32, ids.shape[-1]), _small(tokens), history)


def sample(base: LayerShape) -> Source:
    trace = open_trace([Path("sample")])
    middle = trace.num_steps // 2
    early, late = (
        np.concatenate([block.expert_ids[:, SAMPLE_LAYER] for block in trace.blocks(first, last)]).astype(np.int64)
        for first, last in ((0, middle), (middle, trace.num_steps))
    )
    shape = fitted(base, trace.meta.num_experts, trace.meta.top_k)
    history = torch.from_numpy(np.bincount(early[early >= 0], minlength=shape.num_experts))
    tokens = torch.from_numpy(late[(late >= 0).all(1)])
    return Source("sample", f"the sample's recorded tokens of layer {SAMPLE_LAYER}", shape, _small(tokens), history)


def lognormal(base: LayerShape, number: int, device: torch.device) -> Source:
    planned, now = _popularity(base)
    source = torch.Generator(device).manual_seed(SEED)
    ids = drawn(now.exp().to(device), number, base.top_k, source)
    history = (planned.exp() * 1e4).to(torch.int64)
    return Source("lognormal", "lognormal popularity, drawn (no recording was given)", base, _small(ids), history)


def scored(base: LayerShape, number: int, device: torch.device) -> Source:
    """Decode tokens with their scores, for router policies."""
    planned, now = _popularity(base)
    source = torch.Generator(device).manual_seed(SEED)
    noise = torch.rand(number, base.num_experts, generator=source, device=device).clamp_(1e-9, 1 - 1e-7)
    scores = (now.float().to(device) - torch.log(-torch.log(noise))).softmax(1)
    ids, history = scores.topk(base.top_k, dim=1).indices, (planned.exp() * 1e4).to(torch.int64)
    what = "lognormal popularity, drawn, with scores"
    return Source("lognormal", what, base, _small(ids), history, "decode", scores.cpu().numpy())


def _popularity(shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(SEED)
    log = 0.9 * torch.randn(shape.num_experts, generator=source).double()
    return log, log + 0.2 * torch.randn(shape.num_experts, generator=source)


def _small(ids: torch.Tensor) -> np.ndarray:
    return ids.to(torch.int16).cpu().numpy()
