"""Lines of the README that were measured on GPUs: the channel reader, stacks, routers and layers of two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from later_parts import command_of

Load = Callable[[str], Any]
Line = Callable[[str, str, str], str]
BUDGET = "0.178"


def gpu_lines(load: Load, line: Line) -> Iterator[str]:
    yield from reader_lines(load("reader_speed.json"), line)
    yield from stack_lines(load("stack_speed.json"), line)
    yield from router_lines(load("router_ranks.json"), line)
    yield from runtime_lines(load("runtime.json"), line)


def reader_lines(found: Any, line: Line) -> Iterator[str]:
    if found is None:
        return
    shown = [
        f"{row['batch']}: {row[BUDGET]['us']:.1f} ({row[BUDGET]['gain']['dense']:.2f}, "
        f"{row[BUDGET]['gain']['two products']:.2f}, {row[BUDGET]['reached']:.0%})"
        for row in found["rows"]
        if row["shape"] == "qwen3-30b-a3b" and "dense" in row
    ]
    yield line(
        f"a layer read by channels, 17.8% of a token's bytes, Qwen3-30B-A3B's shape, one {found['device']}",
        "us by batch (gain over our dense kernel, over two grouped products of torch, share of the reading rate "
        f"{found['bandwidth'] / 1e12:.2f} TB/s reached): {'; '.join(shown)}; aims: 1.6 at 1, 2.4 at 4",
        found["command"],
    )


def stack_lines(found: Any, line: Line) -> Iterator[str]:
    if found is None:
        return
    both = f"oea(k0=4)+topk-channels({BUDGET})"
    shown = []
    for row in found["rows"]:
        if row["batch"] in (1, 8, 16, 64):
            gain = row["gain"]
            three = (gain["oea(k0=4)"], gain[f"topk-channels({BUDGET})"], gain[both])
            shown.append(f"{row['routing']} {row['batch']}: {' / '.join(f'{one:.2f}' for one in three)}")
    yield line(
        f"router, reader and both, from logits to the layer's output, one {found['device']}",
        f"gain over plain routing and the dense kernel of `oea(k0=4)` / `topk-channels({BUDGET})` / both, by batch, "
        f"tokens drawn apart or alike: {'; '.join(shown)}",
        found["command"],
    )


def router_lines(found: Any, line: Line) -> Iterator[str]:
    if found is None:
        return
    shown = [
        f"`{row['router']}` {row['kernels: graph']:.1f} ({row['kernels: host']:.0f})"
        for row in found["rows"]
        if row["tokens"] == 16 and row["collective"] == "peer" and row["same"]
    ]
    yield line(
        f"routers over two ranks, 16 tokens a rank, {found['device']}",
        f"us in a CUDA graph (called from Python), the all-reduce over peer memory included: {', '.join(shown)}",
        found["command"],
    )


def runtime_lines(found: Any, line: Line) -> Iterator[str]:
    if found is None:
        return
    parts = found["parts"]

    def most(collective: str) -> float:
        rows = [row for row in parts["balance"] if row["collective"] == collective and "graph_most" in row]
        return float(max(row["graph_most"] for row in rows))

    over = max(row["over_bare_graph"] for row in parts["exchange"] if "over_bare_graph" in row)
    row = next(row for row in parts["graph"] if row["tokens"] == 128 and "waterfill" in row["stack"])
    yield line(
        f"a layer on {found['num_devices']} x {found['device']}, hidden 7,168, top-8",
        f"balance, all-reduce included, at most {most('nccl'):.0f} us with NCCL and {most('peer'):.0f} over peer "
        f"memory (aims: 75, 45); deep_ep at most {over:.1%} over calling it bare (10%); the whole layer of 128 tokens "
        f"in a CUDA graph {row['graph']:,.0f} us, called eagerly {row['eager']:,.0f}",
        command_of(found, "exchange", "graph", "balance").replace("; ", "`; `"),
    )
