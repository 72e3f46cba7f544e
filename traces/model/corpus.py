"""The text that the small model is trained on: documents of Debian packages, by domain, some of them held out."""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT_EVERY = 20
PIECE_CHARACTERS = 16_000
LICENCES = ("GNU General Public License", "GNU Free Documentation License", "BSD", "public domain", "DFSG free")


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one package that match `pattern`. in_pieces: each file is long and is cut into documents."""

    package: str
    pattern: str
    in_pieces: bool = False


DOMAINS: dict[str, tuple[Source, ...]] = {
    "formal": (Source("hol-light", "**/*.ml"), Source("libcoq-stdlib", "**/*.v")),
    "dictionary": (Source("dict-gcide", "usr/share/dictd/*.dict.dz", in_pieces=True),),
    "prose": (Source("anarchism", "**/*.md.gz"), Source("fortunes", "usr/share/games/fortunes/*", in_pieces=True)),
    "manuals": (
        Source("manpages", "usr/share/man/man*/*.gz"),
        Source("manpages-dev", "usr/share/man/man*/*.gz"),
        Source("git-man", "usr/share/man/man*/*.gz"),
        Source("perl-doc", "**/*.pod"),
    ),
    "python": tuple(Source(f"python3-{name}", "**/*.py") for name in ("django", "twisted", "sympy", "scipy")),
    "rust": (Source("rust-src", "**/*.rs"),),
    "german": tuple(Source(name, "usr/share/man/de/man*/*.gz") for name in ("manpages-de", "manpages-de-dev")),
    "japanese": tuple(Source(name, "usr/share/man/ja/man*/*.gz") for name in ("manpages-ja", "manpages-ja-dev")),
}


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents of one domain."""

    train: list[str] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)


def cache_folder() -> Path:
    """$EPSIM_CACHE, else ~/.cache/epsim."""
    return Path(os.environ.get("EPSIM_CACHE") or Path.home() / ".cache" / "epsim")


def download(package: str, folder: Path) -> Path:
    """Fetches one Debian package with apt-get, unless it is there already, and returns the folder it is unpacked in."""
    unpacked = folder / package
    if unpacked.exists():
        return unpacked
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise ValueError(f"the corpus comes from Debian packages, but {tool} is not installed: use Debian")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        fetched = subprocess.run(["apt-get", "download", package], cwd=temporary, capture_output=True, text=True)
        files = list(Path(temporary).glob("*.deb"))
        if fetched.returncode or not files:
            last = (fetched.stderr.strip().splitlines() or ["no file was fetched"])[-1]
            raise ValueError(f"apt-get download {package} failed: {last} (run apt-get update first?)")
        tree = Path(temporary) / "tree"
        subprocess.run(["dpkg-deb", "-x", str(files[0]), str(tree)], check=True)
        (tree / "VERSION").write_text(files[0].name.split("_")[1].replace("%3a", ":"))
        tree.rename(unpacked)
    return unpacked


def licences(unpacked: Path) -> list[str]:
    """The licences named in the package's debian/copyright, or those mentioned if it is free text."""
    files = sorted(unpacked.glob("usr/share/doc/*/copyright"))
    if not files:
        linked = [os.readlink(path) for path in unpacked.glob("usr/share/doc/*") if path.is_symlink()]
        return [f"those of {Path(link).name}" for link in linked] or ["none stated"]
    text = files[0].read_text(errors="replace")
    named = {line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("License:")} - {""}
    mentioned = [known for known in LICENCES if known in " ".join(text.split())]
    return sorted(named) or [f"free text that mentions {', '.join(mentioned) or 'no licence by name'}"]


def read_text(path: Path) -> str | None:
    """The file's text, or None if it is not UTF-8 text (up to 1% stray bytes) or has fewer than 400 characters."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    text = raw.decode("utf-8", errors="replace")
    if len(text) < 400 or "\x00" in text or text.count("\ufffd") > len(text) / 100:
        return None
    return re.sub(r"\n{3,}", "\n\n", text.replace("\r\n", "\n")).strip()


def documents(source: Source, unpacked: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each document, in a fixed order."""
    for path in sorted(unpacked.glob(source.pattern)):
        if not path.is_file() or path.is_symlink() or (text := read_text(path)) is None:
            continue
        name = f"{source.package}/{path.relative_to(unpacked)}"
        if not source.in_pieces:
            yield name, text
            continue
        start = 0
        while start < len(text):
            end = text.find("\n", start + PIECE_CHARACTERS)
            end = len(text) if end < 0 else end
            yield f"{name}#{start}", text[start:end]
            start = end + 1


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split(named_texts: list[tuple[str, str]], megabytes: float) -> Texts:
    """Splits (name, text) documents, in order of a hash and without duplicates, up to about `megabytes` of text. One in
    twenty is held out. If the hash holds out none, the last is."""
    texts = Texts()
    seen: set[int] = set()
    size = 0
    for name, text in sorted(named_texts, key=lambda pair: digest(pair[0])):
        key = digest(text)
        if key in seen:
            continue
        seen.add(key)
        (texts.heldout if digest(name) % HELD_OUT_EVERY == 0 else texts.train).append(text)
        size += len(text.encode())
        if size > megabytes * 1e6:
            break
    if not texts.heldout and len(texts.train) > 1:  # With few documents the hash may hold out none.
        texts.heldout.append(texts.train.pop())
    return texts


def fetch_texts(cache: Path, megabytes: float) -> tuple[dict[str, Texts], dict[str, object]]:
    """The documents of each domain, and a description of them: packages, versions, licences, sizes."""
    folder = cache / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, Texts] = {}
    packages: dict[str, dict[str, object]] = {}
    sizes: dict[str, dict[str, int]] = {}
    for domain, sources in DOMAINS.items():
        named_texts: list[tuple[str, str]] = []
        for source in sources:
            unpacked = download(source.package, folder)
            version = (unpacked / "VERSION").read_text()
            packages[source.package] = {"domain": domain, "version": version, "licences": licences(unpacked)}
            named_texts += documents(source, unpacked)
        texts[domain] = split(named_texts, megabytes)
        sizes[domain] = {
            "train_documents": len(texts[domain].train),
            "heldout_documents": len(texts[domain].heldout),
            "train_characters": sum(map(len, texts[domain].train)),
            "heldout_characters": sum(map(len, texts[domain].heldout)),
        }
    return texts, {"packages": packages, "domains": sizes}
