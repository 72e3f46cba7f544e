"""Small valid files of every format that the readers know, each written by the format's own rules."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

NUM_STEPS, NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 2, 6, 2
COUNTS = np.random.default_rng(0).integers(0, 50, (NUM_STEPS, NUM_LAYERS, NUM_EXPERTS))
RANK_COUNTS = np.random.default_rng(1).integers(0, 50, (NUM_STEPS, 2, NUM_LAYERS, NUM_EXPERTS))
IDS = np.random.default_rng(2).random((9, NUM_LAYERS, NUM_EXPERTS)).argsort(axis=2)[..., :TOP_K]
# Two copies of experts 0 and 1; layer 1 holds its experts in reverse.
PHYSICAL = np.array([[0, 1, 2, 3, 4, 5, 0, 1], [5, 4, 3, 2, 1, 0, 0, 1]])

Written = tuple[list[Path], dict[str, Any]]
"""Paths of one recording, and the import options that it needs."""


def one(path: Path, **options: Any) -> Written:
    return [path], options


def to_physical(counts: Any) -> Any:
    """counts [L, E] -> [L, P]: an expert's second copy takes a third."""
    physical = np.zeros((NUM_LAYERS, PHYSICAL.shape[1]), dtype=np.int32)
    for layer in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            slots = np.flatnonzero(PHYSICAL[layer] == expert)
            physical[layer, slots[0]] = counts[layer, expert]
            if len(slots) > 1:
                physical[layer, slots[1]] = counts[layer, expert] // 3
                physical[layer, slots[0]] -= physical[layer, slots[1]]
    return physical


def sglang_stat(folder: Path) -> Written:
    """A dense layer first, two unfilled steps last."""
    counts = np.zeros((NUM_STEPS + 2, NUM_LAYERS + 1, NUM_EXPERTS), dtype=np.int32)
    counts[:NUM_STEPS, 1:] = COUNTS
    content = {"rank": 0, "logical_count": torch.tensor(counts), "average_utilization_rate_over_window": None}
    torch.save(content, folder / "a.pt")
    return one(folder / "a.pt", top_k=TOP_K)


def sglang_per_pass(folder: Path) -> Written:
    paths = []
    for rank in range(2):
        records = [
            {
                "forward_pass_id": 10 + step,
                "rank": rank,
                "gatherer_key": "primary",
                "global_physical_count": torch.tensor(to_physical(RANK_COUNTS[step, rank])),
            }
            for step in range(NUM_STEPS)
        ]
        content = {"records": records, "last_physical_to_logical_map": torch.tensor(PHYSICAL)}
        torch.save(content, folder / f"pass_{rank}.pt")
        paths.append(folder / f"pass_{rank}.pt")
    return paths, {"top_k": TOP_K}


def sglang_per_token(folder: Path) -> Written:
    """Physical ids, the last copy of each; 8 columns padded with -1; a padding token at the end of each pass."""
    paths = []
    for rank in range(2):
        records = []
        for step in range(2):
            part = IDS[rank * 4 + step * 2 : rank * 4 + step * 2 + 2]
            ids = np.full((NUM_LAYERS, 3, 8), -1, dtype=np.int32)
            for token, layer, k in np.ndindex(2, NUM_LAYERS, TOP_K):
                ids[layer, token, k] = np.flatnonzero(PHYSICAL[layer] == part[token, layer, k])[-1]
            records.append(
                {
                    "forward_pass_id": step,
                    "rank": rank,
                    "gatherer_key": "primary",
                    "forward_mode": 2,
                    "input_ids": [1, 2],
                    "positions": [0, 1],
                    "extend_seq_lens": None,
                    "topk_ids_of_layer": torch.tensor(ids),
                    "global_physical_count": torch.zeros(NUM_LAYERS, 8, dtype=torch.int32),
                }
            )
        content = {"records": records, "last_physical_to_logical_map": torch.tensor(PHYSICAL)}
        torch.save(content, folder / f"token_{rank}.pt")
        paths.append(folder / f"token_{rank}.pt")
    return paths, {}


def sglang_json(folder: Path) -> Written:
    (folder / "load.json").write_text(json.dumps({"logical_count": COUNTS.astype(float).tolist()}))
    return one(folder / "load.json", top_k=TOP_K)


def packed_json(folder: Path) -> Written:
    text = json.dumps({"logical_count": COUNTS.tolist()})
    (folder / "load.bin").write_bytes(gzip.compress(text.encode()))
    return one(folder / "load.bin", top_k=TOP_K)


