"""Tokenizes the corpus: trains the tokenizer and writes the file of token ids that training reads."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from epsim.traces.model import corpus
from epsim.traces.model.options import FetchOptions

END = "<|end|>"
END_ID = 0

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Corpus:
    """train, heldout: the token ids of each domain; END_ID ends each document."""

    train: dict[str, Tokens]
    heldout: dict[str, Tokens]
    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def domains(self) -> list[str]:
        return list(self.train)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Trains a byte-level byte-pair encoding, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    parts: list[Tokens] = []
    for first in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[first : first + 256]):
            parts.append(np.array([*encoding.ids, END_ID], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


def tokenize(texts: dict[str, corpus.Texts], vocabulary: int, sample_characters: int = 3_000_000) -> Corpus:
    """Trains the tokenizer on up to sample_characters of each domain, then encodes all text."""
    sample: list[str] = []
    for domain in texts.values():
        left = sample_characters
        for text in domain.train:
            if left <= 0:
                break
            sample.append(text[:left])
            left -= len(text)
    tokenizer = train_tokenizer(sample, vocabulary)
    return Corpus(
        train={name: encode(tokenizer, domain.train) for name, domain in texts.items()},
        heldout={name: encode(tokenizer, domain.heldout) for name, domain in texts.items()},
        tokenizer=tokenizer,
    )


def save(made: Corpus, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made.tokenizer.save(str(folder / "tokenizer.json"))
    arrays = {f"train.{name}": ids for name, ids in made.train.items()}
    arrays |= {f"heldout.{name}": ids for name, ids in made.heldout.items()}
    np.savez_compressed(folder / "tokens.npz", **arrays)  # type: ignore[arg-type]


def load(cache: Path | None = None) -> Corpus:
    """The corpus that `epsim model corpus` prepared. Raises ValueError if it is missing or damaged."""
    folder = (cache or corpus.cache_folder()) / "corpus"
    if not (folder / "tokens.npz").exists():
        raise ValueError(f"no corpus in {folder}: run `epsim model corpus` first (needs apt-get and a Debian mirror)")
    train: dict[str, Tokens] = {}
    heldout: dict[str, Tokens] = {}
    try:
        with np.load(folder / "tokens.npz") as arrays:
            for key in arrays.files:
                part, name = key.split(".", 1)
                (train if part == "train" else heldout)[name] = arrays[key]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # The tokenizers library raises plain Exception.
        raise ValueError(f"the corpus in {folder} is damaged ({error}): run `epsim model corpus` again") from None
    return Corpus(train, heldout, tokenizer)


def fetch_corpus(options: FetchOptions) -> Path:
    """Fetches the packages, splits and tokenizes their text, and returns the folder of tokens and description."""
    cache = options.cache or corpus.cache_folder()
    texts, description = corpus.fetch_texts(cache, options.megabytes)
    made = tokenize(texts, options.vocabulary)
    folder = cache / "corpus"
    save(made, folder)
    for name in made.domains:
        sizes = description["domains"][name]  # type: ignore[index]
        sizes |= {"train_tokens": len(made.train[name]), "heldout_tokens": len(made.heldout[name])}
    (folder / "corpus.json").write_text(json.dumps(description, indent=1, ensure_ascii=False) + "\n")
    return folder
