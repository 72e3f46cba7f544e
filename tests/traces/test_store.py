"""The Parquet store: what goes in comes out, whole or not at all."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.traces.store import StoredTrace, TraceWriter, block_bytes
from epsim.traces.trace import Block, CountsBlock, RankCountsBlock, TokenBlock, TraceMeta


def make_meta(**fields: Any) -> TraceMeta:
    return TraceMeta(**{"level": "counts", "num_layers": 2, "num_experts": 4, "top_k": 2, **fields})


def make_tokens(rng: np.random.Generator, meta: TraceMeta, sizes: list[int], first: int = 0) -> TokenBlock:
    """Steps first.. with the given numbers of tokens."""
    num_tokens = sum(sizes)
    ids = rng.random((num_tokens, meta.num_layers, meta.num_experts)).argsort(axis=2)[..., : meta.top_k]
    step = np.repeat(np.arange(len(sizes)), sizes)
    rank = rng.integers(0, max(meta.num_source_ranks, 1), num_tokens)
    order = np.lexsort((rank, step))
    scores = rng.random((num_tokens, meta.num_layers, meta.num_scores)) if meta.num_scores else None
    domain = np.array([f"d{i % 3}" for i in range(num_tokens)], dtype=object)
    return TokenBlock(
        np.arange(first, first + len(sizes)), step, rank[order], ids.astype(np.int64), scores, domain=domain
    )


def concatenate(blocks: list[Block]) -> dict[str, Any]:
    """All arrays of a run of blocks, tokens by their step's number."""
    if isinstance(blocks[0], TokenBlock):
        tokens = [b for b in blocks if isinstance(b, TokenBlock)]
        out: dict[str, Any] = {"step": np.concatenate([b.steps[b.token_step] for b in tokens])}
        for name in ("steps", "source_rank", "expert_ids", "scores", "score_ids", "domain"):
            parts = [getattr(b, name) for b in tokens]
            out[name] = None if parts[0] is None else np.concatenate(parts)
        return out
    return {n: np.concatenate([getattr(b, n) for b in blocks]) for n in ("steps", "counts")}


def assert_equal(a: list[Block], b: list[Block]) -> None:
    left, right = concatenate(a), concatenate(b)
    assert left.keys() == right.keys()
    for name in left:
        if left[name] is None:
            assert right[name] is None
        elif name == "scores":
            np.testing.assert_array_equal(left[name].astype(np.float16), right[name].astype(np.float16))
        else:
            np.testing.assert_array_equal(left[name], right[name])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999), steps=st.integers(1, 30), cut=st.integers(1, 30), group=st.sampled_from([1, 300, 10**6])
)
def test_counts_come_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int, cut: int, group: int
) -> None:
    rng = np.random.default_rng(seed)
    meta = make_meta(layers=(3, 7))
    counts = rng.integers(0, 2**38, (steps, 2, 4))
    numbers = np.sort(rng.choice(1000, steps, replace=False))
    blocks: list[Block] = [CountsBlock(numbers[i : i + cut], counts[i : i + cut]) for i in range(0, steps, cut)]
    path = tmp_path_factory.mktemp("t") / "t.parquet"
    with TraceWriter(path, meta, group_bytes=group) as writer:
        for block in blocks:
            writer.append(block)
    trace = StoredTrace(path)
    assert (trace.meta, trace.num_steps) == (meta, steps)
    for limit in (1, 200, 2**26):
        back = list(trace.blocks(max_bytes=limit))
        assert_equal(back, blocks)
        assert all(block_bytes(b) <= limit or len(b.steps) == 1 for b in back)
    low, high = sorted(rng.integers(0, steps + 1, 2))
    part = list(trace.blocks(low, high))
    assert sum(len(b.steps) for b in part) == high - low
    if low < high:
        assert_equal(part, [CountsBlock(numbers[low:high], counts[low:high])])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    sizes=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=4),
    num_scores=st.sampled_from([0, 2, 4]),
    group=st.sampled_from([1, 200, 10**6]),
)
def test_tokens_come_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, sizes: list[list[int]], num_scores: int, group: int
) -> None:
    rng = np.random.default_rng(seed)
    meta = make_meta(level="tokens", num_source_ranks=3, num_scores=num_scores)
    blocks: list[Block] = []
    for part in sizes:
        blocks.append(make_tokens(rng, meta, part, first=int(blocks[-1].steps[-1]) + 2 if blocks else 0))
    path = tmp_path_factory.mktemp("t") / "t.parquet"
    with TraceWriter(path, meta, group_bytes=group) as writer:
        for block in blocks:
            writer.append(block)
    trace = StoredTrace(path)
    assert trace.num_steps == sum(len(part) for part in sizes)
    assert_equal(list(trace.blocks()), blocks)
    assert_equal(list(trace.blocks(max_bytes=50)), blocks)
    assert sum(len(b.steps) for b in trace.blocks(1, trace.num_steps)) == trace.num_steps - 1


