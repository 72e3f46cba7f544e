"""What opportunistic expert activation costs the small model: cross-entropy against active experts, and its rivals.

    python benchmarks/oea_quality.py [--cache DIR] [--device cuda] [--sequences 128] [--out FILE]

Needs the trained model (`epsim model train`, docs/model.md). It compares pruning, oea, its general form, lynx, masking
of low demand, and oea-ep on 4 and 8 ranks, with batches of 8 to 64 tokens of mixed text, and of 16 tokens of each
domain. It also measures how much long continuations repeat, and checks the paper's claims. `epsim report --quality`
draws the JSON that it writes.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import command, script_parser, table, write
from quality.frontier import Point, Trial, active_without_policy, default_trials, measure
from quality.oea_claims import Claim, check_claims

from epsim.policies.stack import parse_stack
from epsim.quality.decoding import generate
from epsim.quality.evaluate import MIXED, evaluation_text, repetition_rate, small_model
from epsim.quality.hook import check_rules, reroute_of
from epsim.traces.model import tokens

CHUNK = 64
ALONE = 16
"""Tokens per batch in the measurement of single domains."""


def main() -> None:
    parser = script_parser(__doc__, "oea_quality.json")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--sequences", type=int, default=128, help="of text; a multiple of 64")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--generated", type=int, default=512, help="tokens of each continuation; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = run(arguments)
    report["command"] = command()
    write(arguments.out, report)
    print(f"wrote {arguments.out}")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model, about = small_model(arguments.cache, arguments.device)
    check_rules(model)
    heldout = tokens.load(arguments.cache).heldout
    top_k, num_experts = model.config.num_experts_per_tok, model.config.num_experts
    text = evaluation_text(heldout, tuple(heldout), arguments.sequences, arguments.length)
    mixed = text.pop(MIXED, next(iter(text.values())))
    size = f"{num_experts} experts, top-{top_k}, {len(mixed)} x {arguments.length} tokens"
    print(f"{about['device']}, {about['dtype']}, {size}")
    seconds: dict[str, float] = {}

    begun = time.perf_counter()
    active = active_without_policy(model, mixed, (8, 16, 32, 64), CHUNK)
    points, plain = measure(model, mixed, list(default_trials(top_k, num_experts, active)), CHUNK)
    seconds["mixed"] = time.perf_counter() - begun
    table("policies", [shown(point) for point in points])
    claims = check_claims(points, top_k)
    table("differences in nats per token, at most 0 as claimed", [shown_claim(claim) for claim in claims])

    begun = time.perf_counter()
    alone = {}
    trials = [(Trial("topk", "topk"), ALONE)]
    trials += [(Trial(f, f"{f}(k0={k0})"), ALONE) for f in ("pruned", "oea") for k0 in range(1, top_k)]
    for name, rows in text.items():
        alone[name], _ = measure(model, rows[:CHUNK], trials, CHUNK)
    seconds["domains"] = time.perf_counter() - begun
    for name, own in alone.items():
        table(f"{name}, batches of {ALONE}", [shown(point) for point in own])

    begun = time.perf_counter()
    rates = repetition(model, mixed, arguments, top_k) if arguments.generated else {}
    seconds["generation"] = time.perf_counter() - begun
    for router, rate in rates.items():
        print(f"repetition {router:16} {rate:.4f}")
    print("seconds: " + ", ".join(f"{part} {value:.1f}" for part, value in seconds.items()))
    return {
        "machine": about["device"],
        "dtype": about["dtype"],
        "num_experts": num_experts,
        "top_k": top_k,
        "sequences": len(mixed),
        "length": arguments.length,
        "plain_cross_entropy": plain,
        "active_without_policy": active,
        "points": [point.to_json() for point in points],
        "claims": [asdict(claim) for claim in claims],
        "domains": {name: [point.to_json() for point in own] for name, own in alone.items()},
        "repetition": rates,
        "seconds": seconds,
    }


def repetition(model: Any, mixed: torch.Tensor, arguments: argparse.Namespace, top_k: int) -> dict[str, float]:
    """The share of 4-grams that occurred before in the same continuation, over 16 continuations decoded as one
    batch."""
    prompts = mixed[:16, : min(64, arguments.length)]
    routers = ["topk", *(f"oea(k0={k0})" for k0 in (1, 3, 5) if k0 < top_k), *(f"pruned(k0={k0})" for k0 in (1, 3))]
    rates = {}
    for router in routers:
        reroute = reroute_of(parse_stack(router).router)
        rates[router] = repetition_rate(generate(model, reroute, prompts, arguments.generated, arguments.seed))
    return rates


def shown(point: Point) -> dict[str, Any]:
    row = {"batch": point.batch_size, "policy": point.trial.label, "active": point.active[1], "of 4": point.active[4]}
    row |= {"of 8": point.active[8], "kept": point.kept_mass, "delta": point.delta}
    return row | {"+-": point.to_json()["delta_standard_error"], "KL": point.kl}


def shown_claim(claim: Claim) -> dict[str, Any]:
    holds = {True: "holds", False: "does not hold", None: "not compared"}[claim.holds]
    return {"claim": claim.words, "": holds, "mean": claim.mean, "worst": claim.worst, "of": len(claim.detail)}


if __name__ == "__main__":
    main()
