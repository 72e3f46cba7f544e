"""The recorder's files: interruptions, full disks, mistakes, and steps in bounded memory."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.traces import record as recording
from epsim.traces.record import record
from epsim.traces.routers import find_routers
from epsim.traces.store import TraceWriter
from epsim.traces.trace import TokenBlock

transformers = pytest.importorskip("transformers")
models = runpy.run_path(str(Path(__file__).with_name("recorded_models.py")))
E, SMALL = models["E"], models["SMALL"]
make_model, UsedExperts, read = (models[name] for name in ("make_model", "UsedExperts", "read"))


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("no_grad")
def test_interruption_keeps_finished_steps(tmp_path: Path) -> None:
    model = make_model("Qwen3Moe")
    used = UsedExperts(model)
    inputs = torch.randint(1, 64, (2, 5))
    halfway = find_routers(model)[-1].experts

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "t.parquet"):
        model(input_ids=inputs)
        model(input_ids=inputs + 1)
        halfway.register_forward_hook(interrupt)
        model(input_ids=inputs)
    meta, blocks = read(tmp_path / "t.parquet")
    assert len(blocks) == 2
    np.testing.assert_array_equal(blocks[1].expert_ids, used.ids(1))
    assert "interrupted (KeyboardInterrupt): 2 finished steps kept" in " ".join(meta.notes)
    assert all(not r.module._forward_hooks for r in find_routers(model))
    assert not model._forward_pre_hooks


@pytest.mark.usefixtures("no_grad")
def test_mistakes(tmp_path: Path) -> None:
    model = make_model("Olmoe")
    with pytest.raises(ValueError, match="has no router"), record(torch.nn.Linear(2, 2), tmp_path / "t.parquet"):
        pass
    with pytest.raises(ValueError, match="made no forward pass"), record(model, tmp_path / "t.parquet"):
        pass
    with pytest.raises(FileNotFoundError, match="no such folder"), record(model, tmp_path / "nowhere" / "t.parquet"):
        pass
    with pytest.raises(ValueError, match="num_source_ranks 0"), record(model, tmp_path / "t", num_source_ranks=0):
        pass
    with pytest.raises(ValueError, match="3 domains given for a batch of 2"), record(model, tmp_path / "t") as recorder:
        recorder.domains = ["a", "b", "c"]
        model(input_ids=torch.randint(1, 64, (2, 5)))
    assert not (tmp_path / "t").exists()
    find_routers(model)[0].module.__class__ = type("StrangeRouter", (type(find_routers(model)[0].module),), {})
    with pytest.raises(ValueError, match="no score rule is known for StrangeRouter"):  # noqa: SIM117
        with record(model, tmp_path / "t", num_scores="all"):
            model(input_ids=torch.randint(1, 64, (2, 5)))
    with record(model, tmp_path / "t"):
        model(input_ids=torch.randint(1, 64, (2, 5)))
    assert len(read(tmp_path / "t")[1]) == 1


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("source_ranks", [0, 2], r"source rank 2 is outside 0..1"),
        ("domains", ["a", 1], "domain 1 is not a string"),
        ("phase", "warmup", "phase 'warmup' is not one of"),
        ("step", 0, "step 0 follows step 0"),
    ],
)
@pytest.mark.usefixtures("no_grad")
def test_wrong_settings_are_told_at_once(setting: str, value: Any, message: str, tmp_path: Path) -> None:
    """And cost only the pass they were set for."""
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (2, 4))
    with record(model, tmp_path / "t.parquet", num_source_ranks=2) as recorder:
        model(input_ids=ids)
        before = getattr(recorder, setting)
        setattr(recorder, setting, value)
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids)
        setattr(recorder, setting, before)
        model(input_ids=ids)
    assert len(read(tmp_path / "t.parquet")[1]) == 2


@pytest.mark.usefixtures("no_grad")
def test_paths_are_tried_before_the_first_pass(tmp_path: Path) -> None:
    model = make_model("Olmoe")
    for path in (tmp_path, "/dev/full", "/proc/t.parquet", tmp_path / "nowhere" / "t.parquet"):
        with pytest.raises((ValueError, FileNotFoundError)), record(model, path):
            pytest.fail("entered")
    with pytest.raises(ValueError, match="phase 'x' is not one of"), record(model, tmp_path / "t", phase="x"):  # type: ignore[arg-type]
        pytest.fail("entered")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_grad")
def test_routers_of_another_form_are_refused(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        **{**SMALL, "num_experts_per_tok": 1}, intermediate_size_mlp=32, num_local_experts=E, moe_layers=[0, 1, 2]
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    with (
        pytest.raises(ValueError, match=r"Llama4Router does not return .* it cannot be recorded"),
        record(model, tmp_path / "t.parquet"),
    ):
        model(input_ids=torch.randint(1, 64, (1, 4)))


@pytest.mark.usefixtures("no_grad")
def test_termination_keeps_finished_steps(tmp_path: Path) -> None:
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (2, 4))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(SystemExit) as stop, record(model, tmp_path / "t.parquet"):
        model(input_ids=ids)
        model(input_ids=ids)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stop.value.code == 128 + signal.SIGTERM
    assert len(read(tmp_path / "t.parquet")[1]) == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("no_grad")
def test_interruption_while_waiting_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were about to be handed over are finished steps too."""
    monkeypatch.setattr(recording, "FLUSH_BYTES", 1)
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (2, 4))

    class Interrupted:
        def result(self) -> None:
            recorder._writing = before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), record(model, tmp_path / "t.parquet") as recorder:
        model(input_ids=ids)
        before = recorder._writing
        recorder._writing = Interrupted()  # type: ignore[assignment]
        model(input_ids=ids)
    assert len(read(tmp_path / "t.parquet")[1]) == 2