def test_rank_counts_and_score_ids(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    meta = make_meta(level="rank_counts", num_source_ranks=3)
    block = RankCountsBlock(np.arange(5), rng.integers(0, 9, (5, 2, 3, 4)))
    with TraceWriter(tmp_path / "r.parquet", meta) as writer:
        writer.append(block)
    assert_equal(list(StoredTrace(tmp_path / "r.parquet").blocks()), [block])

    meta = make_meta(level="tokens", num_scores=3)
    tokens = make_tokens(rng, meta, [4, 4])
    ids = rng.random((8, 2, 4)).argsort(axis=2)[..., :3]
    tokens = dataclasses.replace(tokens, score_ids=ids)
    with TraceWriter(tmp_path / "s.parquet", meta) as writer:
        writer.append(tokens)
    assert_equal(list(StoredTrace(tmp_path / "s.parquet").blocks()), [tokens])


def test_row_groups_outside_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceWriter(tmp_path / "t.parquet", make_meta(), group_bytes=64 * 10) as writer:
        writer.append(CountsBlock(np.arange(100), np.ones((100, 2, 4), dtype=np.int64)))
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def noted(self: pq.ParquetFile, group: int, columns: list[str]) -> pa.Table:
        read.append(group)
        return original(self, group, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    blocks = list(StoredTrace(tmp_path / "t.parquet").blocks(35, 42))
    assert read == [3, 4]
    assert np.concatenate([b.steps for b in blocks]).tolist() == list(range(35, 42))


def test_nothing_half_written(tmp_path: Path) -> None:
    block = CountsBlock(np.arange(2), np.ones((2, 2, 4), dtype=np.int64))

    def broken_off(error: type[BaseException], **options: bool) -> None:
        with TraceWriter(tmp_path / "t.parquet", make_meta(), **options) as writer:
            writer.append(block)
            raise error

    with pytest.raises(RuntimeError):
        broken_off(RuntimeError)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        broken_off(KeyboardInterrupt, keep_on_interrupt=True)
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]
    trace = StoredTrace(tmp_path / "t.parquet")
    assert trace.num_steps == 2
    assert "interrupted (KeyboardInterrupt): 2 finished steps kept" in trace.meta.notes[0]


def test_an_old_trace_survives_a_failed_write(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_meta()) as writer:
        writer.append(CountsBlock(np.arange(2), np.ones((2, 2, 4), dtype=np.int64)))
    with pytest.raises(ValueError, match="negative"), TraceWriter(path, make_meta()) as writer:
        writer.append(CountsBlock(np.arange(1), np.full((1, 2, 4), -1)))
    assert StoredTrace(path).num_steps == 2


ONES = np.ones((2, 2, 4), dtype=np.int64)
IDS = np.array([[[0, 1], [2, 3]]])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (CountsBlock(np.array([1, 1]), ONES), "step 1 is followed by 1"),
        (CountsBlock(np.array([5]), ONES), r"shape \[2, 2, 4\], not \[1, 2, 4\]"),
        (CountsBlock(np.array([0, 1]), -ONES), "negative"),
        (CountsBlock(np.array([0, 1]), ONES * 0.5), "whole numbers"),  # type: ignore[arg-type]
        (CountsBlock(np.array([0, 1]), ONES * 2**60), "more than 2\\^40 assignments"),
        (RankCountsBlock(np.array([0, 1]), ONES), "RankCountsBlock cannot go"),
    ],
)
def test_bad_counts(tmp_path: Path, block: Block, message: str) -> None:
    with pytest.raises(ValueError, match=message), TraceWriter(tmp_path / "t.parquet", make_meta()) as writer:
        writer.append(block)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_ids": np.array([[[0, 4], [2, 3]]])}, "expert id 4 of token 0 in layer 0 is outside 0..3"),
        ({"expert_ids": np.array([[[0, 1], [-2, 3]]])}, "expert id -2 of token 0 in layer 1"),
        ({"expert_ids": np.array([[[0, 1], [3, 3]]])}, "token 0 chooses expert 3 twice in layer 1"),
        ({"expert_ids": IDS[:, :1]}, r"shape \[1, 1, 2\]"),
        ({"expert_ids": IDS * 1.0}, "whole numbers"),
        ({"source_rank": np.array([3])}, "source rank 3 is outside 0..2"),
        ({"token_step": np.array([1])}, "token_step"),
        ({"scores": np.ones((1, 2, 2))}, "keeps no scores"),
    ],
)
def test_bad_tokens(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    block = TokenBlock(np.array([0]), np.array([0]), np.array([0]), IDS)
    meta = make_meta(level="tokens", num_source_ranks=3)
    with pytest.raises(ValueError, match=message), TraceWriter(tmp_path / "t.parquet", meta) as writer:
        writer.append(dataclasses.replace(block, **change))


def test_two_empty_slots_are_no_duplicate(tmp_path: Path) -> None:
    ids = np.array([[[-1, -1], [2, -1]]])
    with TraceWriter(tmp_path / "t.parquet", make_meta(level="tokens")) as writer:
        writer.append(TokenBlock(np.array([0]), np.array([0]), np.array([0]), ids))
    block = next(StoredTrace(tmp_path / "t.parquet").blocks())
    assert isinstance(block, TokenBlock)
    assert block.to_counts(4).counts.tolist() == [[[0, 0, 0, 0], [0, 0, 1, 0]]]


def test_foreign_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        StoredTrace(tmp_path / "none.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(ValueError, match=r"foreign.parquet: a Parquet file, but not a trace"):
        StoredTrace(tmp_path / "foreign.parquet")
    path = tmp_path / "t.parquet"
    with TraceWriter(path, make_meta()) as writer:
        writer.append(CountsBlock(np.arange(2), ONES))
    whole = path.read_bytes()
    for size in (0, 3, 50, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.parquet").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut.parquet: "):
            StoredTrace(tmp_path / "cut.parquet")


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1), value=st.integers(1, 255), level=st.sampled_from(["counts", "tokens"]))
def test_a_changed_byte_is_noticed_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: float, value: int, level: Any
) -> None:
    path = tmp_path_factory.mktemp("t") / "t.parquet"
    meta = make_meta(level=level)
    block: Block = CountsBlock(np.arange(2), ONES)
    if level == "tokens":
        block = make_tokens(np.random.default_rng(0), meta, [3, 2])
    with TraceWriter(path, meta) as writer:
        writer.append(block)
    whole = bytearray(path.read_bytes())
    whole[int(place * (len(whole) - 1))] ^= value
    path.write_bytes(whole)
    try:
        back = list(StoredTrace(path).blocks())
    except ValueError as error:
        message = str(error)
    else:
        assert_equal(back, [block])
        message = "t.parquet"
    assert "t.parquet" in message
    assert "\n" not in message


