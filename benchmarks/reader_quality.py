"""The quality that channel readers cost the small model: top-k and thresholds, screens, restoration, other scores.

    python benchmarks/reader_quality.py [--cache DIR] [--device cuda] [--sequences 64] [--out FILE]

Needs the trained model (`epsim model train`, docs/model.md). Sketches are built from the model's weights in memory. It
takes about 120 seconds on an H200, writes JSON and prints a table of the paper's claims.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import command, script_parser, table, write
from quality.figures import Trial, drift_of, kept_by_token, measure, published_sizes
from quality.reader_claims import Pair, claim_rows, markdown, pair, spearman, tally

from epsim.kernels.reader import ReadBytes
from epsim.policies.reader import Channels, ThresholdChannels, TopkChannels
from epsim.quality.batch_bytes import batch_bytes
from epsim.quality.decoding import Decoder
from epsim.quality.evaluate import MIXED, evaluation_text, repetition_rate, small_model
from epsim.quality.hook import check_rules, keep
from epsim.quality.layers import Layer, build_sketches, layers_of
from epsim.quality.reader import Reading, SparseInputs, calibrated, reads
from epsim.traces.model import tokens

BUDGETS = (0.128, 0.178, 0.28)
CHUNK = 64
PROMPT = 64
ONE_DOMAIN = "python"
"""The domain that a threshold is calibrated on, besides mixed text."""
SCREENS = ("partial", "full")


class Bench:
    """The model, its layers, its text, and the report, which grows with each part."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.seconds = arguments, {}
        self.model, about = small_model(arguments.cache, arguments.device)
        check_rules(self.model)
        corpus = tokens.load(arguments.cache)
        self.domains = tuple(corpus.heldout)
        self.text = evaluation_text(corpus.heldout, self.domains, arguments.sequences, arguments.length)
        self.mixed = self.text.pop(MIXED, next(iter(self.text.values())))
        self.calibration = evaluation_text(corpus.train, self.domains, arguments.calibration, arguments.length)
        with self.timed("build"):
            sketches = build_sketches(self.model, arguments.seed)
            self.layers: list[Layer] = layers_of(self.model, sketches, int4=True)
        sketch = self.layers[0].screen.sketch
        self.top_k: int = self.model.config.num_experts_per_tok
        self.sizes = ReadBytes(sketch.hidden, sketch.intermediate)
        self.report: dict[str, Any] = {
            "machine": about["device"],
            "dtype": about["dtype"],
            "num_experts": sketch.num_experts,
            "top_k": self.top_k,
            "hidden": sketch.hidden,
            "intermediate": sketch.intermediate,
            "sequences": arguments.sequences,
            "length": arguments.length,
            "sizes": self.described_sizes(),
            "seconds": self.seconds,
        }

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[part] = round(time.perf_counter() - begun, 2)
        print(f"{part}: {self.seconds[part]} s", flush=True)

    def reading(self, reader: Channels | SparseInputs, **options: Any) -> Reading:
        return Reading(self.layers, reader, **options)

    def payable(self, reader: Channels, num_experts: int = 0, num_ranks: int = 1) -> bool:
        """Whether the budget covers the screen of num_experts experts (0 for the model's k) on num_ranks ranks."""
        sizes, number = reader.sizes(self.sizes.hidden, self.sizes.intermediate), num_experts or self.top_k
        return sizes.token(number, 0, min(number, num_ranks)) <= reader.budget * number * sizes.expert

    def kept(self, reader: TopkChannels) -> int | None:
        """The number of channels that a token keeps; None if the budget does not cover the screen."""
        sizes = reader.sizes(self.sizes.hidden, self.sizes.intermediate)
        return sizes.kept(reader.budget, self.top_k) if self.payable(reader) else None

    def described_sizes(self) -> dict[str, Any]:
        sketch = self.layers[0].screen.sketch
        weights = sketch.num_experts * self.sizes.expert
        resident = sketch.resident_bytes()
        return {
            "sketch_of_experts": resident["sketch"] / weights,
            "map_of_experts": resident["map"] / weights,
            "packed_block_bytes": 128 / 5 + 4,
            "published_models": published_sizes(),
            "kept": {
                f"{budget}": {screen: self.kept(TopkChannels(budget, screen=screen)) for screen in SCREENS}
                for budget in (*BUDGETS, 0.135, 0.185)
            },
        }

    def run(self) -> dict[str, Any]:
        with self.timed("calibration"):
            mixed = self.calibration.pop(MIXED, next(iter(self.calibration.values())))
            single_domain = self.calibration.get(ONE_DOMAIN, mixed)
            reader = ThresholdChannels(BUDGETS[0])
            budgets = [b for b in BUDGETS if self.payable(TopkChannels(b))]
            self.thresholds = calibrated(self.model, self.layers, reader, mixed, budgets)
            of_single_domain = calibrated(self.model, self.layers, reader, single_domain, budgets)
        with self.timed("pairs"):
            self.pairs(budgets, of_single_domain)
        with self.timed("mixed"):
            self.ablations()
        with self.timed("kept and loss"):
            self.kept_and_loss(budgets)
        with self.timed("batches"):
            reading = self.reading(TopkChannels(0.178 if 0.178 in budgets else budgets[-1]))
            size = [b for b in (1, 2, 4, 8, 16, 32, 64) if b <= len(self.mixed)]
            self.report["batches"] = batch_bytes(self.model, reading, self.mixed[: size[-1], :48], tuple(size))
        if self.arguments.generated:
            with self.timed("generation"):
                self.generation(budgets)
        return self.report

    def pairs(self, budgets: Sequence[float], of_one: dict[float, list[float]]) -> None:
        """Measures for each domain and budget: top-k, the calibrated threshold, and top-k that keeps as many channels
        as the threshold."""
        rows: list[dict[str, Any]] = []
        pairs: dict[str, list[Pair]] = {"loss": [], "kl": [], "as_many_loss": [], "as_many_kl": []}
        for domain, text in self.text.items():
            trials = {}
            for budget in budgets:
                trials[f"topk {budget}"] = Trial(self.reading(TopkChannels(budget)))
                reader = ThresholdChannels(budget)
                trials[f"threshold {budget}"] = Trial(self.reading(reader, thresholds=self.thresholds[budget]))
                trials[f"one {budget}"] = Trial(self.reading(reader, thresholds=of_one[budget]))
            measured, plain = measure(self.model, text, trials, CHUNK)
            used = {b: round(measured[f"threshold {b}"].kept) for b in budgets}
            again = {b: Trial(self.reading(TopkChannels(b), num_kept=used[b])) for b in budgets}
            same, _ = measure(self.model, text, {f"{b}": trial for b, trial in again.items()}, CHUNK)
            for budget in budgets:
                topk, threshold = measured[f"topk {budget}"], measured[f"threshold {budget}"]
                for by in ("loss", "kl"):
                    pairs[by].append(pair(domain, budget, topk, threshold, by))
                    pairs[f"as_many_{by}"].append(pair(domain, budget, same[f"{budget}"], threshold, by))
                k = self.kept(TopkChannels(budget))
                rows.append(
                    {
                        "domain": domain,
                        "budget": budget,
                        "topk": topk.to_json(),
                        "threshold": threshold.to_json(),
                        "topk_of_as_many": same[f"{budget}"].to_json(),
                        "plain_loss": float(plain.loss.mean()),
                        "plain_right": float(plain.right.mean()),
                        "threshold_keeps": threshold.kept / k,
                        "threshold_of_one_domain_keeps": measured[f"one {budget}"].kept / k,
                        "result": pairs["loss"][-1].result,
                        "result_kl": pairs["kl"][-1].result,
                        "result_as_many": pairs["as_many_loss"][-1].result,
                        "result_as_many_kl": pairs["as_many_kl"][-1].result,
                    }
                )
        self.report["pairs"] = rows
        self.report["tallies"] = {name: tally(pairs_of_kind) for name, pairs_of_kind in pairs.items()}
        table("top-k and thresholds", rows)
        print(self.report["tallies"])

    def ablations(self) -> None:
        """Measures screens, restoration, scores, quotas of ranks, and a router with a reader, on mixed text."""
        readers: dict[str, Channels | SparseInputs] = {}
        for budget in (*BUDGETS, 0.135, 0.18, 0.185):
            for screen in SCREENS:
                for restore in ("on", "off"):
                    readers[f"{screen} {restore} {budget}"] = TopkChannels(budget, "sketch", screen, restore)
        for budget in (*BUDGETS, 0.2, 0.4, 0.5):
            readers[f"sketch {budget}"] = TopkChannels(budget, restore="off")
            readers[f"raw sketch {budget}"] = TopkChannels(budget, restore="off", units="raw")
            readers[f"int4-gate {budget}"] = TopkChannels(budget, "int4-gate", units="raw")
            readers[f"int4-gate in output units {budget}"] = TopkChannels(budget, "int4-gate")
            readers[f"cats {budget}"] = TopkChannels(budget, "cats", units="raw")
            readers[f"teal {budget}"] = SparseInputs("teal", budget)
            readers[f"wina {budget}"] = SparseInputs("wina", budget)
        trials, refused = {}, []
        for name, reader in readers.items():
            if isinstance(reader, SparseInputs) or self.payable(reader):
                trials[name] = Trial(self.reading(reader))
            else:
                refused.append(name)
        for budget in (0.135, 0.185):
            for screen in SCREENS:  # codes packed without padding to sectors: 26 bytes per block for any shape
                coordinates = TopkChannels(budget, screen=screen).coordinates
                packed = ReadBytes(self.sizes.hidden, self.sizes.intermediate, coordinates=coordinates, sector=1)
                if packed.token(self.top_k, 0) <= budget * self.top_k * packed.expert:
                    reading = self.reading(
                        TopkChannels(budget, screen=screen), num_kept=packed.kept(budget, self.top_k)
                    )
                    trials[f"packed {screen} {budget}"] = Trial(reading)
        self.more_trials(trials)
        measured, plain = measure(self.model, self.mixed, trials, CHUNK)
        self.report["plain"] = {"loss": float(plain.loss.mean()), "right": float(plain.right.mean())}
        self.report["trials"] = {name: figures.to_json() for name, figures in measured.items()}
        self.report["not_payable"] = refused
        table("mixed text", [{"trial": name, **figures} for name, figures in self.report["trials"].items()])

    def more_trials(self, trials: dict[str, Trial]) -> None:
        budget = next((b for b in (0.178, 0.28, 0.5) if self.payable(TopkChannels(b))), None)
        if budget is None:
            return
        trials.setdefault(f"partial on {budget}", Trial(self.reading(TopkChannels(budget))))
        num_experts = self.report["num_experts"]
        for ranks in (r for r in (2, 4, 8) if num_experts % r == 0):
            for quota in ("token", "experts", "weights"):
                reader = TopkChannels(budget, quota=quota)
                if not self.payable(reader, num_ranks=ranks):
                    continue
                trials[f"{ranks} ranks by {quota} {budget}"] = Trial(self.reading(reader, num_ranks=ranks))
        for size in (4, 16, 64):
            if size <= len(self.mixed):
                reading = self.reading(TopkChannels(budget, quota="batch"), batch_size=size)
                trials[f"one set for {size} tokens {budget}"] = Trial(reading)
        k0, batch = max(self.top_k // 2, 1), math.gcd(16, len(self.mixed))
        trials[f"oea(k0={k0})"] = Trial(None, f"oea(k0={k0})", batch)
        if self.payable(TopkChannels(budget), k0):
            trials[f"oea(k0={k0})+reader {budget}"] = Trial(self.reading(TopkChannels(budget)), f"oea(k0={k0})", batch)

    def kept_and_loss(self, budgets: Sequence[float]) -> None:
        """Measures whether a threshold keeps more channels for tokens whose next token is hard to predict."""
        text = self.mixed[:CHUNK, :-1]
        with torch.no_grad():
            logits = self.model(input_ids=text.to(self.model.device), use_cache=False).logits
        targets = self.mixed[:CHUNK, 1:].to(self.model.device)
        each = partial(torch.nn.functional.cross_entropy, reduction="none")
        loss = torch.stack([each(row.float(), target) for row, target in zip(logits, targets, strict=True)])
        correlations = {}
        for budget in budgets:
            reading = self.reading(ThresholdChannels(budget), thresholds=self.thresholds[budget])
            kept = kept_by_token(self.model, reading, text)
            correlations[f"{budget}"] = spearman(kept.ravel(), loss.cpu().double().numpy().ravel())
        self.report["kept_and_loss_spearman"] = correlations

    def generation(self, budgets: Sequence[float]) -> None:
        """Samples continuations with a threshold, with top-k and with the plain model. Measures repetition, and the
        channels that the threshold keeps along the text."""
        each = min(max(32 // len(self.text), 1), self.arguments.sequences)
        prompts = torch.cat([rows[:each, :PROMPT] for rows in self.text.values()])
        names = [name for name in self.text for _ in range(each)]
        length = min(prompts.shape[1] + self.arguments.generated, self.model.config.max_position_embeddings)
        written = {"plain": self.continued(prompts, length, None)}
        drift: dict[str, Any] = {}
        for budget in budgets:
            topk, kept = self.reading(TopkChannels(budget)), self.kept(TopkChannels(budget))
            written[f"topk {budget}"] = self.continued(prompts, length, topk)
            reading = self.reading(ThresholdChannels(budget), thresholds=self.thresholds[budget])
            written_text = written[f"threshold {budget}"] = self.continued(prompts, length, reading)
            drift[f"{budget}"] = drift_of(self.model, reading, written_text, names, prompts.shape[1], kept)
            assert float(topk.counts[:, 1].sum()) == float(topk.counts[:, 0].sum()) * kept
        repetition = {name: repetition_rate(text[:, prompts.shape[1] :]) for name, text in written.items()}
        self.report["repetition"] = repetition
        self.report["drift"] = drift
        print("repetition", {name: round(value, 4) for name, value in repetition.items()})

    def continued(self, prompts: torch.Tensor, length: int, reading: Reading | None) -> torch.Tensor:
        """Prompts and their sampled continuations, [sequences, length] int64."""
        torch.manual_seed(self.arguments.seed)
        decoder = Decoder(self.model, keep, len(prompts), length, endless=True)
        with reads(reading, self.model, whole_sequences=False):
            if self.model.device.type == "cuda":
                decoder.capture(prompts.to(self.model.device))
            decoder.start(prompts.to(self.model.device))
            decoder.steps(length - prompts.shape[1] - 1)
        return decoder.written.clone()


def main() -> None:
    parser = script_parser(__doc__, "reader_quality.json")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--sequences", type=int, default=64, help="of text, of each domain")
    parser.add_argument("--calibration", type=int, default=32, help="sequences that thresholds are fitted on")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--generated", type=int, default=960, help="tokens of each continuation; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = Bench(arguments).run()
    rows = claim_rows(report)
    report["claims"] = [asdict(row) for row in rows]
    report["command"] = command()
    write(arguments.out, report)
    print(markdown(rows))
    print(f"wrote {arguments.out}; seconds: {report['seconds']}")


if __name__ == "__main__":
    main()
