"""Draws batches of requests from recordings. Each recording is a topic.

All tokens of a request have the same expert shares. For each layer they are drawn from a Dirichlet distribution around
the topic's shares, with concentration CONCENTRATION. DeepSeek-V3's recordings do not separate requests, so the
concentration was measured by moments (Dirichlet-multinomial) on the 256 generated sequences of gpt-oss-20b in
AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting: the median over 24 layers is 33 for all sequences, and 52 within a
category of a data set. The share of a group of experts has the same concentration, so it also holds for ranks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from epsim.traces.compose import deal
from epsim.traces.importing import open_trace
from epsim.traces.options import ImportOptions
from epsim.traces.synthesize import draw_tokens, inclusion, marginals
from epsim.traces.trace import TokenBlock

CONCENTRATION = 33.0
SHARE_UNIT = 2.0**50
"""Shares are multiplied by this to become whole numbers, like recorded counts."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Topics:
    """names [M]; shares [M, L, E] of each recording's assignments, summing to 1 per layer; layers [L]: the model's
    numbers of the kept layers."""

    names: tuple[str, ...]
    shares: Floats
    layers: tuple[int, ...]

    def pick(self, word: str) -> list[int]:
        """The indices of the recordings whose name contains the word."""
        return [index for index, name in enumerate(self.names) if word in name]


def read_topics(folder: Path, num_layers: int) -> Topics:
    """Reads every *.json of a folder as a topic, with num_layers evenly spaced layers. Raises ValueError if prefill or
    decode recordings are missing, or if recordings differ in shape."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    names = tuple(file.stem for file in files)
    if not any("prefill" in name for name in names) or not any("decode" in name for name in names):
        raise ValueError(f"{folder}: no recordings named prefill_*.json and decode_*.json: give DeepSeek-V3's folder")
    traces = [open_trace([file], ImportOptions(model="DeepSeek-V3")) for file in files]
    metas = [trace.meta for trace in traces]
    if any((meta.layers, meta.num_experts) != (metas[0].layers, metas[0].num_experts) for meta in metas):
        raise ValueError(f"{folder}: its recordings differ in layers or experts")
    pick = np.unique(np.linspace(0, metas[0].num_layers - 1, num_layers).round().astype(np.int64))
    counts = np.stack([marginals(trace)[pick] for trace in traces]).astype(np.float64)
    return Topics(names, counts / counts.sum(-1, keepdims=True), tuple(metas[0].layers[i] for i in pick))


@dataclass(frozen=True, slots=True)
class Workload:
    """How batches are drawn. topics: indices of the requests' topics. requests: number per batch. pool: if above 0,
    batches draw from this many fixed requests, on which placements are planned; if 0, all requests are new. by_step:
    whether all requests of a batch have one topic, drawn for each batch; otherwise each request draws its own. known:
    topics that placements are planned on; none for `topics`."""

    topics: tuple[int, ...]
    requests: int
    pool: int = 0
    by_step: bool = False
    known: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawOptions:
    num_steps: int = 4
    tokens: int = 16384
    num_ranks: int = 16
    top_k: int = 8
    seed: int = 0


def draw(topics: Topics, workload: Workload, options: DrawOptions) -> tuple[TokenBlock, Floats]:
    """Draws token-level steps. Also returns the expected shares [L, E] that placements are planned on."""
    rng = np.random.default_rng(options.seed)
    num_tokens, number = options.tokens, workload.requests
    ids = np.empty((options.num_steps * num_tokens, topics.shares.shape[1], options.top_k), dtype=np.int16)
    shares = topics.shares[list(workload.topics)]
    known = topics.shares[list(workload.known or workload.topics)].mean(0)
    pool = None
    if workload.pool:
        pool = _requests(shares[rng.integers(len(shares), size=workload.pool)], rng)
        known = pool.mean(0)
    for step in range(options.num_steps):
        if pool is not None:
            chosen = pool[rng.choice(len(pool), size=number, replace=len(pool) < number)]
        else:
            topic = rng.integers(len(shares), size=1 if workload.by_step else number)
            chosen = _requests(shares[np.broadcast_to(topic, number)], rng)
        request_of_token = np.arange(num_tokens) * number // num_tokens
        part = ids[step * num_tokens : (step + 1) * num_tokens]
        draw_tokens(_inclusion(chosen, options.top_k), request_of_token, np.uint64(rng.integers(2**63)), part)
    token_step = np.zeros(num_tokens, dtype=np.int64)
    return TokenBlock(
        np.arange(options.num_steps),
        np.repeat(np.arange(options.num_steps), num_tokens),
        np.tile(deal(token_step, options.num_ranks), options.num_steps),
        ids,
    ), known


def _requests(shares: Floats, rng: np.random.Generator) -> Floats:
    """Draws the shares of one request for each topic's shares [..., E]."""
    drawn = rng.standard_gamma(np.maximum(shares * CONCENTRATION, 1e-9))
    normalized: Floats = drawn / drawn.sum(-1, keepdims=True)
    return normalized


def _inclusion(shares: Floats, top_k: int) -> Floats:
    """The probability that a token has each expert, from shares [N, L, E] (`epsim.traces.synthesize.inclusion`)."""
    parts = np.rint(shares * SHARE_UNIT).astype(np.int64).reshape(-1, shares.shape[-1])
    return inclusion(parts, top_k)[0].reshape(shares.shape)


def regimes(topics: Sequence[int], requests: int) -> tuple[tuple[str, Workload], ...]:
    """Named workloads, in order of drift. First all requests are known to the placement, then fewer and fewer. In the
    last ones batches are so large that requests average out."""
    base = Workload(tuple(topics), requests)
    return (
        ("the same few requests", dataclasses.replace(base, pool=requests)),
        ("out of twice as many", dataclasses.replace(base, pool=2 * requests)),
        ("out of 8 times as many", dataclasses.replace(base, pool=8 * requests)),
        ("all new, of one topic a batch", dataclasses.replace(base, by_step=True)),
        ("4 times as many, all new", dataclasses.replace(base, requests=4 * requests)),
        ("32 times as many, all new", dataclasses.replace(base, requests=32 * requests)),
    )
