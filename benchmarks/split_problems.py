"""Sets of split problems: real placements under real and drawn loads, pairs of copies as LPLB has them, hard shapes."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from common import ROOT

from epsim.kernels.split import SplitStructure, prepare
from epsim.kernels.split.problems import chain, clique, drifted_counts
from epsim.placement.eplb import rebalance_experts
from epsim.planning import to_counts
from epsim.traces.store import StoredTrace

PLANNED, LATER = "prefill_in1024.json", "decode_in1000out1000.json"
TOP_K = 8
REDUNDANT = {8: (0, 16, 32, 64), 16: (0, 16, 32, 64), 32: (0, 32, 64), 64: (0, 64)}
TOKENS = (64, 1024, 16384)
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ProblemSet:
    """kind: real, pairs or hard. tokens: per rank and batch, 0 for recorded batches. counts [S, L, E] int64."""

    kind: str
    name: str
    redundant: int
    tokens: int
    structure: SplitStructure
    counts: torch.Tensor


def marginals(recordings: Path, rng: np.random.Generator) -> tuple[list[Floats], str]:
    """Counts [L, E] to plan on and to drift to, and where they are from. recordings: DeepSeek-V3's folder."""
    if (recordings / PLANNED).exists():
        texts = [json.loads((recordings / name).read_text())["logical_count"] for name in (PLANNED, LATER)]
        counts = [np.array(text, dtype=np.float64) for text in texts]
        return [c[c.sum(1) > 0] for c in counts], f"DeepSeek-V3, {PLANNED} drifting to {LATER}"
    skew = rng.normal(size=(2, 58, 256))
    return [np.exp(0.7 * skew[0]), np.exp(0.7 * skew[0] + 0.3 * skew[1])], "lognormal marginals, sigma 0.7"


def planned_by_eplb(weight: npt.NDArray[np.generic], num_ranks: int, redundant: int) -> SplitStructure:
    """The structure of EPLB's placement for weight [L, E]."""
    num_experts = weight.shape[1]
    slots, _, _ = rebalance_experts(torch.from_numpy(weight), num_experts + redundant, 1, 1, num_ranks)
    return prepare(slots, num_ranks, num_experts)


def drawn_problems(planned: Floats, later: Floats, num_steps: int, rng: np.random.Generator) -> Iterator[ProblemSet]:
    """Problems with placements by EPLB. Batches are drawn from recorded shares of experts that drift."""
    for num_ranks, choices in REDUNDANT.items():
        for redundant in choices:
            structure = planned_by_eplb(planned, num_ranks, redundant)
            for tokens in TOKENS:
                counts = drifted_counts(planned, later, tokens * num_ranks * TOP_K, num_steps, rng)
                yield ProblemSet("real", "DeepSeek-V3, drawn", redundant, tokens, structure, counts)


def sample_counts() -> Ints:
    """Counts [S, L, E] of the sample trace."""
    sample = StoredTrace(ROOT / "traces/sample.parquet")
    return np.concatenate([to_counts(block, sample.meta.num_experts).counts for block in sample.blocks()])


def recorded_problems(recordings: Path) -> Iterator[ProblemSet]:
    """Recorded batches on EPLB's placement for their first half, of the recordings that exist."""
    found = {"sample": (sample_counts(), ((8, 32), (16, 16), (16, 32), (32, 32)))}
    smartmoe = recordings / "smartmoe-gpt/smartmoe_gpt_24L32E_global_counts_501iters.npz"
    if smartmoe.exists():
        found["SmartMoE GPT, training"] = (np.load(smartmoe)["counts"][::10], ((8, 8), (16, 16), (16, 32)))
    gpt_oss = recordings / "gpt-oss-20b/gptoss20b_decode_ids_256seq.npz"
    if gpt_oss.exists():
        found["gpt-oss-20b, decode"] = (_decode_counts(np.load(gpt_oss)["expert_ids"], 32), ((8, 8), (16, 16)))
    qwen = recordings / "qwen1.5-moe/expert_freq_qwen_policy_datasets.csv"
    if qwen.exists():
        found["Qwen1.5-MoE"] = (_csv_counts(qwen), ((8, 4), (16, 20)))
    for name, (counts, clusters) in found.items():
        counts = counts.astype(np.int64)
        middle = len(counts) // 2
        for num_ranks, redundant in clusters:
            structure = planned_by_eplb(counts[:middle].mean(0), num_ranks, redundant)
            yield ProblemSet("real", name, redundant, 0, structure, torch.from_numpy(counts[middle:]))


