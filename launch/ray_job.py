"""Ranks as Ray actors: a placement group, one actor a GPU (or CPU), and the whole gang again after a fault.

Without a cluster's address (RAY_ADDRESS, or inside a Ray job) a cluster of this machine alone is made for the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epsim.launch.folder import PREDICTED, RESULTS, TELEMETRY, clear
from epsim.launch.member import Member
from epsim.launch.options import RunOptions
from epsim.launch.prepare import prepare
from epsim.launch.store import for_watch, serve
from epsim.launch.worker import run_rank
from epsim.results import Results, read_results
from epsim.runtime.faults import BAD_INPUT, FAULT, INTERVAL, SILENCE, Fault, read_fault
from epsim.runtime.telemetry import rank_file
from epsim.traces.files import message_line

GROUP_PATIENCE = 120.0


class RankActor:
    """One rank; a Ray actor by `ray.remote`."""

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, options: RunOptions, member: Member) -> None:
        os.environ |= {"LOCAL_RANK": str(member.local_rank), "LOCAL_WORLD_SIZE": str(member.local_size)}
        run_rank(options, member)

    def files(self, options: RunOptions, rank: int) -> dict[str, bytes]:
        """What this rank wrote, by its path below the run's folder."""
        names = [RESULTS, PREDICTED] if rank == 0 else []
        names.append(os.fspath(rank_file(Path(TELEMETRY), rank)))
        return {name: (options.out / name).read_bytes() for name in names}


def run_ray(options: RunOptions, gpus: int | None, cpus: int | None, restarts: int) -> Results:
    """Raises ValueError or OSError before an actor is started; SystemExit with a line on stderr for a fault after."""
    try:
        import ray
    except ImportError:
        raise ValueError("--launcher ray needs Ray: pip install 'epsim[ray]'") from None
    if gpus is not None and cpus is not None:
        raise ValueError("give --gpus or --cpus, not both")
    if gpus is not None and options.device == "cpu":
        raise ValueError("--gpus with --device cpu: give --cpus")
    if restarts < 0:
        raise ValueError(f"--restarts {restarts}: give 0 or more")
    for name, given in (("gpus", gpus), ("cpus", cpus)):
        if given is not None and given < 1:
            raise ValueError(f"--{name} {given}: give at least 1")
    num_ranks = gpus or cpus or options.ranks
    if num_ranks is None:
        raise ValueError("--launcher ray: give --gpus N or --cpus N, the number of ranks")
    prepare(options, num_ranks)
    clear(options.out)
    on_gpus = gpus is not None
    _join_cluster(ray, num_ranks)
    try:
        group = _placement_group(ray, num_ranks, on_gpus)
        store = serve("0.0.0.0")
        address: Any = ray.util.get_node_ip_address
        host = str(address())
        for attempt in range(restarts + 1):
            actors = _start(ray, group, num_ranks, on_gpus)
            members = _members(ray, actors, host, store.port, on_gpus, attempt)
            fault = _run_once(ray, actors, members, options, for_watch(store, attempt))
            if fault is None:
                _fetch(ray, actors, members, options)
                return read_results(options.out / RESULTS)
            for actor in actors:
                ray.kill(actor)
            if fault.code == BAD_INPUT:
                raise ValueError(fault.line)
            again = attempt < restarts
            words = f"; starting again after the last complete step ({attempt + 1} of {restarts})" if again else ""
            print(f"epsim: {fault.line}{words}", file=sys.stderr, flush=True)
        sys.exit(FAULT)
    finally:
        ray.shutdown()


def _join_cluster(ray: Any, num_ranks: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_JOB_ID"):
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        return
    # As many CPUs as ranks, however few this machine has: Ray only counts them.
    num_cpus = max(num_ranks, os.cpu_count() or 1)
    ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def _placement_group(ray: Any, num_ranks: int, on_gpus: bool) -> Any:
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if on_gpus else {})
    group = ray.util.placement_group([bundle] * num_ranks, strategy="PACK")
    if not group.wait(GROUP_PATIENCE):
        kind = "GPU" if on_gpus else "CPU"
        there = int(ray.cluster_resources().get(kind, 0))
        raise ValueError(f"{num_ranks} {kind}s asked for, the cluster has {there}, or others hold them: give fewer")
    return group


def _start(ray: Any, group: Any, num_ranks: int, on_gpus: bool) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def one(rank: int) -> Any:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        made = ray.remote(RankActor).options(num_cpus=1, num_gpus=int(on_gpus), scheduling_strategy=where)
        return made.remote()

    return [one(rank) for rank in range(num_ranks)]


def _members(ray: Any, actors: Sequence[Any], host: str, port: int, on_gpus: bool, attempt: int) -> list[Member]:
    nodes = ray.get([actor.node.remote() for actor in actors])
    seen: Counter[str] = Counter()
    sizes = Counter(nodes)
    members = []
    for rank, node in enumerate(nodes):
        members.append(
            Member(
                rank,
                len(nodes),
                seen[node],
                sizes[node],
                device_index=0,  # Ray shows each actor its own GPU only
                own_device=on_gpus,
                host=host,
                port=port,
                attempt=attempt,
                signals=False,
            )
        )
        seen[node] += 1
    return members


def _run_once(
    ray: Any, actors: Sequence[Any], members: Sequence[Member], options: RunOptions, faults: Any
) -> Fault | None:
    """None once all ranks have finished."""
    rank_of = {actor.run.remote(options, member): member.rank for actor, member in zip(actors, members, strict=True)}
    waiting = list(rank_of)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=INTERVAL)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                return _explain(faults, rank_of[reference], error)
    return None


def _explain(faults: Any, rank: int, error: Exception) -> Fault:
    """The ranks that live name the one that does not; a job of one rank has nobody to tell."""
    deadline = time.monotonic() + SILENCE + 4 * INTERVAL
    while time.monotonic() < deadline:
        fault = read_fault(faults)
        if fault is not None:
            return fault
        cause = getattr(error, "cause", None)
        if isinstance(cause, ValueError | OSError):
            return Fault(message_line(str(cause)), BAD_INPUT, rank)
        time.sleep(INTERVAL)
    return Fault(f"rank {rank} ended: {message_line(str(error).splitlines()[0])}", FAULT, rank)


def _fetch(ray: Any, actors: Sequence[Any], members: Sequence[Member], options: RunOptions) -> None:
    """Files of ranks on other machines come to this one."""
    here = str(ray.get_runtime_context().get_node_id())
    nodes = ray.get([actor.node.remote() for actor in actors])
    for actor, member, node in zip(actors, members, nodes, strict=True):
        if node == here:
            continue
        for name, content in ray.get(actor.files.remote(options, member.rank)).items():
            path = options.out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
