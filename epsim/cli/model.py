"""`epsim model`: the project's own small mixture-of-experts model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train, record and evaluate the small model.")

CacheOption = Annotated[
    Path | None, typer.Option("--cache", help="Where text and model are kept. Default: $EPSIM_CACHE or ~/.cache/epsim.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cuda or cpu. Default: the GPU if there is one.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of all random draws.")]


def _need_models_extra() -> None:
    try:
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'epsim[models]'") from None


@app.command("corpus")
def corpus_command(
    cache: CacheOption = None,
    megabytes: Annotated[float, typer.Option("--megabytes", help="Text of each domain, at most.")] = 20,
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Tokens of the byte-pair tokenizer.")] = 8192,
) -> None:
    """Fetch the text from Debian packages, split off held-out documents, and tokenize it."""
    _need_models_extra()
    from epsim.traces.model.tokens import FetchOptions, fetch_corpus

    folder = fetch_corpus(FetchOptions(cache=cache, megabytes=megabytes, vocabulary=vocabulary))
    print(f"{folder}: tokens, tokenizer, and corpus.json, which lists packages, versions and licences")


@app.command("train")
def train_command(
    cache: CacheOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    steps: Annotated[int, typer.Option("--steps", help="Training steps.")] = 4000,
    batch: Annotated[int, typer.Option("--batch", help="Sequences a step.")] = 64,
    length: Annotated[int, typer.Option("--length", help="Tokens a sequence.")] = 512,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the model.")] = 4,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="At its highest.")] = 2e-3,
    dense: Annotated[
        bool, typer.Option("--dense/--no-dense", help="Also train a dense model of equal active size.")
    ] = True,
    report: Annotated[Path | None, typer.Option("--report", help="JSON file for curves, losses and skew.")] = None,
) -> None:
    """Train the model, and a dense one to compare with."""
    _need_models_extra()
    from epsim.traces.model.config import ModelShape
    from epsim.traces.model.train import TrainOptions, train

    options = TrainOptions(
        cache=cache,
        seed=seed,
        steps=steps,
        batch=batch,
        length=length,
        learning_rate=learning_rate,
        dense=dense,
        device=device,
        shape=ModelShape(num_layers=layers),
        report=report,
    )
    _print_training(train(options))


@app.command("record")
def record_command(
    out: Annotated[Path, typer.Option("--out", help="The trace to write (Parquet).")],
    cache: CacheOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    cycles: Annotated[int, typer.Option("--cycles", help="Rounds of prefill and decode; each adds 45 steps.")] = 8,
) -> None:
    """Record the trained model: prefill of held-out text and sampled continuations, of mixed and single domains."""
    _need_models_extra()
    from epsim.traces.model.sample import RecordOptions, record_sample

    done = record_sample(RecordOptions(out=out, cache=cache, seed=seed, cycles=cycles, device=device))
    print(f"{done.path}: {done.num_steps} steps, {done.num_bytes / 2**20:.2f} MiB, recorded on {done.device}")
    print(f"prefill: {done.prefill}\ndecode: {done.decode}")


@app.command("evaluate")
def evaluate_command(
    policy: Annotated[str, typer.Option("--policy", metavar="STACK", help="Its router and its reader act.")] = "topk",
    sketch: Annotated[
        Path | None, typer.Option("--sketch", help="Of `epsim reader build`, for a reader. Default: built in memory.")
    ] = None,
    cache: CacheOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", help="Tokens routed together; repeatable. Default: 1 to 64.")
    ] = None,
    domain: Annotated[list[str] | None, typer.Option("--domain", help="Only these; repeatable.")] = None,
    sequences: Annotated[int, typer.Option("--sequences", help="Sequences a domain.")] = 64,
    length: Annotated[int, typer.Option("--length", help="Tokens of each.")] = 256,
    generated: Annotated[int, typer.Option("--generated", help="Tokens of each continuation.")] = 512,
    generations: Annotated[int, typer.Option("--generations", help="Continuations a domain; 0 for none.")] = 16,
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks of the experts, in contiguous shares.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file for the figures.")] = None,
) -> None:
    """What a router policy or a channel reader costs the model: cross-entropy, KL to the plain model, repetition."""
    _need_models_extra()
    from epsim.quality.evaluate import EvaluateOptions, evaluate

    options = EvaluateOptions(
        policy=policy,
        domains=tuple(domain or ()),
        sequences=sequences,
        length=length,
        generations=generations,
        generated=generated,
        ranks=ranks,
        seed=seed,
        cache=cache,
        device=device,
        out=out,
        sketch=sketch,
        **({"batch_sizes": tuple(batch_size)} if batch_size else {}),
    )
    _print_evaluation(evaluate(options))


@app.command("generate")
def generate_command(
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="STACK", help="Beside topk; repeatable. Its router acts.")
    ] = None,
    cache: CacheOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    batch: Annotated[int, typer.Option("--batch", help="Sequences decoded together.")] = 16,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of held-out text that each begins with.")] = 64,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Tokens of each continuation.")] = 256,
    rounds: Annotated[int, typer.Option("--rounds", help="Timed continuations of every policy, in turn.")] = 5,
    experts: Annotated[
        str, typer.Option("--experts", help="kernel: epsim's for small batches; model: transformers' own.")
    ] = "kernel",
    out: Annotated[Path | None, typer.Option("--out", help="JSON file for the figures.")] = None,
) -> None:
    """Continue held-out text under router policies: tokens a second beside the model's own choice, and the text."""
    _need_models_extra()
    from epsim.quality.speed import GenerateOptions, generate_text

    options = GenerateOptions(
        stacks=tuple(policy or ()),
        batch=batch,
        prompt=prompt,
        num_tokens=num_tokens,
        rounds=rounds,
        experts=experts,
        seed=seed,
        cache=cache,
        device=device,
        out=out,
    )
    _print_speeds(generate_text(options))