def test_reading_speed(tmp_path: Path) -> None:
    """Blocks cost little beyond what Arrow takes to decode the file, measured beside it: busy machines slow both."""
    meta = make_meta(num_layers=58, num_experts=256, top_k=8)
    counts = np.random.default_rng(0).poisson(60, (400, 58, 256)).astype(np.int64)
    with TraceWriter(tmp_path / "t.parquet", meta) as writer:
        writer.append(CountsBlock(np.arange(400), counts))
    ours = decoding = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        rows = sum(len(b.steps) * 58 for b in StoredTrace(tmp_path / "t.parquet").blocks())
        ours = min(ours, time.perf_counter() - begin)
        begin = time.perf_counter()
        pq.read_table(tmp_path / "t.parquet", use_threads=False)
        decoding = min(decoding, time.perf_counter() - begin)
    print(f"{rows / ours:,.0f} rows/s, {ours / decoding:.2f} x the decoding alone")
    assert rows == 400 * 58
    assert ours < 4 * decoding


@pytest.mark.parametrize("with_ids", [False, True])
def test_scores_and_phase_by_step(tmp_path: Path, with_ids: bool) -> None:
    """Prefill steps without scores between decode steps with them: each block has its scores or none, and its phase."""
    rng = np.random.default_rng(0)
    meta = make_meta(level="tokens", num_source_ranks=2, num_scores=3 if with_ids else 4)
    plan = [("prefill", [5, 0]), ("decode", [2, 3]), ("decode", [1]), ("prefill", [6]), ("decode", [2])]
    made: list[TokenBlock] = []
    first = 0
    for phase, sizes in plan:
        block = make_tokens(rng, meta, sizes, first)
        first += len(sizes)
        block = dataclasses.replace(
            block,
            scores=block.scores if phase == "decode" else None,
            score_ids=rng.integers(0, 4, (sum(sizes), 2, 3)) if with_ids and phase == "decode" else None,
            phase=np.array([phase] * len(sizes), dtype=object),
        )
        made.append(block)
    with TraceWriter(tmp_path / "t.parquet", meta) as writer:
        for block in made:
            writer.append(block)
    read = [b for b in StoredTrace(tmp_path / "t.parquet").blocks() if isinstance(b, TokenBlock)]
    assert [b.scores is not None for b in read] == [False, True, False, True]
    assert [list(b.steps) for b in read] == [[0, 1], [2, 3, 4], [5], [6]]
    assert np.concatenate([b.phase for b in read if b.phase is not None]).tolist() == [
        *("prefill", "unknown"),  # a step without tokens has no row to hold its phase
        *("decode", "decode", "decode", "prefill", "decode"),
    ]
    for name in ("scores", "score_ids"):
        put = [getattr(b, name) for b in made if getattr(b, name) is not None]
        got = [getattr(b, name) for b in read if getattr(b, name) is not None]
        assert len(put) == (0 if name == "score_ids" and not with_ids else 3)
        if put:
            np.testing.assert_array_equal(np.concatenate(put).astype(np.float16), np.concatenate(got))


def test_bad_phase(tmp_path: Path) -> None:
    block = TokenBlock(np.array([0]), np.array([0]), np.array([0]), IDS, phase=np.array(["late"], dtype=object))
    meta = make_meta(level="tokens", num_source_ranks=3)
    with (
        pytest.raises(ValueError, match="phase 'late' is not one of prefill"),
        TraceWriter(tmp_path / "t.parquet", meta) as writer,
    ):
        writer.append(block)


@pytest.mark.parametrize("level", ["counts", "rank_counts", "tokens"])
def test_blocks_of_at_most_so_many_steps(make_trace: Callable[..., StoredTrace], level: str) -> None:
    trace = make_trace(level, steps=7)
    whole = next(iter(trace.blocks()))
    sizes = [len(block.steps) for block in trace.blocks(1, 7, max_steps=4)]
    assert sizes == [4, 2]
    joined = np.concatenate([block.steps for block in trace.blocks(max_steps=3)])
    np.testing.assert_array_equal(joined, whole.steps)