def old_csv(folder: Path) -> Written:
    rows = [f"{layer},{e},{COUNTS[0, layer, e]}" for layer in range(NUM_LAYERS) for e in range(NUM_EXPERTS)]
    (folder / "old.csv").write_text("\n".join(["layer_id,expert_id,count", *rows]) + "\n")
    return one(folder / "old.csv", top_k=TOP_K)


def vllm_npy(folder: Path) -> Written:
    np.save(folder / "routed.npy", IDS.astype(np.int16))
    return one(folder / "routed.npy", num_experts=NUM_EXPERTS, step_tokens=4)


def vllm_npz(folder: Path) -> Written:
    """Two requests, of 5 and 4 tokens."""
    np.savez(folder / "r.npz", routed_experts_0=IDS[:5].astype(np.int16), routed_experts_1=IDS[5:].astype(np.int16))
    return one(folder / "r.npz", num_experts=NUM_EXPERTS, batch=2, ranks=2)


def vllm_dump(folder: Path) -> Written:
    history = [{"step": 100 * s, "logical_expert_load": COUNTS[s].tolist()} for s in range(NUM_STEPS)]
    (folder / "dump.json").write_text(json.dumps({"model": "x", "load_history": history}))
    return one(folder / "dump.json", top_k=TOP_K)


