"""Prints a reproduced table, its fit and its scores."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from epsim.cost.layer_time import load_timing
from epsim.machines.hardware import load_hardware
from epsim.models.spec import load_model
from epsim.reproduce.deepep import TOLERANCE, published_exchange
from epsim.reproduce.held_out import MEDIAN, P95, held_out
from epsim.reproduce.waterfill_lplb import NODES, Reproduction, published_rows, reproduce
from epsim.reproduce.workloads import DrawOptions, read_topics

TABLES = {"deepseek-v3": "DeepSeek-V3", "deepseek-v4-flash": "DeepSeek-V4-Flash (routing of DeepSeek-V3's recordings)"}
MOST_WORKLOADS = 3


def show_waterfill_lplb(recordings: Path, hardware: str, steps: int, layers: int, seed: int) -> None:
    """Prints the Waterfill and LPLB tables. Raises ValueError with one line for a wrong folder or hardware."""
    timings = {name: load_timing(hardware, name, NODES, "prefill") for name in TABLES}
    topics = read_topics(recordings, layers)
    console, noise = Console(width=130), Console(stderr=True)
    for name, title in TABLES.items():
        timing = timings[name]
        # A table of one workload has few rows. So draw as many batches for it as for a table of MOST_WORKLOADS.
        number = len({row["workload"] for row in published_rows(name)})
        options = DrawOptions(num_steps=steps * (MOST_WORKLOADS // number), top_k=timing.model.top_k, seed=seed)
        with noise.status("reading") as status:
            result = reproduce(topics, timing, name, options, status.update)
        console.print(_table(result, f"{title}, 16 {timing.hardware.name} on 2 nodes: tokens per second, gains"))
        console.print(f"Fitted on the baselines only: {result.fit}.", highlight=False)
        for claim, holds, figures in result.scores:
            console.print(f"{'holds ' if holds else 'FAILS '} {claim}: {figures}", highlight=False)
        console.print(f"Other tokens per step: {'; '.join(result.elsewhere)}.", highlight=False)
        console.print()


def show_deepep() -> None:
    """Prints each published figure, its prediction, and whether all are within the tolerance."""
    figures = published_exchange(load_hardware("h800"), load_model("deepseek-v3"))
    headings = ("kernels", "ranks", "way", "unit", "published", "predicted", "error", "")
    table = Table(*headings, title="DeepEP on H800, published and predicted", title_justify="left")
    for figure in figures:
        note = "used to set its rate" if figure.fitted else "held out"
        values = (f"{figure.published:g}", f"{figure.predicted:.1f}", f"{figure.error:+.1%}", note)
        table.add_row(figure.kernels, str(figure.ranks), figure.way, figure.unit, *values)
    console = Console(width=130)
    console.print(table)
    normal = [figure for figure in figures if figure.kernels == "normal"]
    worst = max(normal, key=lambda figure: abs(figure.error))
    holds = abs(worst.error) <= TOLERANCE
    console.print(
        f"{'holds ' if holds else 'FAILS '} normal kernels, 8 to 64 ranks, within {TOLERANCE:.0%}: worst "
        f"{worst.error:+.1%} ({worst.way}, {worst.ranks} ranks)",
        highlight=False,
    )


def show_held_out(hardware: str) -> None:
    """Prints the median and 95th percentile of the errors, and whether they are small enough."""
    checks = held_out(hardware, load_hardware(hardware), load_model("deepseek-v3"))
    headings = ("call", "sizes", "median error", "p95", f"at most {MEDIAN:.0%} and {P95:.0%}")
    table = Table(*headings, title=f"Public tables of {hardware}: sizes not used in the fit", title_justify="left")
    for check in checks:
        holds = "holds" if check.holds else "FAILS"
        table.add_row(check.what, str(check.sizes), f"{check.median:.1%}", f"{check.p95:.1%}", holds)
    Console(width=130).print(table)


def _table(result: Reproduction, title: str) -> Table:
    table = Table("workload", "placement", "baseline", "predicted", title=title, title_justify="left")
    for heading in ("Waterfill published", "predicted", "ours", "LPLB published", "predicted", "ours", "ours, both"):
        table.add_column(heading, justify="right")
    for row in result.rows:
        cells = [f"{row.baseline:,.0f}", f"{row.predicted_baseline:,.0f}"]
        for kind in ("waterfill", "lplb"):
            cells += [_gain(gains, kind) for gains in (row.published, row.predicted, row.ours)]
        table.add_row(row.workload, row.placement, *cells, _gain(row.ours, "both"))
    return table


def _gain(gains: Mapping[str, float], kind: str) -> str:
    return f"{gains[kind]:+.2%}" if kind in gains else "-"
