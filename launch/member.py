"""A process of a job: its rank, its connection to the other ranks, and its device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from epsim.launch.options import ONLY_BFLOAT16
from epsim.launch.store import connect, serve


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the job.

    local_rank: its number among the `local_size` ranks of its machine, and the number of its GPU. host, port: address
    of the job's store. serves_store: whether this process holds the store. reserves_folder: whether it reserves the
    run's folder for the job; `epsim run` does that itself. attempt: number of restarts so far.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    port: int = 0
    serves_store: bool = False
    reserves_folder: bool = False
    attempt: int = 0

    @classmethod
    def from_environment(cls) -> Member:
        """Reads the variables that torchrun sets, and EPSIM_STORE=HOST:PORT, the address of the store if the launcher
        holds it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ValueError(f"{missing[0]} is not set: start this by torchrun, or use `epsim run`")
        rank, num_ranks, local_rank = (_whole(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if rank >= num_ranks:
            raise ValueError(f"RANK is {rank}, and WORLD_SIZE {num_ranks}: ranks are 0 to WORLD_SIZE - 1")
        host, port = os.environ["MASTER_ADDR"], _whole("MASTER_PORT")
        given = os.environ.get("EPSIM_STORE")
        if given:
            host, _, text = given.rpartition(":")
            if not host or not text.isascii() or not text.isdigit():
                raise ValueError(f"EPSIM_STORE is {given!r}, not HOST:PORT: leave it to `epsim run`")
            port = int(text)
        held = given or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank,
            num_ranks,
            local_rank,
            _whole("LOCAL_WORLD_SIZE", local_rank + 1),
            host=host,
            port=port,
            serves_store=rank == 0 and not held,
            reserves_folder=rank == 0 and not given,
            attempt=_whole("TORCHELASTIC_RESTART_COUNT", 0),
        )

    def store(self, serves: bool = False) -> Any:
        """A new connection to the job's store; None in a job of one process. serves: this process holds the store."""
        if self.num_ranks == 1:
            return None
        return serve(self.host, self.port) if serves else connect(self.host, self.port)


def _whole(name: str, default: int | None = None) -> int:
    """The whole number in an environment variable. Raises ValueError if it is not a whole number."""
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} is {text!r}, not a whole number: start this by torchrun, or use `epsim run`")
    return int(text)


def choose_device(asked: str, member: Member) -> torch.device:
    """The device to compute on. auto: a GPU if this node has one for each of its ranks, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and count < member.local_size):
        return torch.device("cpu")
    if count < member.local_size:
        raise ValueError(f"--device cuda: {member.local_size} ranks on this node, but {count} GPUs")
    return torch.device("cuda", member.local_rank)


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """The type to compute in. auto: bfloat16 on GPUs, else float32."""
    if device.type == "cuda" and asked == "float32":
        raise ValueError(f"--dtype float32: {ONLY_BFLOAT16}")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return known.get(asked) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
