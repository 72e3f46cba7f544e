"""Active experts and kept probability of router policies, from recorded router probabilities, without a model.

    python benchmarks/oea_recorded.py RECORDING... [--batch 8 16 32] [--model gpt-oss-20b] [--out FILE]

RECORDING is a trace, or any file with router probabilities that `epsim traces import` reads, such as the decode tokens
of gpt-oss-20b with the probabilities of their four experts. Sequences are composed into decode batches. The table shows
the active experts of a layer, those of the busiest of 4 ranks, and the probability kept, as means over the steps with a
full batch. It also shows the 1st percentile over tokens of the probability kept. If a recording has only the best m
scores, no token takes an expert beyond them (maxp is m).
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command, script_parser, table, write

from epsim.placement.base import Cluster
from epsim.policies.apply import Setting, bind
from epsim.policies.routing.block import kept_scores, scores_by_expert
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.traces.importing import open_trace
from epsim.traces.options import ImportOptions
from epsim.traces.select import select_steps
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock

KEYS = ("active_experts_total", "active_experts", "kept_mass")


def routers(top_k: int, active: float) -> list[str]:
    """The router policies to measure. active: active experts without a policy; lynx keeps fractions of it."""
    found = []
    for k0 in range(1, top_k):
        found += [f"pruned(k0={k0})", f"oea(k0={k0})", f"oea-ep(k0={k0})"]
    keeps = dict.fromkeys(max(round(share * active), 1) for share in (0.4, 0.55, 0.7, 0.85))
    found += [f"lynx(keep={keep})" for keep in keeps]
    return [*found, *(f"mask-low-demand(least={least})" for least in (2, 3))]


def measure(trace: StoredTrace, ranks: int, stacks: list[str]) -> list[dict[str, Any]]:
    policies = tuple(("", parse_stack(f"contiguous+{stack}")) for stack in stacks)
    results = replay(trace, ReplayOptions(Cluster(ranks), policies, shared_cost=0.0))
    return [
        {"router": stack, **{key: entry["metrics"][key]["mean"] for key in KEYS}, "notes": entry["notes"]}
        for stack, entry in zip(stacks, results["stacks"], strict=True)
    ]


def least_kept(trace: StoredTrace, ranks: int, stacks: list[str]) -> list[float]:
    """The share of its own choice's probability that a token keeps: the first percentile over tokens and layers."""
    meta, cluster = trace.meta, Cluster(ranks)
    placement = parse_stack("contiguous").placement.plan(torch.zeros(1, meta.num_layers, meta.num_experts), cluster)
    setting = Setting(0, 0.0, meta.top_k, meta.layers, phase=meta.phase, num_scores=meta.num_scores)
    bounds = [bind(parse_stack(f"contiguous+{stack}"), placement, setting) for stack in stacks]
    shares: list[list[torch.Tensor]] = [[] for _ in stacks]
    for block in trace.blocks():
        assert isinstance(block, TokenBlock)
        block = dataclasses.replace(block, source_rank=block.source_rank % ranks)
        scores = scores_by_expert(block, np.arange(len(block.token_step)), meta.num_experts)
        own = kept_scores(scores, torch.from_numpy(block.expert_ids.astype(np.int64)))
        for kept, bound in zip(shares, bounds, strict=True):
            routed = torch.from_numpy(bound.rerouted(block).block.expert_ids.astype(np.int64))
            kept.append((kept_scores(scores, routed) / own).flatten())
    return [float(np.percentile(torch.cat(kept).numpy(), 1)) for kept in shares]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("recording", nargs="+", type=Path)
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"command": command(), "ranks": arguments.ranks, "batches": {}}
    for batch in arguments.batch:
        options = ImportOptions(batch=batch, ranks=min(arguments.ranks, batch), model=arguments.model)
        with tempfile.TemporaryDirectory() as folder:
            trace = select_steps(open_trace(arguments.recording, options), Path(folder, "full.parquet"), None, batch)
            meta = trace.meta
            (plain,) = measure(trace, arguments.ranks, ["topk"])
            plain |= {"kept_mass": 1.0, "least_kept": 1.0}
            stacks = routers(meta.top_k, plain["active_experts_total"])
            rows = [plain, *measure(trace, arguments.ranks, stacks)]
            for row, least in zip(rows[1:], least_kept(trace, arguments.ranks, stacks), strict=True):
                row["least_kept"] = least
        uniform = meta.num_experts * (1 - (1 - meta.top_k / meta.num_experts) ** batch)
        report["batches"][str(batch)] = {"steps": trace.num_steps, "uniform_active": uniform, "rows": rows}
        held = f"scores of {meta.num_scores} of {meta.num_experts} experts"
        print(f"batch {batch}: {trace.num_steps} full steps, top-{meta.top_k}, {held}; uniform routing: {uniform:.1f}")
        table(f"of {arguments.ranks} ranks", rows)
        for note in dict.fromkeys(note for row in rows for note in row["notes"] if "maxp" in note):
            print(f"  {note}")
    if arguments.out:
        write(arguments.out, report)


if __name__ == "__main__":
    main()