@pytest.mark.usefixtures("no_grad")
def test_many_small_steps_are_handed_over_in_time(tmp_path: Path) -> None:
    """A pass of one token is 18 bytes of ids and some kilobytes of objects: the objects count."""
    model, ids = make_model("Olmoe"), torch.randint(1, 64, (1, 1))
    with record(model, tmp_path / "t.parquet") as recorder:
        model(input_ids=ids)
        assert recorder._finished_bytes >= 4096


@pytest.mark.usefixtures("no_grad")
def test_passes_are_joined_to_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handing over after each pass, or all at once: the same trace; and of many passes few blocks are made."""
    model = make_model("Olmoe")
    used = UsedExperts(model)
    appended: list[TokenBlock] = []
    append = TraceWriter.append

    def watched(self: TraceWriter, block: TokenBlock) -> None:
        appended.append(block)
        append(self, block)

    monkeypatch.setattr(TraceWriter, "append", watched)
    passes = [torch.randint(1, 64, shape) for shape in ((2, 5), (3, 1), (3, 1), (2, 7), (2, 4), (4, 1))]
    for limit in (1, 1 << 30):
        monkeypatch.setattr(recording, "FLUSH_BYTES", limit)
        appended.clear()
        used.passes.clear()
        with record(model, tmp_path / "t.parquet", num_scores="all", num_source_ranks=2) as recorder:
            recorder.scored_phases = ("decode",)
            for ids in passes:
                recorder.domains = [f"{len(ids)}.{b}" for b in range(len(ids))]
                model(input_ids=ids)
        assert [len(b.steps) for b in appended] == ([1] * 6 if limit == 1 else [1, 2, 2, 1])
        _, blocks = read(tmp_path / "t.parquet")
        for step, (block, ids) in enumerate(zip(blocks, passes, strict=True)):
            np.testing.assert_array_equal(block.expert_ids, used.ids(step))
            assert block.domain is not None
            assert block.domain.tolist() == [f"{len(ids)}.{b}" for b in range(len(ids)) for _ in range(ids.shape[1])]
            assert (block.scores is not None) == (ids.shape[1] == 1)


@pytest.mark.usefixtures("no_grad")
def test_full_disk(tmp_path: Path) -> None:
    """Told once, and nothing stays behind."""
    model = make_model("Olmoe")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match="nothing is left") as error, record(model, tmp_path / "t.parquet"):
            model(input_ids=torch.randint(1, 64, (8, 100)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(error.value).count("nothing is left") == 1
    assert not list(tmp_path.iterdir())