def _decode_counts(ids: npt.NDArray[np.uint8], num_experts: int) -> Ints:
    """ids [sequences, positions, L, k] (255 after the end) -> counts [positions, L, E], one batch per position."""
    _, num_steps, num_layers, _ = ids.shape
    at = np.arange(num_steps)[:, None, None] * num_layers + np.arange(num_layers)[:, None]
    places = (at * 256 + ids).ravel()
    counts = np.bincount(places, minlength=num_steps * num_layers * 256)
    return counts.reshape(num_steps, num_layers, 256)[:, :, :num_experts]


def _csv_counts(path: Path) -> Ints:
    """HarMoEny's table dataset, iteration, layer_idx, 0..E-1 -> [S, L, E], without its set of random tokens."""
    batches: dict[tuple[str, str], list[list[int]]] = {}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            if row["dataset"] != "random":
                counts = [int(float(text)) for name, text in row.items() if name.isdigit()]
                batches.setdefault((row["iteration"], row["dataset"]), []).append(counts)
    return np.array(list(batches.values()))


def paired_problems(planned: Floats, later: Floats, num_steps: int, rng: np.random.Generator) -> Iterator[ProblemSet]:
    """LPLB's kind of placement: a rank's k-th redundant slot copies the k-th heaviest expert of one other rank."""
    num_layers, num_experts = planned.shape
    for num_ranks in (8, 16, 32):
        own = rebalance_experts(torch.from_numpy(planned), num_experts, 1, 1, num_ranks)[0].numpy()
        own = own.reshape(num_layers, num_ranks, -1)
        weight = np.take_along_axis(planned, own.reshape(num_layers, -1), 1).reshape(own.shape)
        heaviest = np.take_along_axis(own, np.argsort(-weight, axis=2, kind="stable"), 2)
        copies = [np.roll(heaviest[:, :, k], distance, axis=1) for k, distance in enumerate((1, 3))]
        slots = np.concatenate((own, np.stack(copies, axis=2)), axis=2).reshape(num_layers, -1)
        structure = prepare(torch.from_numpy(slots), num_ranks, num_experts)
        counts = drifted_counts(planned, later, 1024 * num_ranks * TOP_K, num_steps, rng)
        yield ProblemSet("pairs", "pairs of copies", 2 * num_ranks, 1024, structure, counts)


def hard_problems(num_steps: int, rng: np.random.Generator) -> Iterator[ProblemSet]:
    everywhere = torch.stack((torch.zeros(64, dtype=torch.int64), torch.arange(1, 65)), dim=1).flatten()[None]
    shapes = (
        ("chain of 64", chain(64), 64),
        ("ring of 64", chain(64, ring=True), 64),
        ("an expert for every pair of 16", clique(16), 16),
        ("one expert on all of 64", everywhere, 64),
        ("chain of 512", chain(512), 512),
    )
    for name, slots, num_ranks in shapes:
        structure = prepare(slots, num_ranks)
        size = (num_steps, 1, structure.num_experts)
        wide = np.floor(10 ** (9 * rng.random(size)))
        ties = rng.integers(0, 3, size)
        ties[..., 0] += 1000
        alone = np.zeros(size)
        steps = np.arange(1, num_steps)  # the first has no load at all
        alone[steps, 0, steps % structure.num_experts] = 1 + 10**6 * (steps % 2)
        kinds = (("1 to 1e9", wide), ("ties, zeros, one hot", ties), ("all load on one expert", alone))
        for kind, loads in kinds:
            redundant = structure.num_physical - structure.num_experts
            counts = torch.from_numpy(loads.astype(np.int64))
            yield ProblemSet("hard", f"{name}: {kind}", redundant, 0, structure, counts)
