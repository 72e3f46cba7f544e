"""Links lead somewhere, and pages name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import ROOT

FOLDERS = ("docs", "runtime", "launch", "kernels/*")
NAMED = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")
PAGES = [ROOT / name for name in NAMED] + [page for name in FOLDERS for page in sorted(ROOT.glob(f"{name}/*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
    for target in re.findall(r"\]\(([^)\s]*#[^)]*)\)", text):
        page, anchor = target.split("#")
        inside = (path.parent / page if page else path).read_text(encoding="utf-8")
        heads = {
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", inside, re.M)
        }
        assert anchor in heads, target


def test_files_that_pages_name_exist() -> None:
    folders = "traces|epsim|kernels|runtime|launch|tests|benchmarks"
    named = {
        name
        for page in PAGES
        if page.name != "add-a-policy.md"
        for name in re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", page.read_text())
    }
    assert len(named) > 20
    assert [name for name in sorted(named - {"epsim/cli/NAME.py"}) if not (ROOT / name).exists()] == []


def test_citation_and_hooks_are_yaml() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [hook["id"] for hook in hooks["repos"][0]["hooks"]] == ["ruff", "ruff-format", "mypy"]
