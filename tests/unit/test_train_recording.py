"""Hidden states kept while texts are written are those that a pass over the finished texts computes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headway.config import EngineConfig
from headway.engine.engine import Engine
from headway.train import data
from headway.train.data import Text, TextFile, read_texts
from headway.train.eagle3 import feature_layers
from headway.train.hidden_state_file import HiddenStateFile
from headway.train.hidden_states import HiddenStates, compute
from headway.train.recording import recorded_states
from tests.tiny import tiny_model_dir

LIMIT = 1 << 30


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3, num_hidden_layers=3)


def make_engine(model_dir: Path, **options: int) -> Engine:
    shape = {"max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 24, **options}
    return Engine(EngineConfig(model=str(model_dir), dtype="float32", device="cpu", enable_prefix_caching=False, **shape))  # type: ignore[arg-type]


def layers_of(engine: Engine) -> tuple[int, ...]:
    return feature_layers(engine.model.config)


def write(engine: Engine, directory: Path, num_texts: int, limit: int = LIMIT) -> HiddenStateFile:
    file = TextFile(directory / "texts.jsonl", [])
    store = HiddenStateFile(directory, engine.model, layers_of(engine), limit)
    store.begin(read_texts(file.path))
    with recorded_states(engine, file, store) as keep:
        data.write_texts(engine, file, None, max_tokens=20, seed=1, deadline=math.inf, num_tokens=None, num_texts=num_texts, keep=keep)
    assert not engine.drafters
    return store


def assert_as_computed(engine: Engine, directory: Path, monkeypatch: pytest.MonkeyPatch, *, computed: int = 0) -> None:
    """What is read from the files is what a pass computes, and no more than `computed` texts had to be."""
    texts, layers = read_texts(directory / "texts.jsonl"), layers_of(engine)
    again: list[Text] = []
    monkeypatch.setattr("headway.train.hidden_states.compute", lambda *a: again.extend(a[2]) or compute(*a))
    features = HiddenStates(engine.model, layers, texts, directory, LIMIT)
    features.store(lambda _: None)
    found = features.get(range(len(texts)))
    assert len(again) == computed
    for text, kept in zip(texts, found, strict=True):
        (whole,) = compute(engine.model, layers, [text])
        learned = slice(text.num_prompt - 1, len(text.token_ids) - 1)
        assert torch.equal(kept.token_ids, whole.token_ids)
        for name in ("hidden", "last"):
            torch.testing.assert_close(getattr(kept, name)[:-1], getattr(whole, name)[:-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept.log_normalizer[learned], whole.log_normalizer[learned], atol=1e-4, rtol=1e-4)


def test_nothing_is_computed_again(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir)
    assert write(engine, tmp_path, 6).num_texts == 6
    assert_as_computed(engine, tmp_path, monkeypatch)


def test_a_later_run_goes_on(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir)
    write(engine, tmp_path, 3)
    for name in ("features.bin", "normalizers.bin"):   # written, but the crash came before the line that says so
        with (tmp_path / name).open("ab") as file:
            file.write(b"123")
    assert write(engine, tmp_path, 6).num_texts == 6
    assert_as_computed(engine, tmp_path, monkeypatch)


def test_preempted_sequences_are_kept_whole(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir, kv_cache_memory_bytes=300_000, max_model_len=384, max_num_seqs=8)
    assert write(engine, tmp_path, 8).num_texts == 8
    assert engine.metrics.num_preemptions > 0, "nobody was preempted: the test proves nothing"
    assert_as_computed(engine, tmp_path, monkeypatch)


def test_texts_beyond_the_limit_and_behind_a_gap_are_computed(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_dir)
    first = write(engine, tmp_path, 2)
    row_bytes = 4 * (first.width + 1)
    assert write(engine, tmp_path, 5, limit=(first.num_rows + 1) * row_bytes).num_texts == 2
    assert_as_computed(engine, tmp_path, monkeypatch, computed=3)


def test_files_of_other_texts_or_layers_are_dropped(model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(model_dir)
    write(engine, tmp_path, 3)
    texts = read_texts(tmp_path / "texts.jsonl")
    other = HiddenStateFile(tmp_path, engine.model, layers_of(engine), LIMIT)
    other.begin([texts[0], texts[2]])
    assert (other.num_texts, other.num_rows) == (1, len(texts[0].token_ids))
    assert (tmp_path / "normalizers.bin").stat().st_size == 4 * other.num_rows
    fewer = HiddenStateFile(tmp_path, engine.model, (0,), LIMIT)
    fewer.begin(texts)
    assert fewer.num_texts == (tmp_path / "features.bin").stat().st_size == 0