def _print_training(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    dense = report.get("dense")
    table = Table("domain", "tokens", "MoE", "dense", "max/mean expert load by layer")
    for name, value in report["moe"]["heldout_cross_entropy"].items():
        twin = f"{dense['heldout_cross_entropy'][name]:.3f}" if dense else "-"
        skew = " ".join(f"{row['max_over_mean']:.2f}" for row in report["skew"][name])
        table.add_row(name, str(report["corpus_tokens"][name]), f"{value:.3f}", twin, skew)
    console = Console()
    console.print(table)
    for name in ("moe", "dense"):
        if one := report.get(name):
            sizes, seconds = one["parameters"], one["training_seconds"]
            console.print(f"{name}: {sizes['total']:,} parameters, {sizes['active']:,} active; {seconds} s of training")
    console.print(f"held-out cross-entropy in nats a token; {report['tokens']:,} tokens trained on {report['device']}")


def _print_evaluation(result: dict[str, Any]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    from epsim.report.table import PIPE_WIDTH

    ranks = result["ranks"]
    active = ["active"] if ranks == 1 else ["active", f"most of {ranks}"]
    reader = any("share_read" in one for sizes in result["loss"].values() for one in sizes.values())
    losses = Table("domain", "batch", "loss", "plain", "KL", *active, "kept", *(["read", "union"] if reader else []))
    for column in losses.columns:
        column.overflow = "fold"
    repetition = Table("domain", "repetition", "plain")
    for name, sizes in result["loss"].items():
        for size, one in sizes.items():
            read = [f"{number:.1f}" for number in one["active_experts"].values()]
            shown = [f"{one['cross_entropy']:.4f}", f"{one['plain']:.4f}", f"{one['kl']:.5f}"]
            kept = [f"{one[key]:.4f}" for key in ("kept_mass", "share_read", "union_read") if key in one]
            losses.add_row(name, str(size), *shown, *read, *kept)
    for name, rates in result["repetition"].items():
        repetition.add_row(name, f"{rates['policy']:.3f}", f"{rates['plain']:.3f}")
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(losses)
    if repetition.rows:
        console.print(repetition)
    console.print(
        f"{result['policy']} on {result['device']}; loss: cross-entropy, nats a token; active: experts read a layer; "
        "kept: probability of the experts taken over that of the model's choice; "
        + ("read: bytes that a token alone reads over those of its experts; " if reader else "")
        + ("union: bytes that a batch reads over those of its active experts; " if reader else "")
        + "repetition: share of a continuation's 4-grams that it has held before"
    )


def _print_speeds(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("policy", "tokens/s", "over topk", "active", "continuation")
    for stack, one in result["stacks"].items():
        text = " ".join(one["text"].split())[:60]
        figures = (f"{one['tokens_per_second']:.0f}", f"{one['over_topk']:.3f}", f"{one['active_experts']:.1f}")
        table.add_row(escape(stack), *figures, escape(text))
    console = Console()
    console.print(table)
    console.print(
        f"{result['batch']} sequences of {result['prompt']} + {result['tokens']} tokens on {result['device']}, medians "
        f"of {result['rounds']} rounds in turn, prefill not timed; active: experts read a layer"
    )
