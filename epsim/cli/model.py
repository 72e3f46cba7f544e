"""`epsim model`: the project's own small mixture-of-experts model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from epsim.cli.options import command
from epsim.quality.options import EvaluateOptions, GenerateOptions
from epsim.traces.model.config import ModelShape
from epsim.traces.model.options import FetchOptions, RecordOptions, TrainOptions

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train, record and evaluate the small model.")


def _need_models_extra() -> None:
    try:
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'epsim[models]'") from None


@command(app, "corpus")
def corpus_command(options: FetchOptions) -> None:
    """Download and tokenize text from Debian packages. Some documents are held out for evaluation."""
    _need_models_extra()
    from epsim.traces.model.tokens import fetch_corpus

    print(f"{fetch_corpus(options)}: tokens, tokenizer, and corpus.json, which lists packages, versions and licences")


@command(app, "train")
def train_command(options: TrainOptions, shape: ModelShape) -> None:
    """Train the model, and a dense model for comparison."""
    _need_models_extra()
    from epsim.traces.model.train import train

    _print_training(train(replace(options, shape=shape)))


@command(app, "record")
def record_command(options: RecordOptions) -> None:
    """Record a trace of the trained model. The model reads held-out text in prefill and decode steps."""
    _need_models_extra()
    from epsim.traces.model.sample import record_sample

    done = record_sample(options)
    print(f"{done.path}: {done.num_steps} steps, {done.num_bytes / 2**20:.2f} MiB, recorded on {done.device}")
    print(f"prefill: {done.prefill}\ndecode: {done.decode}")


@command(app, "evaluate")
def evaluate_command(options: EvaluateOptions) -> None:
    """Measure how much quality a router or reader loses. Prints cross-entropy, KL divergence and repetition."""
    _need_models_extra()
    from epsim.quality.evaluate import evaluate

    _print_evaluation(evaluate(options))


@command(app, "generate")
def generate_command(options: GenerateOptions) -> None:
    """Measure the tokens per second of router policies. Also prints the generated text."""
    _need_models_extra()
    from epsim.quality.speed import generate_text

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
        if model_report := report.get(name):
            sizes, seconds = model_report["parameters"], model_report["training_seconds"]
            console.print(f"{name}: {sizes['total']:,} parameters, {sizes['active']:,} active; {seconds} s of training")
    console.print(
        f"held-out cross-entropy in nats per token; {report['tokens']:,} training tokens on {report['device']}"
    )


def _print_evaluation(result: dict[str, Any]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    from epsim.report.table import PIPE_WIDTH

    ranks = result["ranks"]
    active = ["active"] if ranks == 1 else ["active", f"most of {ranks}"]
    reader = any("share_read" in figures for sizes in result["loss"].values() for figures in sizes.values())
    losses = Table("domain", "batch", "loss", "plain", "KL", *active, "kept", *(["read", "union"] if reader else []))
    for column in losses.columns:
        column.overflow = "fold"
    repetition = Table("domain", "repetition", "plain")
    for name, sizes in result["loss"].items():
        for size, figures in sizes.items():
            read = [f"{number:.1f}" for number in figures["active_experts"].values()]
            shown = [f"{figures['cross_entropy']:.4f}", f"{figures['plain']:.4f}", f"{figures['kl']:.5f}"]
            kept = [f"{figures[key]:.4f}" for key in ("kept_mass", "share_read", "union_read") if key in figures]
            losses.add_row(name, str(size), *shown, *read, *kept)
    for name, rates in result["repetition"].items():
        repetition.add_row(name, f"{rates['policy']:.3f}", f"{rates['plain']:.3f}")
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(losses)
    if repetition.rows:
        console.print(repetition)
    console.print(
        f"{result['policy']} on {result['device']}; loss: cross-entropy in nats per token; active: experts per layer; "
        "kept: probability of the chosen experts over that of the model's choice; "
        + ("read: bytes that a single token reads over those of its experts; " if reader else "")
        + ("union: bytes that a batch reads over those of its active experts; " if reader else "")
        + "repetition: share of repeated 4-grams in a continuation"
    )


def _print_speeds(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("policy", "tokens/s", "over topk", "active", "continuation")
    for stack, speed in result["stacks"].items():
        text = " ".join(speed["text"].split())[:60]
        figures = (f"{speed['tokens_per_second']:.0f}", f"{speed['over_topk']:.3f}", f"{speed['active_experts']:.1f}")
        table.add_row(escape(stack), *figures, escape(text))
    console = Console()
    console.print(table)
    console.print(
        f"{result['batch']} sequences of {result['prompt']} + {result['tokens']} tokens on {result['device']}, medians "
        f"of {result['rounds']} rounds, prefill not timed; active: experts per layer"
    )
