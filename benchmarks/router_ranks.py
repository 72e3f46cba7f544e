"""Router policies under expert parallelism, by kernels and by the tensor operations that they replace.

    torchrun --nproc-per-node 2 benchmarks/router_ranks.py [--out benchmarks/results/router_ranks.json]

Microseconds of `Router.route` with its collective, on the slowest rank: 128 experts, top-8, 16 redundant slots at
random, TOKENS tokens a rank. `host`: CALLS calls from Python between two synchronisations, as an eager layer waits for
them. `graph`: CALLS calls in a CUDA graph, between device events. Both are medians of REPEATS. `same`: whether both
forms choose the same experts on every rank.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import script_parser, table, write
from device_times import report_head
from runtime_common import Bench

from epsim.policies.base import Routed, RouterWork, alone
from epsim.policies.routing import fused
from epsim.policies.stack import parse_stack
from epsim.runtime.collective import Collective
from epsim.runtime.peer import choose_collective

EXPERTS, TOP_K, REDUNDANT, CALLS, REPEATS = 128, 8, 16, 20, 9
TOKENS = (16, 64)
ROUTERS = (
    "pruned(k0=3)", "oea(k0=3)", "oea(k0=3,union=rank)", "oea(k0=6@4/3@16,p=0.7,kmax=9,maxp=32)", "oea-ep(k0=3)",
    "lynx(keep=20)", "mask-low-demand(least=2)",
)  # fmt: skip


def work_of(tokens: int, rank: int, size: int, collective: Collective, whole: bool) -> RouterWork:
    source = torch.Generator().manual_seed(100 * tokens + rank)
    placed = torch.Generator().manual_seed(1)
    scores = (2 * torch.randn(tokens, EXPERTS, generator=source)).softmax(-1).cuda()
    weights, ids = scores.topk(TOP_K, dim=-1)
    slots = torch.cat([torch.arange(EXPERTS), torch.randint(0, EXPERTS, (REDUNDANT,), generator=placed)])
    slots = slots[torch.randperm(len(slots), generator=placed)].reshape(size, -1)
    holds = torch.zeros(size, EXPERTS, dtype=torch.bool).scatter_(1, slots, True).T.contiguous().cuda()
    decode = torch.ones(tokens, dtype=torch.bool, device="cuda")
    total = collective.all_reduce if whole else alone
    return RouterWork(scores, scores, ids, weights / weights.sum(-1, keepdim=True), decode, holds, total)


def on_host(bench: Bench, route: Callable[[], Any]) -> float:
    found = []
    for _ in range(REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            route()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / CALLS * 1e6)
    return bench.slowest(statistics.median(found))


def measure(bench: Bench, name: str, tokens: int, collective: Collective) -> dict[str, Any]:
    router = parse_stack(f"contiguous+{name}").router
    work = work_of(tokens, collective.rank, collective.size, collective, router.whole_batch)
    row: dict[str, Any] = {"router": name, "tokens": tokens, "collective": collective.name}
    taken: list[Routed] = []
    served = fused.router.available
    for form, available in (("operations", lambda device: False), ("kernels", served)):
        fused.router.available = available
        for _ in range(3):
            routed = router.route(work)
        taken.append(routed)
        row[f"{form}: host"] = on_host(bench, lambda: router.route(work))
        if collective.name == "peer" and (form == "kernels" or router.capturable):
            row[f"{form}: graph"] = bench.time_graph(router.route, work, inner=CALLS, repeats=REPEATS)
    fused.router.available = served
    row["same"] = bench.slowest(float(not torch.equal(taken[0].expert_ids, taken[1].expert_ids))) == 0
    return row


def main() -> None:
    parser = script_parser(__doc__, "router_ranks.json")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    bench, rows = Bench.in_group(device), []
    for kind in ("peer", "torch"):
        collective, _ = choose_collective(kind, None, device, 8 * (EXPERTS + 1))
        tokens = TOKENS if kind == "peer" else TOKENS[:1]
        rows += [measure(bench, name, number, collective) for number in tokens for name in ROUTERS]
        collective.close()
    if bench.rank == 0:
        table("microseconds", rows)
        report = report_head() | {"device": f"{bench.size} x {bench.name}", "rows": rows}
        write(options.out, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
