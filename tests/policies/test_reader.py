"""Channel readers in stacks, and the bytes that they make of a rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epsim.cost.experts_time import ExpertsTime
from epsim.cost.layer_time import LayerTiming
from epsim.kernels.reader import ReadBytes
from epsim.machines.hardware import load_hardware
from epsim.models.spec import load_model
from epsim.placement.base import Placement
from epsim.policies.apply import Setting, bind
from epsim.policies.reader import Dense, ThresholdChannels, TopkChannels
from epsim.policies.stack import parse_stack
from epsim.score.time_metrics import timed_metrics
from epsim.traces.trace import TokenBlock

SHAPE = (2048, 768, 2, 8)


def read(reader: TopkChannels | Dense, tokens: float, active: float) -> float:
    """Bytes of a rank with so many assignments on so many experts."""
    return float(reader.bytes_read(torch.tensor([tokens]), torch.tensor([active]), *SHAPE))


def test_a_router_and_a_reader_in_one_stack() -> None:
    stack = parse_stack("oea(k0=4)+topk-channels(0.178)")
    assert stack.reader == TopkChannels(0.178)
    assert str(stack) == "contiguous+oea(k0=4)+topk-channels(budget=0.178)"
    assert parse_stack(str(stack)) == stack
    assert parse_stack("dense").reader == Dense()
    other = parse_stack("threshold-channels(0.2,screen=full,score=int4-gate,units=raw)")
    assert other.reader == ThresholdChannels(0.2, "int4-gate", "full", "off", "raw")
    assert parse_stack(str(other)) == other
    assert parse_stack("topk-channels(budget=0.2)") != parse_stack("threshold-channels(budget=0.2)")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topk-channels", "needs budget=: write topk-channels"),
        ("topk-channels(0)", "budget=0: give a share above 0 and up to 1"),
        ("topk-channels(1.5)", "budget=1.5: give a share"),
        ("topk-channels(nan)", "budget=nan: give a share"),
        ("topk-channels(-1)", "budget=-1: give a share"),
        ("threshold-channels(budget=-1.0)", "budget=-1: give a share"),
        ("topk-channels(1e-400)", "budget=0: give a share"),
        ("topk-channels(17.8%)", "budget=17.8% in .* is not of type float"),
        ("threshold-channels(0.2,quota=batch)", "quota=batch: a threshold has no number to divide: leave quota out"),
        ("threshold-channels(0.2,quota=weights)", "quota=weights: a threshold has no number"),
        ("topk-channels(much)", "budget=much in .* is not of type float"),
        ("topk-channels(0.1,budget=0.2)", "'0.1' in .* is not key=value"),
        ("topk-channels(budget=0.1,0.2)", "'0.2' in .* is not key=value"),
        ("topk-channels(0.1,screen=half)", "choose partial or full"),
        ("oea(4)", "'4' in .* is not key=value"),
        ("dense+topk-channels(0.1)", "two policies for reader"),
    ],
)
def test_mistakes(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_stack(text)


def test_one_token_reads_its_budget() -> None:
    """A token with its 8 experts on one rank reads what `ReadBytes.token` says, which is within the budget."""
    for reader, sizes in (
        (TopkChannels(0.178), ReadBytes(2048, 768)),
        (TopkChannels(0.28, screen="full", restore="off"), ReadBytes(2048, 768, coordinates=128, rank=0)),
        (TopkChannels(0.2, "int4-gate"), ReadBytes(2048, 768, rank=0, source="int4-gate")),
        (TopkChannels(0.5, "cats"), ReadBytes(2048, 768, rank=0, source="cats")),
    ):
        exact = sizes.token(8, sizes.kept(reader.budget, 8))
        assert read(reader, 8, 8) == pytest.approx(exact, rel=1e-9)
        assert exact <= reader.budget * 8 * sizes.expert < exact + sizes.kept_channel
    assert read(Dense(), 8, 8) == read(TopkChannels(1.0), 8, 8) == 8 * 3 * 2048 * 768 * 2


def test_a_batch_reads_the_union_of_independent_choices() -> None:
    """Against drawn choices: three tokens on each of four experts."""
    rng = np.random.default_rng(0)
    reader, sizes = TopkChannels(0.28), ReadBytes(2048, 768)
    share = sizes.kept(0.28, 8) / (8 * 768)
    drawn = []
    for _ in range(400):
        kept = rng.random((3, 768)) < share
        coordinates = rng.random((3, 2048)) < 80 / 128
        drawn.append(
            sizes.beside_codes
            + coordinates.any(0).sum() * sizes.code_row
            + kept.any(0).sum() * sizes.kept_channel
            + (~kept).any(0).sum() * sizes.skipped_channel
        )
    assert read(reader, 12, 4) == pytest.approx(4 * np.mean(drawn) + sizes.once, rel=2e-3)
    # One more token reads more, never twice as much, and never more than reading the experts whole.
    found = [read(reader, 4 * tokens, 4) for tokens in range(1, 40)]
    assert found == sorted(found)
    assert found[1] < 2 * found[0]
    assert found[-1] == read(Dense(), 160, 4)


def test_experts_of_unequal_numbers_of_tokens_read_less_than_is_counted() -> None:
    """Exact unions by drawn choices, at the numbers that each expert has; the mean number stands for all of them, which
    counts more (here up to a quarter), as a union grows ever slower."""
    rng = np.random.default_rng(1)
    for reader in (
        TopkChannels(0.178),
        TopkChannels(0.28, screen="full", restore="off"),
        TopkChannels(0.5, "int4-gate"),
    ):
        sizes = reader.sizes(2048, 768)
        share = sizes.kept(reader.budget, 8) / (8 * 768)
        for numbers in ([1, 1, 1, 5], [2, 3, 4], [1] * 6, [0, 7, 1]):
            exact = 0.0
            for number in (n for n in numbers if n):
                for _ in range(600):
                    kept = rng.random((number, 768)) < share
                    coordinates = rng.random((number, 2048)) < sizes.coordinates / 128
                    codes = coordinates.any(0).sum() * sizes.code_row if reader.score == "sketch" else 0
                    channels = kept.any(0).sum() * sizes.kept_channel + (~kept).any(0).sum() * sizes.skipped_channel
                    exact += (sizes.beside_codes + codes + channels) / 600
            exact += sizes.once
            active = sum(n > 0 for n in numbers)
            found = read(reader, sum(numbers), active)
            assert exact * 0.997 < found <= exact * (1.003 if len(set(numbers)) == 1 else 1.25), (reader, numbers)


def test_a_batch_that_chooses_as_one_reads_its_budget() -> None:
    reader, sizes = TopkChannels(0.178, quota="batch"), ReadBytes(2048, 768)
    for active in (1, 8, 40):
        exact = sizes.token(active, sizes.kept(0.178, active))
        assert read(reader, 3 * active, active) == read(reader, 90 * active, active) == pytest.approx(exact, rel=1e-12)
    assert not any("independently" in note for note in reader.notes)


def test_nothing_is_read_where_nothing_is_served() -> None:
    assert read(TopkChannels(0.178), 0, 0) == 0


def test_a_budget_below_the_screen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a budget of 0.05 is too small: with 8 experts"):
        read(TopkChannels(0.05), 8, 8)


def test_in_a_replay_fewer_bytes_are_read_and_layers_take_less_time() -> None:
    """Four tokens of 8 experts each on one of two ranks: bytes as the reader says, time by the roofline."""
    timing = LayerTiming(ExpertsTime(load_hardware("h200"), load_model("qwen3-30b-a3b")))
    setting = Setting(0, 0.0, 8, (0,), rows=True)
    placement = Placement(torch.arange(128)[None], 128, 2)
    ids = np.arange(32, dtype=np.int64).reshape(4, 1, 8)
    step = np.zeros(4, dtype=np.int64)
    block = TokenBlock(steps=np.zeros(1, dtype=np.int64), token_step=step, source_rank=step, expert_ids=ids)
    found = {}
    for text in ("contiguous", "topk-channels(0.178)"):
        stack = parse_stack(text)
        bound = bind(stack, placement, setting)
        metrics, *_ = timed_metrics(timing, bound.load(block), stack, False, False, None)
        assert not isinstance(metrics["bytes_read"], str)
        assert not isinstance(metrics["layer_time_us"], str)
        found[text] = (float(metrics["bytes_read"]), float(metrics["layer_time_us"]))
        assert any("choose channels and coordinates independently" in note for note in bound.notes) == stack.reader.acts
    sizes = ReadBytes(2048, 768)
    # 32 experts of a token each: all but the map's basis and the signs is as for four tokens alone.
    tokens = 4 * sizes.token(8, sizes.kept(0.178, 8)) - 3 * sizes.once
    (whole, slow), (less, fast) = found.values()
    assert whole == 32 * sizes.expert
    assert less == pytest.approx(tokens, rel=1e-9)
    model, memory = timing.model, load_hardware("h200").memory_gb_per_s
    rows = 32 * (model.dispatch_row_bytes + model.combine_row_bytes)
    read, kernel = (less + rows) * 1e-3 / memory, load_hardware("h200").kernel_us
    # Reading whole experts, a grouped product fills tiles of 128 rows; both add the same exchange.
    computing = 32 * 128 * timing.experts.computing
    dense = max((whole + rows) * 1e-3 / memory, computing)
    assert slow - fast == pytest.approx(dense - read, rel=1e-9)
    assert slow - dense - kernel > 0
