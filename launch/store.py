"""The job's key-value store: where ranks meet, beat, and tell of faults."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

PATIENCE = timedelta(seconds=120)


def serve(host: str, port: int = 0) -> TCPStore:
    """A new store in this process, which lives as long as it does; port 0 takes any (`.port` tells)."""
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=PATIENCE)


def connect(host: str, port: int) -> TCPStore:
    """A connection of its own: a call that waits holds the connection."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)


def for_group(store: Store, attempt: int) -> Store:
    """The part of the store where the process group meets; each restart has its own."""
    return PrefixStore(f"group-{attempt}", store)


def for_watch(store: Store, attempt: int) -> Store:
    """The part of the store where ranks beat and faults are told."""
    return PrefixStore(f"watch-{attempt}", store)
