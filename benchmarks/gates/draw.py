"""Computes the rows that every rank of a group would receive under several stacks, for benchmarks/gates/measure.py.

    python benchmarks/gates.py draw --recordings FOLDER --out FILE.npz

FOLDER holds deepseek-v3-sglang/ and gpt-oss-20b/. gpt-oss-20b's tokens are recorded, with the experts that they chose.
DeepSeek-V3's recordings hold counts. Its tokens are drawn from a mixture of one recording with one of another phase,
top-8 without replacement, and placements are planned on a third. Qwen3-30B-A3B has no recording here: its tokens are
drawn from a lognormal popularity that has drifted by a fifth since it was planned on.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import script_parser

from epsim.models.spec import ModelSpec, load_model
from epsim.placement.base import Cluster
from epsim.policies.apply import Setting, bind
from epsim.policies.base import Batch, SharedWork
from epsim.policies.rounding import fixed_point
from epsim.policies.stack import parse_stack

SEED = 7
STACKS = (
    "contiguous", "eplb", "eplb+static", "eplb+lplb", "eplb+lplb-ipm", "eplb+waterfill", "eplb+lplb+waterfill",
    "eplb+lplb(counts=gathered)+waterfill-joint", "eplb+lplb(objective=time,a=1,b=100)",
)  # fmt: skip
PLANNED, SCORED, OTHER = "prefill_in1024.json", "prefill_in4096.json", "decode_in1000out1000.json"
V3_LAYERS, V3_TOKENS = (5, 22, 41), (64, 256, 1024, 4096)
OSS_LAYERS, QWEN_TOKENS = (2, 11, 20), (64, 1024)


@dataclass(frozen=True, slots=True)
class Batches:
    """ids [T, k]: experts of tokens, sorted by source rank, equally many per rank; history [E]: counts for planning."""

    model: ModelSpec
    ranks: int
    nodes: int
    redundant: int
    layer: int
    ids: torch.Tensor
    history: torch.Tensor
    what: str


def drawn(weights: torch.Tensor, number: int, top_k: int, source: torch.Generator) -> torch.Tensor:
    """Draws [number, k] experts by weights [E], without replacement (Gumbel's top-k), on the generator's device."""
    noise = torch.rand(number, len(weights), generator=source, device=source.device).clamp_(1e-9, 1 - 1e-7)
    return (weights.log().float() - torch.log(-torch.log(noise))).topk(top_k, dim=1).indices


def recorded(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """DeepSeek-V3's recorded counts [L, E] by file, and smoothed shares [L, E] float64."""
    counts = {
        name: torch.tensor(json.loads((folder / name).read_text())["logical_count"])
        for name in (PLANNED, SCORED, OTHER)
    }
    return counts, {name: (c.double() + 1) / (c.double() + 1).sum(1, keepdim=True) for name, c in counts.items()}


def deepseek(folder: Path) -> Iterator[Batches]:
    model = load_model("deepseek-v3-bf16")
    counts, shares = recorded(folder)
    for layer in V3_LAYERS:
        source = torch.Generator().manual_seed(SEED + layer)
        for tokens in V3_TOKENS:
            part = 0.5 * float(torch.rand(1, generator=source))
            weights = (1 - part) * shares[SCORED][layer] + part * shares[OTHER][layer]
            ids = drawn(weights, 16 * tokens, model.top_k, source)
            yield Batches(model, 16, 2, 32, layer, ids, counts[PLANNED][layer], "DeepSeek-V3's recorded counts, drawn")


def gpt_oss(folder: Path) -> Iterator[Batches]:
    model = load_model("gpt-oss-20b")
    found = np.load(folder / "gptoss20b_decode_ids_256seq.npz")
    ids, lengths = torch.from_numpy(found["expert_ids"].astype(np.int64)), torch.from_numpy(found["lengths"])
    for layer in OSS_LAYERS:
        early = ids[:, :16, layer]
        history = torch.bincount(early.flatten(), minlength=256)[: model.num_experts]
        for first, last in ((20, 21), (40, 48), (24, 64)):
            there = (lengths >= 64).nonzero()[:, 0]
            # A rank has whole sequences, each with its tokens of these positions.
            tokens = ids[there[: len(there) // 8 * 8], first:last, layer].flatten(0, 1)
            yield Batches(model, 8, 1, 8, layer, tokens, history, "gpt-oss-20b's recorded tokens")


def qwen() -> Iterator[Batches]:
    model = load_model("qwen3-30b-a3b")
    source = torch.Generator().manual_seed(SEED)
    for tokens in QWEN_TOKENS:
        log = 0.9 * torch.randn(model.num_experts, generator=source).double()
        drifted = log + 0.2 * torch.randn(model.num_experts, generator=source)
        ids = drawn(drifted.exp(), 8 * tokens, model.top_k, source)
        yield Batches(model, 8, 1, 16, 0, ids, (log.exp() * 1e4).to(torch.int64), "lognormal popularity, drawn")


def local_slots(batches: Batches, text: str) -> list[np.ndarray[Any, Any]]:
    """For every rank, the rows that it receives: [N, k + shared] int8, their local slots, -1 for none."""
    model, ids, ranks = batches.model, batches.ids, batches.ranks
    stack, tokens = parse_stack(text), len(ids) // ranks
    redundant = 0 if text == "contiguous" else batches.redundant
    cluster = Cluster(ranks, batches.nodes, redundant, 1)
    placement = stack.placement.plan(batches.history.to(torch.int64)[None, None], cluster)
    bound = bind(stack, placement, Setting(SEED, model.shared_cost, model.top_k, (batches.layer,)))
    source = torch.arange(ranks).repeat_interleave(tokens)
    one = torch.zeros(1, dtype=torch.int64)
    batch = Batch(
        one, one + batches.layer, torch.zeros(len(ids), dtype=torch.int64), source, ids[:, None],
        torch.arange(tokens).repeat(ranks),
    )  # fmt: skip
    counts = torch.stack([torch.bincount(part.flatten(), minlength=model.num_experts) for part in ids.split(tokens)])
    split, copies = bound.split, bound.copies
    fixed = counts.new_empty(0)
    if split.by_fractions:
        fixed = fixed_point(split.fractions(counts.sum(0)[None, None], copies), copies)
    physical = split.physical_ids(batch, counts[None, None], fixed, copies, SEED)
    per_rank = placement.slots_per_rank
    slots, serving = physical[:, 0], (physical // per_rank)[:, 0]
    if bound.has_shared:
        flat = torch.bincount((source[:, None] * ranks + serving).flatten(), minlength=ranks**2)
        by_source = flat.view(1, 1, ranks, ranks)
        work = SharedWork(
            model.shared_cost, SEED, model.top_k, model.top_k, one, one + batches.layer, by_source.sum(2), by_source,
            torch.full((1, 1, ranks), tokens), placement.node_of_rank, batch, serving[:, None],
        )  # fmt: skip
        shared = stack.shared.token_ranks(work)[:, 0]
    found = []
    for rank in range(ranks):
        local = torch.where(serving == rank, slots - rank * per_rank, -1)
        if bound.has_shared:
            local = torch.cat([local, torch.where(shared == rank, per_rank, -1)[:, None]], dim=1)
        found.append(local[(local >= 0).any(1)].to(torch.int8).numpy())
    return found


def main(words: list[str]) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    arrays: dict[str, Any] = {}
    cases: list[dict[str, Any]] = []
    v3, oss = deepseek(options.recordings / "deepseek-v3-sglang"), gpt_oss(options.recordings / "gpt-oss-20b")
    for batches, text in itertools.product(itertools.chain(v3, oss, qwen()), STACKS):
        if parse_stack(text).shared.dispatches and not batches.model.shared_intermediate:
            continue
        rows = local_slots(batches, text)
        redundant = 0 if text == "contiguous" else batches.redundant
        arrays[f"rows{len(cases)}"] = np.concatenate(rows)
        cases.append({
            "model": batches.model.name, "stack": text, "ranks": batches.ranks, "nodes": batches.nodes,
            "redundant": redundant, "layer": batches.layer, "tokens": len(batches.ids) // batches.ranks,
            "slots": (batches.model.num_experts + redundant) // batches.ranks, "what": batches.what,
            "rows": [len(part) for part in rows],
        })  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, cases=np.array(json.dumps(cases)), **arrays)
    print(f"{options.out}: {len(cases)} cases, {sum(case['ranks'] for case in cases)} ranks")