def token_log(folder: Path) -> Written:
    lines = [{"type": "meta", "model_id": "some/model", "num_experts": NUM_EXPERTS}]
    for token, layer in np.ndindex(len(IDS), NUM_LAYERS):
        ids, weights = IDS[token, layer].tolist(), [0.75, 0.25]
        lines.append({"req_id": "a", "token_idx": token, "layer": layer, "topk_ids": ids, "topk_weights": weights})
    (folder / "log.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return one(folder / "log.jsonl", step_tokens=4)


def trtllm(folder: Path) -> Written:
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": NUM_EXPERTS, "num_experts_per_token": TOP_K}))
    for rank in range(2):
        counts = {
            f"{100 + step}_{3 + layer}": RANK_COUNTS[step, rank, layer].astype(np.int32)
            for step in range(NUM_STEPS)
            for layer in range(NUM_LAYERS)
        }
        save_file(counts, folder / f"rank{rank}.safetensors")
    return [folder / "meta_info.json", folder / "rank0.safetensors", folder / "rank1.safetensors"], {}


def megatron(folder: Path) -> Written:
    paths = []
    for rank in range(2):
        lines = []
        for step, layer in np.ndindex(2, NUM_LAYERS):
            part = IDS[rank * 4 + step * 2 : rank * 4 + step * 2 + 2, layer]
            lines.append(
                {
                    "step": 5 + step,
                    "stage": 0,
                    "block": "decoder",
                    "layer": layer + 1,
                    "rank": rank,
                    "num_tokens": 2,
                    "topk": TOP_K,
                    "top_indices": part.tolist(),
                }
            )
        path = folder / f"routing_{rank}.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
        paths.append(path)
    return paths, {"num_experts": NUM_EXPERTS}


def make_logits() -> Any:
    """[L, 9, E] float32 whose top-2 are IDS, in that order."""
    logits = np.random.default_rng(3).random((NUM_LAYERS, len(IDS), NUM_EXPERTS)).astype(np.float32)
    for token, layer in np.ndindex(len(IDS), NUM_LAYERS):
        logits[layer, token, IDS[token, layer, 0]] = 3.0
        logits[layer, token, IDS[token, layer, 1]] = 2.0
    return logits


def logits_npz(folder: Path) -> Written:
    np.savez(folder / "l.npz", *make_logits())
    return one(folder / "l.npz", top_k=TOP_K, step_tokens=4)


def logits_pt(folder: Path) -> Written:
    torch.save(tuple(torch.tensor(a) for a in make_logits()), folder / "l.pt")
    return one(folder / "l.pt", top_k=TOP_K, step_tokens=4)


def flame(folder: Path) -> Written:
    """Samples 0..2, positions 0..2 of each: token sample * 3 + position."""
    entries = [
        {
            "samples": torch.arange(3),
            "scores": torch.full((3, TOP_K), 0.5),
            "indices": torch.tensor(IDS[position::3, layer]),
            "layer": layer,
            "token_position": position,
        }
        for layer in range(NUM_LAYERS)
        for position in range(3)
    ]
    torch.save(entries, folder / "f.pt")
    return one(folder / "f.pt", num_experts=NUM_EXPERTS, batch=3, ranks=1)


def smartmoe(folder: Path) -> Written:
    """Iteration 11 of ranks 0 and 1: steps are the micro-batches."""
    paths = []
    for rank in range(2):
        lines = [f"{layer}:{RANK_COUNTS[:, rank, layer].astype(float).tolist()}" for layer in range(NUM_LAYERS)]
        path = folder / f"table_iter11_rank{rank}.log"
        path.write_text("\n".join(lines) + "\n")
        paths.append(path)
    return paths, {"top_k": TOP_K}


def counts_npz(folder: Path) -> Written:
    np.savez(folder / "g.npz", counts=COUNTS.astype(np.uint32), iterations=np.array([1, 11, 21]))
    return one(folder / "g.npz", top_k=TOP_K)


def rank_counts_npz(folder: Path) -> Written:
    np.savez(folder / "p.npz", counts=RANK_COUNTS.astype(np.uint16), iterations=np.array([1, 11, 21]))
    return one(folder / "p.npz", top_k=TOP_K)


def wide_csv(folder: Path) -> Written:
    """The iterations of a layer stand together, as in HarMoEny's own files."""
    header = ",".join(["", "dataset", "iteration", "layer_idx", *map(str, range(NUM_EXPERTS))])
    rows = [
        ",".join(map(str, [n, "books", step, layer, *COUNTS[step, layer]]))
        for n, (layer, step) in enumerate(np.ndindex(NUM_LAYERS, NUM_STEPS))
    ]
    (folder / "wide.csv").write_text("\n".join([header, *rows]) + "\n")
    return one(folder / "wide.csv", top_k=TOP_K)


def sequences_npz(folder: Path) -> Written:
    ids = np.full((2, 6, NUM_LAYERS, TOP_K), 255, dtype=np.uint8)
    ids[0, :5], ids[1, :4] = IDS[:5], IDS[5:]
    probs = np.full(ids.shape, 0.5, dtype=np.float16)
    paths = np.array(["data/law/x/a.json", "data/math/y/b.json"])
    np.savez(folder / "s.npz", expert_ids=ids, lengths=np.array([5, 4]), topk_probs=probs, source_paths=paths)
    return one(folder / "s.npz", num_experts=NUM_EXPERTS, batch=2, ranks=2)


def examples_json(folder: Path) -> Written:
    def token(number: int, ids: Any) -> dict[str, Any]:
        layers = {
            f"layer_{layer}": {"selected_experts": ids[layer].tolist(), "selected_probs": [0.6, 0.4]}
            for layer in range(NUM_LAYERS)
        }
        return {f"token_{number}": layers}

    examples = [
        {"prompt": "?", "router_data": [token(i, ids) for i, ids in enumerate(part)]} for part in (IDS[:5], IDS[5:])
    ]
    (folder / "law__x_examples.json").write_text(json.dumps(examples))
    return one(folder / "law__x_examples.json", num_experts=NUM_EXPERTS, batch=2, ranks=2)


def summary_json(folder: Path) -> Written:
    """10 samples of 20 tokens; shares make whole counts."""
    analytics = {
        f"layer_{layer}": {
            str(e): {"prob_density": 0.1, "count_frequency": float(share)} for e, share in enumerate(row)
        }
        for layer, row in enumerate([[0.5, 0.5, 0.25, 0.25, 0.25, 0.2], [0.9, 0.8, 0.1, 0.1, 0.05, 0.05]])
    }
    content = {"sample_count": 10, "num_think_tokens": 20.0, "think_expert_analytics": analytics}
    (folder / "sum.json").write_text(json.dumps(content))
    return one(folder / "sum.json")


FORMATS: dict[str, Callable[[Path], Written]] = {
    "sglang_stat": sglang_stat,
    "sglang_per_pass": sglang_per_pass,
    "sglang_per_token": sglang_per_token,
    "sglang_json": sglang_json,
    "packed_json": packed_json,
    "old_csv": old_csv,
    "vllm_npy": vllm_npy,
    "vllm_npz": vllm_npz,
    "vllm_dump": vllm_dump,
    "token_log": token_log,
    "trtllm": trtllm,
    "megatron": megatron,
    "logits_npz": logits_npz,
    "logits_pt": logits_pt,
    "flame": flame,
    "smartmoe": smartmoe,
    "counts_npz": counts_npz,
    "rank_counts_npz": rank_counts_npz,
    "wide_csv": wide_csv,
    "sequences_npz": sequences_npz,
    "examples_json": examples_json,
    "summary_json": summary_json,
}


@pytest.fixture(params=FORMATS, name="format_name")
def each_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="write_format")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """write_format(name) -> (paths, options) of a fresh small recording."""
    return lambda name: FORMATS[name](tmp_path_factory.mktemp(name))


@pytest.fixture(scope="session")
def known() -> dict[str, Any]:
    """What the small recordings hold."""
    return {
        "counts": COUNTS,
        "rank_counts": RANK_COUNTS,
        "ids": IDS,
        "logits": make_logits(),
        "num_experts": NUM_EXPERTS,
    }
