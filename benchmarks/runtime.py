"""The expert-parallel layer on the GPUs of one host: outputs, exchange, balance, phases, graphs, relocation.

    torchrun --nproc-per-node 2 benchmarks/runtime.py [--parts NAME ...] [--out benchmarks/results/runtime.json]

One process a GPU. Times are microseconds between device events, medians of repeats, of the slowest rank. `graph` means
replays of a CUDA graph. benchmarks/runtime_parts.py and benchmarks/runtime_relocation.py say what each part measures.
With --parts, an existing output file keeps its other parts. It must be from the same device and versions.
"""

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import runtime_parts as parts
import torch
import torch.distributed as dist
from common import script_parser, table, write
from later_parts import with_parts
from runtime_common import Bench, versions
from runtime_relocation import relocation

PARTS: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "outputs": parts.outputs,
    "exchange": parts.exchange,
    "balance": parts.balance,
    "phases": parts.phases,
    "graph": parts.graph,
    "relocation": relocation,
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    bench = Bench.in_group(device)
    found: dict[str, Any] = {}
    some = options.parts != list(PARTS)
    before = json.loads(options.out.read_text()) if some and options.out and options.out.exists() else None
    for name in options.parts:
        begun = time.perf_counter()
        try:
            found[name] = PARTS[name](bench)
        except Exception:
            # Printed at once: if only this rank failed, the others wait in a collective until they are ended.
            print(f"rank {rank}, part {name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            found[name] = [{"failed": traceback.format_exc().splitlines()[-1]}]
        torch.cuda.empty_cache()
        if rank == 0:
            table(f"{name} ({time.perf_counter() - begun:.0f} s)", found[name])
            sys.stdout.flush()
            if options.out:
                chosen = ["--parts", *options.parts] if some else []
                launched = ["torchrun", "--nproc-per-node", str(bench.size), "benchmarks/runtime.py", *chosen]
                report: dict[str, Any] = {"command": shlex.join(launched), "device": bench.name}
                report |= {"num_devices": bench.size, **versions(), "parts": found}
                write(options.out, report if before is None else with_parts(before, report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
