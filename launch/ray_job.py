"""Runs ranks as Ray actors, one for each GPU (or CPU) of a placement group. After a fault all are started again.

Without a cluster (RAY_ADDRESS, or a Ray job around this process), the run starts its own on this machine.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epsim import stops
from epsim.files import message_line, reason, whole_file
from epsim.launch.folder import PREDICTED, RESULTS, TELEMETRY, clear
from epsim.launch.member import Member
from epsim.launch.options import RunOptions
from epsim.launch.prepare import prepare
from epsim.launch.rank import run_rank
from epsim.launch.store import for_watch, serve
from epsim.results import ResultsData, read_results
from epsim.runtime.beats import BAD_INPUT, FAULT, INTERVAL, SILENCE, Fault, Lookout, stopped_words
from epsim.runtime.telemetry import rank_file

GROUP_PATIENCE = 120.0
"""Seconds to wait until a cluster that may grow has enough GPUs or CPUs."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where Ray put a rank: its node, and its GPUs there, as named in CUDA_VISIBLE_DEVICES."""

    node: str
    gpus: tuple[str, ...]


class RankActor:
    """One rank; `ray.remote` makes it a Ray actor."""

    def __init__(self, folder: str) -> None:
        """folder: the command's current folder, for relative paths."""
        with suppress(OSError):  # another machine may not have it
            os.chdir(folder)

    def seat(self) -> Seat:
        import ray

        context = ray.get_runtime_context()
        return Seat(str(context.get_node_id()), tuple(context.get_accelerator_ids().get("GPU", ())))

    def run(self, options: RunOptions, member: Member, gpus: Sequence[str]) -> None:
        """gpus: those of all ranks on this node, in the order of ranks. Ray shows each actor only its own GPU, but peer
        memory and deep_ep need to see the others too."""
        os.environ |= {"LOCAL_RANK": str(member.local_rank), "LOCAL_WORLD_SIZE": str(member.local_size)}
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        run_rank(options, member)

    def files(self, options: RunOptions, rank: int) -> dict[str, bytes]:
        """The files that this rank wrote, by their path in the run's folder."""
        names = [RESULTS, PREDICTED] if rank == 0 else []
        names.append(os.fspath(rank_file(Path(TELEMETRY), rank)))
        return {name: (options.folder / name).read_bytes() for name in names}


def run_ray(options: RunOptions, gpus: int | None, cpus: int | None, restarts: int) -> ResultsData:
    """Runs the job on Ray. restarts: how often it is started again after a fault.

    Raises ValueError or OSError for a mistake in the options. After a fault, prints a line on stderr and raises
    SystemExit.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--launcher ray needs Ray: pip install 'epsim[ray]'") from None
    if restarts < 0:
        raise ValueError(f"--restarts {restarts}: give 0 or more")
    options = with_ranks(options, gpus, cpus)
    num_ranks, on_gpus = options.ranks or 1, options.device == "cuda"
    prepare(options, num_ranks)
    clear(options)
    store, attempt = serve("0.0.0.0"), 0
    with contextlib.ExitStack() as at_exit:
        at_exit.enter_context(stops.line_at_stop(lambda by: stopped_words(for_watch(store, attempt), num_ranks, by)))
        at_exit.callback(ray.shutdown)
        may_grow = _join_cluster(ray, num_ranks)
        group = _placement_group(ray, num_ranks, on_gpus, may_grow)
        address: Any = ray.util.get_node_ip_address
        host = str(address())
        for attempt in range(restarts + 1):
            actors, seats = _start(ray, group, num_ranks, on_gpus)
            members = seated(seats, host, store.port, attempt)
            running = {
                actor.run.remote(options, member, gpus_of(seats, seat.node)): member.rank
                for actor, member, seat in zip(actors, members, seats, strict=True)
            }
            lookout = Lookout(for_watch(store, attempt), num_ranks, options.folder / TELEMETRY)
            fault = _first_fault(ray, running, lookout)
            if fault is None:
                _fetch(ray, actors, seats, options)
                return read_results(options.folder / RESULTS)
            for actor in actors:
                ray.kill(actor)
            if fault.code == BAD_INPUT:
                raise ValueError(fault.line)
            again = attempt < restarts
            words = f"; starting again after the last complete step ({attempt + 1} of {restarts})" if again else ""
            print(f"epsim: {fault.line}{words}", file=sys.stderr, flush=True)
        sys.exit(FAULT)


def with_ranks(options: RunOptions, gpus: int | None, cpus: int | None) -> RunOptions:
    """The options with the number of ranks and the kind of device that Ray reserves for each. Raises ValueError for
    options that contradict each other."""
    if gpus is not None and cpus is not None:
        raise ValueError("give --gpus or --cpus, not both")
    for name, given, other in (("gpus", gpus, "cpu"), ("cpus", cpus, "cuda")):
        if given is not None and given < 1:
            raise ValueError(f"--{name} {given}: give at least 1")
        if given is not None and options.device == other:
            raise ValueError(f"--{name} with --device {other}: give {'--gpus' if name == 'cpus' else '--cpus'}")
    num_ranks = gpus or cpus or options.ranks
    if num_ranks is None:
        raise ValueError("--launcher ray: give --gpus N or --cpus N, the number of ranks")
    if options.ranks not in (None, num_ranks):
        raise ValueError(f"--ranks {options.ranks} with --{'gpus' if gpus else 'cpus'} {num_ranks}: give one of them")
    on_gpus = gpus is not None or options.device == "cuda"
    return dataclasses.replace(options, ranks=num_ranks, device="cuda" if on_gpus else "cpu")


def _join_cluster(ray: Any, num_ranks: int) -> bool:
    """Connects to the cluster, or starts one. Returns whether it existed before; such a cluster may grow."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the first error causes errors of other ranks
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if "EPSIM_DEBUG" in os.environ:  # for ranks on a cluster that runs already
        quiet["runtime_env"] = {"env_vars": {"EPSIM_DEBUG": os.environ["EPSIM_DEBUG"]}}
    address = os.environ.get("RAY_ADDRESS", "")
    exists = address not in ("", "local") or bool(os.environ.get("RAY_JOB_ID"))
    handler = signal.getsignal(signal.SIGTERM)
    if exists:
        _check_answers(address)
        ray.init("auto", **quiet)
    else:
        # Ray only counts CPUs: as many as ranks, even if this machine has fewer.
        num_cpus = max(num_ranks, os.cpu_count() or 1)
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, **quiet)
    signal.signal(signal.SIGTERM, handler)  # Ray's handler would print the state of all its threads
    return exists


