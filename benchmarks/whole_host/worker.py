"""One rank of benchmarks/whole_host.py, started under torchrun: it runs the named parts one after the other.

Rank 0 writes DIR/PART.json again after every row, with `done` once the part is over. It also writes DIR/now: the
current part, when it began and how long it may take. An error on any rank ends the process; the parent then reports the
reason and starts the remaining parts.
"""

import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import script_parser, write
from gates.gate import CALIBRATED
from runtime_common import Bench, versions
from runtime_relocation import Move, relocation

from epsim.calibrate.folder import write_table
from epsim.calibrate.options import Request
from epsim.calibrate.router import router_table
from epsim.calibrate.run import calibrate
from epsim.files import message_line
from epsim.launch.prepare import spec_of
from whole_host.cases import layers, routed
from whole_host.host import ON_CPU, ON_GPU, Host
from whole_host.sources import fitted

SHARES = {"calibrate": 20.0, "layers-deep_ep": 32.0, "layers-torch": 20.0, "oea": 10.0, "relocation": 6.0, "kill": 12.0}
"""Each part's share of the time. Time that a part does not use goes to the remaining parts."""
RECORDED = ((32, 4), (64, 8))
"""Experts and top-k of gpt-oss-20b's and the sample's recorded tokens."""


def share(part: str, left: list[str], seconds: float) -> float:
    """The seconds for a part. left: the parts that remain, including this one."""
    return seconds * SHARES[part] / sum(SHARES[one] for one in left)


def tables(host: Host, until: float) -> Iterator[dict[str, Any]]:
    """Measures exchange and collectives for every power of two of ranks, and the layers' routers. Tables of experts are
    the project's."""
    machine, known = host.bench, CALIBRATED / "hardware.toml"
    if machine.rank == 0 and machine.name in known.read_text():
        own = shutil.ignore_patterns("exchange-*", "hardware.toml")  # of this host, once something was measured on it
        shutil.copytree(CALIBRATED, host.calibration, dirs_exist_ok=True, ignore=own)
    dist.barrier()
    if machine.rank == 0:
        host.calibration.mkdir(parents=True, exist_ok=True)
        for shape in (host.sizes.wide, *(fitted(host.sizes.wide, *one) for one in RECORDED), host.sizes.small):
            table = router_table(machine, spec_of(shape))
            write_table(table, host.calibration / f"router-{shape.hidden}-{shape.num_experts}-{shape.top_k}.json")
    jobs = [(("all-reduce",), host.sizes.models[:1])]
    jobs += [(("exchange",), (model,)) for model in dict.fromkeys(host.sizes.models)]
    for parts, models in jobs:
        begun = time.monotonic()
        if not host.goes_on(until):
            yield {"part": parts[0], "model": models[0], "skipped": "no time left"}
            continue
        request = Request(host.calibration, machine.device.type, models, parts)
        # What tables name as the command that made them.
        sys.argv[1:] = ["calibrate", "--part", parts[0], "--model", models[0], "--out", "DIR"]
        for line in calibrate(request, lambda text: None, machine):
            yield {"part": parts[0], "found": line.rpartition("/")[2], "seconds": round(time.monotonic() - begun, 1)}


def moves(host: Host) -> Iterator[dict[str, Any]]:
    if host.on_gpu:
        for exchange in ("auto", "torch"):
            yield from relocation(host.bench, Move(host.sizes.wide, 32, 8, exchange=exchange, tokens=1024))
    else:
        yield from relocation(host.bench, Move(host.sizes.wide, 4, 4, (2048,), 8, dtype=host.dtype))


def rows_of(part: str, host: Host, until: float) -> Iterator[dict[str, Any]]:
    if part == "calibrate":
        return tables(host, until)
    if part == "oea":
        return routed(host, until)
    if part == "relocation":
        return moves(host)
    return layers(host, part.removeprefix("layers-"), until)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("parts", nargs="+", choices=list(SHARES))
    parser.add_argument("--seconds", type=float, required=True, help="for all of them")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--recordings", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    bench = Bench.here("auto")
    host = Host(bench, ON_GPU if bench.on_gpu else ON_CPU, options.recordings, options.work / "calibrated")
    first = bench.rank == 0
    if first:
        found = {"device": bench.name, "num_devices": bench.size, "date": bench.described()["date"]}
        found |= versions() if bench.on_gpu else {"torch": torch.__version__}
        write(options.work / "machine.json", found)
    for number, part in enumerate(options.parts):
        begun = time.monotonic()
        seconds = share(part, options.parts[number:], end - begun)
        if first:
            write(options.work / "now", {"part": part, "begun": time.time(), "seconds": seconds})
        try:
            _run(part, rows_of(part, host, begun + seconds), options.work, first)
        except Exception as error:
            print(f"rank {bench.rank}: {type(error).__name__}: {message_line(str(error))}", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # what is left to destructors may wait for the other ranks
    dist.barrier()
    dist.destroy_process_group()


def _run(part: str, found: Iterator[dict[str, Any]], work: Path, first: bool) -> None:
    begun, rows = time.monotonic(), list[dict[str, Any]]()

    def keep(done: bool) -> None:
        seconds = round(time.monotonic() - begun, 1)
        if first:
            write(work / f"{part}.json", {"rows": rows, "done": done, "seconds": seconds})

    for row in found:
        rows.append(row)
        keep(False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    keep(True)


if __name__ == "__main__":
    main()
