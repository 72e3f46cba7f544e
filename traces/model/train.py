"""Trains the small model, and a dense model with as many active parameters. The seed determines the result."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import Qwen2MoeForCausalLM
from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func
from transformers.utils import logging as transformers_logging

from epsim.files import check_target, whole_file
from epsim.traces.model import corpus, tokens
from epsim.traces.model.config import build_model, count_parameters
from epsim.traces.model.options import TrainOptions


@dataclass(slots=True)
class Trained:
    """model: in float32, on its training device; curve: (step, mean cross-entropy, mean balance loss) of intervals."""

    model: Any
    curve: list[tuple[int, float, float]]
    seconds: float
    tokens: int


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes the same seed give the same weights on the same device and library versions."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Windows:
    """Draws training batches: each sequence from a uniformly drawn domain, at a uniformly drawn offset."""

    def __init__(self, train: dict[str, tokens.Tokens], batch: int, length: int, seed: int, device: str) -> None:
        short = [name for name, ids in train.items() if len(ids) <= length + 1]
        if short:
            raise ValueError(f"domain {short[0]} has {len(train[short[0]])} tokens, fewer than a sequence of {length}")
        self.text = torch.from_numpy(np.concatenate(list(train.values())).astype(np.int32)).to(device)
        sizes = np.array([len(ids) for ids in train.values()])
        self.first, self.room = np.cumsum(sizes) - sizes, sizes - length - 1
        self.batch, self.random = batch, np.random.default_rng(seed)
        self.offsets = torch.arange(length + 1, device=device)

    def draw(self) -> torch.Tensor:
        """[batch, length + 1] int64."""
        domain = self.random.integers(len(self.first), size=self.batch)
        start = self.first[domain] + self.random.integers(self.room[domain])
        index = torch.from_numpy(start).to(self.offsets.device)[:, None] + self.offsets
        return self.text[index].long()


def learning_rate(options: TrainOptions, step: int) -> float:
    warm = max(1, min(200, options.steps // 10))
    if step < warm:
        return options.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, options.steps - warm)
    return options.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def losses(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the next token, and the balance loss averaged over layers (top_k if perfectly balanced)."""
    config = model.config
    output = model.model(batch[:, :-1], use_cache=False, output_router_logits=True)
    logits = model.lm_head(output.last_hidden_state)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    routed = [layer for layer in output.router_logits or () if layer is not None]
    if not routed:
        return loss, loss.new_zeros(())
    balance: Any = load_balancing_loss_func
    each = [balance((layer,), config.num_experts, config.num_experts_per_tok) for layer in routed]
    return loss, torch.stack(each).mean()


