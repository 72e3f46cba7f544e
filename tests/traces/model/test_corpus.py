"""The corpus from packages laid out by hand: no network."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from epsim.traces.model import corpus
from epsim.traces.model.options import FetchOptions

pytest.importorskip("tokenizers")

from epsim.traces.model import tokens

LONG = "All rivers run into the sea; yet the sea is not full. "


def lay_out(folder: Path, package: str, files: dict[str, bytes]) -> None:
    tree = folder / "packages" / package
    for name, content in {**files, "VERSION": b"1.0-1"}.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two domains of forty documents each; one package holds one long file."""
    monkeypatch.setattr(
        corpus,
        "DOMAINS",
        {"prose": (corpus.Source("tales", "**/*.gz"),), "words": (corpus.Source("dict", "d/*.dz", in_pieces=True),)},
    )
    tales = {f"t/{i}.txt.gz": gzip.compress(f"Tale {i}. {LONG * 20}{i * i}".encode(), mtime=0) for i in range(40)}
    tales["t/again.txt.gz"] = tales["t/3.txt.gz"]
    tales["t/short.txt.gz"] = gzip.compress(b".so man1/other.1", mtime=0)
    tales["usr/share/doc/tales/copyright"] = (
        b"Files: *\nLicense: Expat\n\nFiles: t/*\nLicense: GPL-2+\n\nLicense: Expat\n"
    )
    lay_out(tmp_path, "tales", tales)
    entries = "".join(f"word{i}\n  a thing of number {i}\n" for i in range(20_000))
    copyright_text = b"You may use it under the GNU General\n  Public License, or as BSD code.\n"
    files = {"d/gcide.dict.dz": gzip.compress(entries.encode() + b"\x92\n", mtime=0)}
    lay_out(tmp_path, "dict", {**files, "usr/share/doc/dict/copyright": copyright_text})
    return tmp_path


@pytest.mark.usefixtures("cache")
def test_split(cache: Path) -> None:
    texts, description = corpus.fetch_texts(cache, 20)
    prose = texts["prose"]
    every = [*prose.train, *prose.heldout]
    assert len(every) == len(set(every)) == 40  # the copy and the pointer page are gone
    names = [(n, t) for n, t in corpus.documents(corpus.DOMAINS["prose"][0], cache / "packages" / "tales")]
    held = {t for n, t in names if corpus.digest(n) % corpus.HELD_OUT_EVERY == 0}
    assert set(prose.heldout) <= held
    assert not set(prose.train) & set(prose.heldout)
    pieces = [*texts["words"].train, *texts["words"].heldout]
    assert len(pieces) > 20
    assert max(map(len, pieces)) < corpus.PIECE_CHARACTERS + 100
    assert all(piece.startswith(("word", "  a thing")) for piece in pieces)
    packages = description["packages"]
    assert isinstance(packages, dict)
    assert packages["tales"] == {"domain": "prose", "version": "1.0-1", "licences": ["Expat", "GPL-2+"]}
    assert packages["dict"]["licences"] == ["free text that mentions GNU General Public License, BSD"]
    lay_out(cache, "tales-more", {"t/x": b""})
    documentation = cache / "packages" / "tales-more" / "usr" / "share" / "doc"
    documentation.mkdir(parents=True)
    (documentation / "tales-more").symlink_to("tales")
    assert corpus.licences(cache / "packages" / "tales-more") == ["those of tales"]


def test_limit_on_text(cache: Path) -> None:
    texts, _ = corpus.fetch_texts(cache, 0.005)
    size = sum(len(t.encode()) for t in [*texts["prose"].train, *texts["prose"].heldout])
    assert 5000 < size < 5000 + 1200


def test_fetch_is_repeatable(cache: Path) -> None:
    folder = tokens.fetch_corpus(FetchOptions(cache=cache, vocabulary=400))
    first = tokens.load(cache)
    tokens.fetch_corpus(FetchOptions(cache=cache, vocabulary=400))
    again = tokens.load(cache)
    assert first.domains == ["prose", "words"]
    assert first.vocabulary == 400
    for part in ("train", "heldout"):
        for name in first.domains:
            np.testing.assert_array_equal(getattr(first, part)[name], getattr(again, part)[name])
    texts, _ = corpus.fetch_texts(cache, 20)
    decoded = first.tokenizer.decode_batch(
        [ids.tolist() for ids in np.split(first.train["prose"], np.flatnonzero(first.train["prose"] == 0) + 1)[:-1]],
        skip_special_tokens=True,
    )
    assert decoded == texts["prose"].train
    written = json.loads((folder / "corpus.json").read_text())
    assert written["domains"]["words"]["train_tokens"] == len(first.train["words"])


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="run `epsim model corpus` first"):
        tokens.load(tmp_path)
    with pytest.raises(ValueError, match="--megabytes 0"):
        FetchOptions(megabytes=0)
    with pytest.raises(ValueError, match="--vocabulary 20"):
        FetchOptions(vocabulary=20)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(ValueError, match="apt-get is not installed"):
        corpus.download("tales", tmp_path)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    failed = subprocess.CompletedProcess([], 100, "", "E: Unable to locate package tales\n")
    monkeypatch.setattr("subprocess.run", lambda *a, **k: failed)
    with pytest.raises(ValueError, match="apt-get download tales failed: E: Unable to locate package tales"):
        corpus.download("tales", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPSIM_CACHE", str(tmp_path))
    assert corpus.cache_folder() == tmp_path
    monkeypatch.delenv("EPSIM_CACHE")
    assert corpus.cache_folder() == Path.home() / ".cache" / "epsim"


def test_few_documents_still_hold_one_out() -> None:
    names = [f"n{i}" for i in range(200)]
    spared = [(n, f"text of {n}") for n in names if corpus.digest(n) % corpus.HELD_OUT_EVERY][:4]
    texts = corpus.split(spared, 20)
    assert (len(texts.train), len(texts.heldout)) == (3, 1)
    assert {*texts.train, *texts.heldout} == {text for _, text in spared}
    assert corpus.split(spared[:1], 20).heldout == []


def test_no_held_out_text_is_trained_on() -> None:
    """By document: the same text under two names lands on one side."""
    found = [(f"n{i}", f"text {i % 150}") for i in range(300)]
    texts = corpus.split(found, 20)
    assert len(texts.heldout) > 2
    assert not set(texts.heldout) & set(texts.train)
    assert len(texts.heldout) + len(texts.train) == 150


@pytest.mark.parametrize("name", ["tokens.npz", "tokenizer.json"])
def test_damaged_corpus(name: str, cache: Path) -> None:
    folder = tokens.fetch_corpus(FetchOptions(cache=cache, vocabulary=400))
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(ValueError, match=r"the corpus in .* is damaged .*run `epsim model corpus` again"):
        tokens.load(cache)


@pytest.mark.parametrize("megabytes", [-1, float("nan"), float("inf")])
def test_sizes_that_cannot_be(megabytes: float) -> None:
    with pytest.raises(ValueError, match="--megabytes"):
        FetchOptions(megabytes=megabytes)
