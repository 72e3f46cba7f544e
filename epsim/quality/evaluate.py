"""Evaluates the small model under a router policy and a reader: cross-entropy, KL to the plain model, repetition."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from epsim.kernels.reader.store import load_sketches
from epsim.policies.stack import parse_stack
from epsim.quality.batch_bytes import batch_bytes
from epsim.quality.decoding import generate
from epsim.quality.hook import Reroute, check_rules, contiguous_ranks, keep, reroute_of, rerouted
from epsim.quality.meter import Meter
from epsim.quality.options import NGRAM, EvaluateOptions
from epsim.quality.reader import Reading, reading_of, reads
from epsim.traces.model import tokens
from epsim.traces.model.train import choose_device, device_name, load_model, model_folder

MIXED = "mixed"
CALIBRATION = 32
"""Number of sequences of training text on which a reader's threshold is calibrated."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Nats per token. cross_entropy: with the policy; plain: cross-entropy of the plain model; kl: KL divergence from
    the plain model's prediction to the policy's."""

    cross_entropy: float
    plain: float
    kl: float


@torch.no_grad()
def loss_in_batches(
    model: Any, reroute: Reroute, text: torch.Tensor, batch_size: int, reading: Reading | None = None
) -> Loss:
    """Teacher-forced loss on text [sequences, length + 1]. The t-th tokens of batch_size sequences are one batch."""
    sums = torch.zeros(3, dtype=torch.float64)
    for first in range(0, len(text), batch_size):
        batch = text[first : first + batch_size].to(model.device)
        plain = model(input_ids=batch[:, :-1], use_cache=False).logits
        with rerouted(model, reroute, whole_sequences=True), reads(reading, model, whole_sequences=True):
            changed = model(input_ids=batch[:, :-1], use_cache=False).logits
        # One sequence at a time: a whole batch in float64 takes a gigabyte.
        for p, q, target in zip(plain, changed, batch[:, 1:], strict=True):
            p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            losses = [F.nll_loss(log, target, reduction="sum") for log in (q, p)]
            sums += torch.stack([*losses, (p.exp() * (p - q)).sum()]).cpu()
    return Loss(*(sums / (text.shape[0] * (text.shape[1] - 1))).tolist())


def repetition_rate(continuations: torch.Tensor, ngram: int = NGRAM) -> float:
    """The share of n-grams that are repetitions within their sequence, mean over continuations [sequences, tokens]."""
    grams = continuations.unfold(1, ngram, 1).cpu()
    distinct = [len({tuple(gram) for gram in row.tolist()}) for row in grams]
    return float(np.mean([1 - count / grams.shape[1] for count in distinct]))


def evaluation_text(
    heldout: dict[str, tokens.Tokens], domains: Sequence[str], sequences: int, length: int
) -> dict[str, torch.Tensor]:
    """Held-out sequences [sequences, length + 1] int64 of each domain, at equal distances in its text. If there are
    several domains, `mixed` holds sequences of all domains in turn."""
    text: dict[str, torch.Tensor] = {}
    for name in domains:
        ids = heldout[name]
        stride = len(ids) // sequences
        if stride < length + 1:
            raise ValueError(f"held-out text of {name} holds {len(ids)} tokens: too few for {sequences} x {length + 1}")
        rows = np.stack([ids[i * stride : i * stride + length + 1] for i in range(sequences)])
        text[name] = torch.from_numpy(rows.astype(np.int64))
    if len(domains) > 1:
        picked = [text[domains[i % len(domains)]][i // len(domains)] for i in range(sequences)]
        text[MIXED] = torch.stack(picked)
    return text


def evaluate_model(
    model: Any,
    reroute: Reroute,
    heldout: dict[str, tokens.Tokens],
    options: EvaluateOptions,
    reading: Reading | None = None,
) -> dict[str, Any]:
    """Evaluates a model: {"loss": {domain: {batch size: {cross_entropy, plain, kl, active_experts, kept_mass}}},
    "repetition": {domain: {policy, plain}}}. active_experts: {number of ranks: active experts of the busiest rank},
    means over steps and layers. A reader adds kept_channels (per token and layer), share_read (bytes that a token
    reads, over the bytes of its experts) and union_read (the same for the first batch as a whole)."""
    domains = tuple(dict.fromkeys(options.domains)) or tuple(heldout)
    if unknown := sorted(set(domains) - set(heldout)):
        raise ValueError(f"no held-out text of domain {unknown[0]!r}: give one of {', '.join(heldout)}")
    longest = max(options.length, min(64, options.length) + options.generated if options.generations else 0)
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"--length {options.length} or --generated {options.generated}: {longest} tokens, but the model has "
            f"{model.config.max_position_embeddings} positions"
        )
    text = evaluation_text(heldout, domains, options.sequences, options.length)
    loss: dict[str, Any] = {}
    repetition: dict[str, Any] = {}
    for name, rows in text.items():
        loss[name] = {}
        for batch_size in options.batch_sizes:
            meter = Meter(reroute, tuple(dict.fromkeys((1, options.ranks))))
            if reading is not None:
                reading.counts.zero_()
            loss_and_kl = loss_in_batches(model, meter, rows, batch_size, reading)
            figures = asdict(loss_and_kl) | {"active_experts": meter.active_experts(), "kept_mass": meter.kept_mass()}
            if reading is not None:
                figures |= reading.described()
                with rerouted(model, reroute, whole_sequences=True):
                    read = batch_bytes(model, reading, rows[:batch_size, :-1], (batch_size,))
                figures["union_read"] = read[batch_size]["union"]
            loss[name][batch_size] = figures
        if options.generations:
            prompts = rows[: options.generations, : min(64, options.length)]
            plain = repetition_rate(generate(model, keep, prompts, options.generated, options.seed))
            changed = plain
            if reroute is not keep or reading is not None:
                with reads(reading, model, whole_sequences=False):
                    changed = repetition_rate(generate(model, reroute, prompts, options.generated, options.seed))
            repetition[name] = {"policy": changed, "plain": plain}
    return {"loss": loss, "repetition": repetition}


def small_model(cache: Path | None, device: str | None) -> tuple[Any, dict[str, str]]:
    """The trained model, with its device and type by name (`device`, `dtype`): bfloat16 on a GPU, otherwise float32."""
    chosen = choose_device(device)
    # Grouped products of experts are fast only in bfloat16 on a GPU.
    dtype = torch.bfloat16 if chosen.startswith("cuda") else torch.float32
    about = {"device": device_name(chosen), "dtype": str(dtype).removeprefix("torch.")}
    return load_model(cache, chosen, dtype), about


def evaluate(options: EvaluateOptions) -> dict[str, Any]:
    """Evaluates the trained model under a stack. Returns the figures, and writes them to `out` if it is given."""
    stack = parse_stack(options.policy)
    reroute = reroute_of(stack.router, options.ranks)
    model, about = small_model(options.cache, options.device)
    contiguous_ranks(model.config.num_experts, options.ranks, torch.device("cpu"))
    if stack.router.acts:
        check_rules(model)
    corpus = tokens.load(options.cache)
    reading = None
    if stack.reader.acts:
        sketches = None
        if options.sketch is not None:
            sketches = load_sketches(options.sketch, model_folder(options.cache), about["dtype"])
        text = evaluation_text(corpus.train, tuple(corpus.train), CALIBRATION, options.length)
        mixed = text.get(MIXED, next(iter(text.values())))
        reading = reading_of(model, stack.reader, mixed[:, :-1], sketches, options.ranks)
    elif options.sketch is not None:
        raise ValueError(f"--sketch {options.sketch}: no reader in {str(stack)!r} uses it: add topk-channels(0.178)")
    result = {
        "policy": str(stack),
        "ranks": options.ranks,
        **about,
        **evaluate_model(model, reroute, corpus.heldout, options, reading),
    }
    options.write(result)
    return result