def fit(options: TrainOptions, train: dict[str, tokens.Tokens], device: str, dense: bool = False) -> Trained:
    """Trains one model."""
    on_gpu = device.startswith("cuda")
    torch.manual_seed(options.seed)
    master_model = build_model(options.shape, dense).to(device)
    model = build_model(options.shape, dense).to(device, torch.bfloat16 if on_gpu else torch.float32)
    master, weights = list(master_model.parameters()), list(model.parameters())
    decayed = [p for p in master if p.ndim >= 2]
    plain = [p for p in master if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    with torch.no_grad():
        torch._foreach_copy_(weights, master)
    for parameter in master:
        parameter.grad = torch.zeros_like(parameter)
    # Compilation more than halves the time of a step on a GPU. On a CPU it gains little and needs a compiler.
    compute = torch.compile(losses) if on_gpu else losses
    windows = Windows(train, options.batch, options.length, options.seed, device)
    curve: list[tuple[int, float, float]] = []
    totals = torch.zeros(2, device=device)
    since, begun = 0, time.perf_counter()
    with deterministic():
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)
            loss, balance = compute(model, windows.draw())
            torch.autograd.backward(loss + options.balance * balance)
            with torch.no_grad():
                torch._foreach_copy_([p.grad for p in master], [p.grad for p in weights])
                torch.nn.utils.clip_grad_norm_(master, 1.0)
                optimizer.step()
                torch._foreach_copy_(weights, master)
                torch._foreach_zero_([p.grad for p in weights])
                totals += torch.stack((loss.detach(), balance.detach()))
            since += 1
            if (step + 1) % max(1, options.steps // 50) == 0 or step + 1 == options.steps:
                mean_loss, mean_balance = (totals / since).tolist()
                if not math.isfinite(mean_loss):
                    raise ValueError(f"training diverged at step {step + 1}: lower --learning-rate")
                curve.append((step + 1, mean_loss, mean_balance))
                totals.zero_()
                since = 0
    seconds = time.perf_counter() - begun
    return Trained(master_model.eval(), curve, seconds, options.steps * options.batch * options.length)


@torch.no_grad()
def heldout_loss(
    model: Any, heldout: dict[str, tokens.Tokens], length: int, max_tokens: int = 131_072
) -> dict[str, float]:
    """Cross-entropy in nats per token of each domain's held-out text, in windows of `length` tokens."""
    result: dict[str, float] = {}
    check_heldout(heldout, length)
    for name, ids in heldout.items():
        total, count = 0.0, 0
        for batch in heldout_batches(ids, length, max_tokens, 16):
            batch = batch.to(model.device)
            logits = model(batch[:, :-1]).logits
            total += float(F.cross_entropy(logits.flatten(0, 1).double(), batch[:, 1:].flatten(), reduction="sum"))
            count += batch[:, 1:].numel()
        result[name] = total / count
    return result


def check_heldout(heldout: dict[str, tokens.Tokens], length: int) -> None:
    """Raises ValueError if a domain's held-out text does not fill one window."""
    for name, ids in heldout.items():
        if len(ids) <= length:
            raise ValueError(
                f"held-out text of {name}: {len(ids)} tokens do not fill one window of {length + 1}: "
                "lower --length, or fetch more with `epsim model corpus --megabytes`"
            )


def heldout_batches(ids: tokens.Tokens, length: int, max_tokens: int, batch: int) -> Iterator[torch.Tensor]:
    """Consecutive windows in batches, [batch or fewer, length + 1] int64."""
    count = min(len(ids), max_tokens) // (length + 1)
    windows = torch.from_numpy(ids[: count * (length + 1)].astype(np.int64)).view(count, length + 1)
    yield from torch.split(windows, batch)


@torch.no_grad()
def routing_skew(
    model: Any, heldout: dict[str, tokens.Tokens], length: int, max_tokens: int = 32_768
) -> dict[str, list[dict[str, float]]]:
    """For each domain and layer: busiest expert / mean, share of the 8 busiest experts, experts without tokens."""
    result: dict[str, list[dict[str, float]]] = {}
    num_experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    for name, ids in heldout.items():
        counts = torch.zeros(model.config.num_hidden_layers, num_experts, device=model.device)
        for batch in heldout_batches(ids, length, max_tokens, 16):
            output = model.model(batch[:, :-1].to(model.device), output_router_logits=True, use_cache=False)
            for layer, logits in enumerate(output.router_logits):
                chosen = logits.topk(top_k, dim=-1).indices.flatten()
                counts[layer] += torch.bincount(chosen, minlength=num_experts)
        result[name] = [
            {
                "max_over_mean": float(row.max() / row.mean()),
                "top8_share": float(row.topk(min(8, num_experts)).values.sum() / row.sum()),
                "idle_experts": int((row == 0).sum()),
            }
            for row in counts
        ]
    return result


def model_folder(cache: Path | None) -> Path:
    return (cache or corpus.cache_folder()) / "model"


def load_model(cache: Path | None = None, device: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The trained model. Raises ValueError if `epsim model train` has not been run."""
    return read_model(model_folder(cache), device, dtype)


def read_model(folder: Path, device: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The model in a folder. Raises ValueError if it is missing or damaged."""
    if not (folder / "config.json").exists():
        raise ValueError(f"no trained model in {folder}: run `epsim model train` first")
    quiet()
    try:
        model: Any = Qwen2MoeForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the model in {folder} is damaged ({error}): run `epsim model train` again") from None
    model.config._experts_implementation = "grouped_mm"
    return model.to(choose_device(device)).eval()


def quiet() -> None:
    """Turns off the progress bars of loading and saving, which take a second."""
    hub: Any = transformers_logging
    hub.disable_progress_bar()


def choose_device(given: str | None) -> str:
    """The given device. Without one: a GPU if there is one, else the CPU. Raises ValueError if it does not exist."""
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if given.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device {given}: give cuda or cpu")
    if given.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {given}: torch finds no GPU here")
    return given


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def train(options: TrainOptions) -> dict[str, Any]:
    """Trains on the prepared corpus, saves the model in the cache, and returns the report, also written to
    `options.report` if given: loss curves, held-out cross-entropy by domain, routing skew by layer and domain."""
    device = choose_device(options.device)
    text = tokens.load(options.cache)
    check_heldout(text.heldout, options.length)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        check_target(options.report)
    shape = replace(options.shape, vocabulary=max(options.shape.vocabulary, text.vocabulary))
    options = replace(options, shape=shape)
    moe = fit(options, text.train, device)
    quiet()
    moe.model.save_pretrained(model_folder(options.cache))
    report: dict[str, Any] = {
        "command": f"epsim model train --seed {options.seed} --steps {options.steps} --batch {options.batch} "
        f"--length {options.length} --layers {options.shape.num_layers}",
        "device": device_name(device),
        "torch": torch.__version__,
        "seed": options.seed,
        "steps": options.steps,
        "tokens": moe.tokens,
        "corpus_tokens": {name: len(ids) for name, ids in text.train.items()},
        "moe": describe(moe, text.heldout, options.length),
        "skew": routing_skew(moe.model, text.heldout, options.length),
    }
    if options.dense:
        report["dense"] = describe(fit(options, text.train, device, dense=True), text.heldout, options.length)
    if options.report is not None:
        with whole_file(options.report) as temporary:
            temporary.write_text(json.dumps(report, indent=1) + "\n")
    return report


def describe(trained: Trained, heldout: dict[str, tokens.Tokens], length: int) -> dict[str, Any]:
    return {
        "parameters": count_parameters(trained.model),
        "training_seconds": round(trained.seconds, 1),
        "loss_curve": [[step, round(loss, 4), round(balance, 4)] for step, loss, balance in trained.curve],
        "heldout_cross_entropy": {k: round(v, 4) for k, v in heldout_loss(trained.model, heldout, length).items()},
    }