def _check_answers(address: str) -> None:
    """Raises OSError if no cluster answers. Ray would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise OSError(f"RAY_ADDRESS {address}: no cluster answers there ({reason(error)})") from None


def _placement_group(ray: Any, num_ranks: int, on_gpus: bool, may_grow: bool) -> Any:
    kind = "GPU" if on_gpus else "CPU"
    number = int(ray.cluster_resources().get(kind, 0))
    group = ray.util.placement_group([{"CPU": 1.0} | {kind: 1.0}] * num_ranks, strategy="PACK")
    deadline = time.monotonic() + (GROUP_PATIENCE if may_grow or number >= num_ranks else 0.0)
    while not group.wait(INTERVAL):
        if time.monotonic() >= deadline:
            number = int(ray.cluster_resources().get(kind, 0))
            raise ValueError(
                f"{num_ranks} {kind}s are needed, but the cluster has {number}, or others use them: give fewer ranks"
            )
    return group


def _start(ray: Any, group: Any, num_ranks: int, on_gpus: bool) -> tuple[list[Any], list[Seat]]:
    """The started actors and their seats, in the order of ranks. Raises OSError if one cannot start."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actors = []
    for bundle in range(num_ranks):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = ray.remote(RankActor).options(num_cpus=1, num_gpus=int(on_gpus), scheduling_strategy=strategy)
        actors.append(actor.remote(os.getcwd()))
    calls = waiting = [actor.seat.remote() for actor in actors]
    try:
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=INTERVAL)
        seats: list[Seat] = ray.get(calls)
    except ray.exceptions.RayError as error:
        # The cause is the last line, after the traceback of the worker process.
        words = message_line(next(line for line in reversed(str(error).splitlines()) if line.strip()))
        raise OSError(
            f"a rank's Ray actor does not start: {words}; every node needs this version of epsim, and PyTorch"
        ) from None
    order = by_node(seats)
    return [actors[bundle] for bundle in order], [seats[bundle] for bundle in order]


def by_node(seats: Sequence[Seat]) -> list[int]:
    """The bundles in an order in which those of one node are consecutive, as placements and exchanges need the ranks.
    Ray puts bundles wherever there is room."""
    nodes = list(dict.fromkeys(seat.node for seat in seats))
    return sorted(range(len(seats)), key=lambda bundle: nodes.index(seats[bundle].node))


def seated(seats: Sequence[Seat], host: str, port: int, attempt: int) -> list[Member]:
    """The ranks in the order of seats. A rank's number on its node is also the number of its GPU."""
    nodes = [seat.node for seat in seats]
    shared: dict[str, Any] = {"host": host, "port": port, "attempt": attempt}
    local_ranks = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return [Member(r, len(seats), local_ranks[r], nodes.count(node), **shared) for r, node in enumerate(nodes)]


def gpus_of(seats: Sequence[Seat], node: str) -> list[str]:
    """The GPUs of the job's ranks on a node, in the order of ranks."""
    return [gpu for seat in seats if seat.node == node for gpu in seat.gpus]


def _first_fault(ray: Any, running: dict[Any, int], lookout: Lookout) -> Fault | None:
    """Waits for the first fault; returns None when all ranks have finished. running: the rank of each call."""
    waiting = list(running)
    while waiting:
        fault = lookout.look()
        if fault is not None:
            return fault
        done, waiting = ray.wait(waiting, num_returns=1, timeout=INTERVAL)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                return _explain(lookout, running[reference], error)
    return None


def _explain(lookout: Lookout, rank: int, error: Exception) -> Fault:
    """Why a rank ended. If other ranks report a fault, it is theirs."""
    deadline = time.monotonic() + SILENCE + 8 * INTERVAL
    while time.monotonic() < deadline:
        fault = lookout.look()
        if fault is not None:
            return fault
        cause = getattr(error, "cause", None)
        if isinstance(cause, ValueError | OSError):
            return Fault(message_line(str(cause)), BAD_INPUT, rank)
        time.sleep(INTERVAL)
    words = message_line(str(error).splitlines()[0])
    return Fault(f"rank {rank} ended in {lookout.place_of(rank)}: {words}", FAULT, rank)


def _fetch(ray: Any, actors: Sequence[Any], seats: Sequence[Seat], options: RunOptions) -> None:
    """Copies the files of ranks on other machines to this one."""
    this_node = str(ray.get_runtime_context().get_node_id())
    for rank, (actor, seat) in enumerate(zip(actors, seats, strict=True)):
        if seat.node == this_node:
            continue
        for name, content in ray.get(actor.files.remote(options, rank)).items():
            path = options.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                temporary.write_bytes(content)
