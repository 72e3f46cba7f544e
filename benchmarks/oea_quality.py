"""What opportunistic expert activation costs the small model: cross-entropy against active experts, and its rivals.

    python benchmarks/oea_quality.py [--cache DIR] [--device cuda] [--sequences 128] [--out FILE]

Needs the trained model (`epsim model train`, docs/model.md). It compares pruning, oea, its general form, lynx, masking
of low demand, and oea-ep on 4 and 8 ranks, with batches of 8 to 64 tokens of mixed text, and of 16 tokens of each
domain. It also measures how much long continuations repeat, and checks the paper's claims. `epsim report --quality`
draws the JSON that it writes.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import command, script_parser, write
from quality.frontier import Point, Trial, active_without_policy, default_trials, measure
from quality.oea_claims import Claim, check_claims

from epsim.policies.stack import parse_stack
from epsim.quality.decoding import generate
from epsim.quality.evaluate import MIXED, evaluation_text, repetition_rate
from epsim.quality.hook import check_rules, reroute_of
from epsim.traces.model import tokens
from epsim.traces.model.train import choose_device, device_name, load_model

CHUNK = 64
ALONE = 16
"""Tokens a batch where the domains are taken one by one."""


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
    device = choose_device(arguments.device)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = load_model(arguments.cache, device, dtype)
    check_rules(model)
    heldout = tokens.load(arguments.cache).heldout
    top_k, num_experts = model.config.num_experts_per_tok, model.config.num_experts
    text = evaluation_text(heldout, tuple(heldout), arguments.sequences, arguments.length)
    mixed = text.pop(MIXED, next(iter(text.values())))
    print(
        f"{device_name(device)}, {dtype}, {num_experts} experts, top-{top_k}, {len(mixed)} x {arguments.length} tokens"
    )
    seconds: dict[str, float] = {}

    begun = time.perf_counter()
    active = active_without_policy(model, mixed, (8, 16, 32, 64), CHUNK)
    points, plain = measure(model, mixed, list(default_trials(top_k, num_experts, active)), CHUNK)
    seconds["mixed"] = time.perf_counter() - begun
    print_points(points)
    claims = check_claims(points, top_k)
    print_claims(claims)

    begun = time.perf_counter()
    alone = {}
    trials = [(Trial("topk", "topk"), ALONE)]
    trials += [(Trial(f, f"{f}(k0={k0})"), ALONE) for f in ("pruned", "oea") for k0 in range(1, top_k)]
    for name, rows in text.items():
        alone[name], _ = measure(model, rows[:CHUNK], trials, CHUNK)
    seconds["domains"] = time.perf_counter() - begun
    print_domains(alone, points)

    begun = time.perf_counter()
    rates = repetition(model, mixed, arguments, top_k) if arguments.generated else {}
    seconds["generation"] = time.perf_counter() - begun
    for router, rate in rates.items():
        print(f"repetition {router:16} {rate:.4f}")
    print("seconds: " + ", ".join(f"{part} {value:.1f}" for part, value in seconds.items()))
    return {
        "machine": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "num_experts": num_experts,
        "top_k": top_k,
        "sequences": len(mixed),
        "length": arguments.length,
        "plain_cross_entropy": plain,
        "active_without_policy": active,
        "points": [point.to_json() for point in points],
        "claims": [claim.to_json() for claim in claims],
        "domains": {name: [point.to_json() for point in own] for name, own in alone.items()},
        "repetition": rates,
        "seconds": seconds,
    }


def repetition(model: Any, mixed: torch.Tensor, arguments: argparse.Namespace, top_k: int) -> dict[str, float]:
    """Of 16 continuations decoded as one batch: share of 4-grams that a continuation has held before."""
    prompts = mixed[:16, : min(64, arguments.length)]
    routers = ["topk", *(f"oea(k0={k0})" for k0 in (1, 3, 5) if k0 < top_k), *(f"pruned(k0={k0})" for k0 in (1, 3))]
    rates = {}
    for router in routers:
        reroute = reroute_of(parse_stack(router).router)
        rates[router] = repetition_rate(generate(model, reroute, prompts, arguments.generated, arguments.seed))
    return rates


def print_points(points: Sequence[Point]) -> None:
    print(
        f"{'batch':>5} {'policy':34} {'active':>7} {'of 4':>6} {'of 8':>6} {'kept':>7} {'delta':>9} {'+-':>8} {'KL':>8}"
    )
    for point in points:
        one = point.to_json()
        print(
            f"{point.batch_size:5} {point.trial.label:34} {point.active[1]:7.2f} {point.active[4]:6.2f} "
            f"{point.active[8]:6.2f} {point.kept_mass:7.4f} {point.delta:9.5f} {one['delta_standard_error']:8.5f} "
            f"{point.kl:8.5f}"
        )


def print_claims(claims: Sequence[Claim]) -> None:
    print("claims; differences in nats a token, at most 0 as claimed, within two standard errors")
    for claim in claims:
        if claim.worst is None or claim.mean is None:
            print(f"  not compared  {claim.words}")
            continue
        word = "holds" if claim.holds else "does not hold"
        print(f"  {word:13} {claim.words}: mean {claim.mean:+.5f}, worst {claim.worst:+.5f} of {len(claim.detail)}")


def print_domains(alone: dict[str, list[Point]], points: Sequence[Point]) -> None:
    routers = ("topk", "oea(k0=3)", "pruned(k0=3)")
    print(f"batches of {ALONE}: active experts, and delta for all but topk")
    for name, own in {MIXED: [p for p in points if p.batch_size == ALONE], **alone}.items():
        found = {point.trial.router: point for point in own}
        shown = [f"{r} {found[r].active[1]:6.2f} {found[r].delta:8.5f}" for r in routers if r in found]
        print(f"  {name:12} " + "   ".join(shown))


if __name__ == "__main__":
    main()
