"""The job's key-value store. Ranks use it to connect, to show that they are alive, and to report faults."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

PATIENCE = timedelta(seconds=120)


def serve(host: str, port: int = 0) -> TCPStore:
    """A new store in this process. port 0: any free port (see `.port`). Raises OSError if the port is in use."""
    _check_host(host)
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    except RuntimeError:
        raise OSError(f"port {port} of {host} cannot be opened: another process may use it") from None


def connect(host: str, port: int) -> TCPStore:
    """A new connection to a store. Each thread needs its own, because a call that waits blocks the connection.

    Raises OSError if the host is unknown, or if nothing answers within `PATIENCE`.
    """
    _check_host(host)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    except RuntimeError:
        raise OSError(f"the job's store at {host}:{port}: nobody answers") from None


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise OSError(f"the job's store is to be on {host}: no such host (MASTER_ADDR)") from None


def for_group(store: Store, attempt: int) -> Store:
    """The part of the store for the process group; each restart has its own."""
    return PrefixStore(f"group-{attempt}", store)


def for_watch(store: Store, attempt: int) -> Store:
    """The part of the store for beats and faults."""
    return PrefixStore(f"watch-{attempt}", store)
