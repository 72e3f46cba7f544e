"""The bundled sample trace is what its description says."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from epsim.cli.main import main
from epsim.traces.importing import sample_path
from epsim.traces.store import StoredTrace
from epsim.traces.trace import TokenBlock


@pytest.fixture(scope="module")
def steps() -> list[TokenBlock]:
    trace = StoredTrace(sample_path())
    blocks = [b for i in range(trace.num_steps) for b in trace.blocks(i, i + 1)]
    assert all(isinstance(b, TokenBlock) for b in blocks)
    return [b for b in blocks if isinstance(b, TokenBlock)]


def test_size_and_description() -> None:
    trace = StoredTrace(sample_path())
    assert sample_path().stat().st_size <= 6 * 2**20
    meta = trace.meta
    assert (meta.level, meta.origin, meta.phase) == ("tokens", "recorded", "mixed")
    assert (meta.num_layers, meta.num_experts, meta.top_k, meta.num_scores) == (4, 64, 8, 64)
    assert (meta.num_source_ranks, meta.shared_cost) == (16, 1.0)
    assert "epsim model train && epsim model record" in meta.source


def test_both_halves_hold_all_kinds(steps: list[TokenBlock]) -> None:
    """History and scored part: prefill of 2,048 tokens, decode at 16 and 64, of mixed and of single domains."""
    kinds: dict[int, Counter[tuple[str, int, str]]] = {0: Counter(), 1: Counter()}
    domains: dict[int, set[str]] = {0: set(), 1: set()}
    for place, block in enumerate(steps):
        assert block.phase is not None
        assert block.domain is not None
        half, labels = 2 * place // len(steps), set(block.domain)
        domains[half] |= labels
        kind = "mixed" if len(labels) == 8 else "single"
        assert kind == "mixed" or len(labels) == 1
        kinds[half][(str(block.phase[0]), len(block.token_step), kind)] += 1
    expected = {
        (phase, size, kind)
        for phase, size in (("prefill", 2048), ("decode", 16), ("decode", 64))
        for kind in ("mixed", "single")
    }
    assert set(kinds[0]) == set(kinds[1]) == expected
    assert domains[0] == domains[1]
    assert len(domains[0]) == 8


def test_ranks_hold_equal_shares(steps: list[TokenBlock]) -> None:
    for block in steps:
        held = np.bincount(block.source_rank, minlength=16)
        assert (held == len(block.token_step) // 16).all()


def test_scores_choose_the_experts(steps: list[TokenBlock]) -> None:
    """Softmax over all experts in half precision; no expert left out scores higher than one chosen."""
    for block in steps:
        assert block.phase is not None
        assert (block.scores is not None) == (block.phase[0] == "decode")
        if block.scores is None:
            continue
        scores = block.scores.astype(np.float64)
        assert np.abs(scores.sum(-1) - 1).max() < 2e-3
        lowest_chosen = np.take_along_axis(scores, block.expert_ids.astype(np.int64), axis=2).min(-1)
        np.testing.assert_array_equal(lowest_chosen, np.sort(scores, axis=2)[..., -8])


def test_show_tells_how_it_is_made(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["epsim", "traces", "show", "sample"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "epsim model corpus && epsim model train && epsim model record" in printed
    assert "phase: mixed, 336 decode steps, 24 prefill steps" in printed
