"""Every figure in README and docs is as its file under results/ has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "studies"))
import figures  # noqa: E402


@pytest.mark.parametrize("path", figures.documents(), ids=lambda path: path.name)
def test_a_document(path: Path) -> None:
    assert list(figures.wrong(path)) == []


def test_the_index_is_current() -> None:
    assert (figures.RESULTS / "INDEX.md").read_text(encoding="utf-8") == figures.index(), "run python studies/figures.py"


def test_wrong_figures_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text('{"a": {"b": [1.164, 2]}}')
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("[1.16x](r.json#a/b/0) and [2](r.json#a/b/1) and `1.5x` as code")
    assert list(figures.wrong(page)) == []
    for text, said in (("[1.17x](r.json#a/b/0)", "is 1.164"), ("[1.16x](r.json#a/c)", "no number"), ("it is 1.16x", "does not say")):
        page.write_text(text)
        assert any(said in sentence for sentence in figures.wrong(page))


def test_no_result_names_a_folder_of_a_machine() -> None:
    done = subprocess.run(["git", "grep", "-lE", "\"/(home|root|work|tmp)/", "--", "results"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""
