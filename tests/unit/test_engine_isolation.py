"""What goes wrong in one sequence ends that sequence: the others write what they would have written, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import EngineConfig, SpeculativeConfig
from headway.engine import engine as engine_module
from headway.engine.engine import Engine
from headway.sampling_params import SamplingParams
from headway.types import OutputDelta, Request, Status
from tests.tiny import tiny_model_dir

PROMPT = [5, 6, 7, 8] * 10
NUM_TOKENS = 20


@pytest.fixture(scope="module", params=["ngram", "suffix"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tiny_model_dir(tmp_path_factory.mktemp("engine"), byte_fallback=True)
    return Engine(EngineConfig(
        model=str(directory), dtype="float32", device="cpu", block_size=16, kv_cache_memory_bytes=1 << 22,
        speculative=SpeculativeConfig.parse({"method": request.param, "policy": "static"}),
    ))  # fmt: skip


def request(name: str, **params: Any) -> Request:
    fixed = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return Request(name, list(PROMPT), SamplingParams(**fixed | params))   # type: ignore[arg-type]


def run(engine: Engine) -> list[OutputDelta]:
    deltas = []
    while engine.has_work():
        deltas += engine.step()
        engine.check()
    return deltas


def tokens_of(deltas: list[OutputDelta], name: str, index: int = 0) -> list[int]:
    return [token for delta in deltas if (delta.request_id, delta.index) == (name, index) for token in delta.token_ids]


def ends_of(deltas: list[OutputDelta]) -> dict[tuple[str, int], str | None]:
    return {(delta.request_id, delta.index): delta.finish_reason for delta in deltas if delta.finished}


def assert_empty(engine: Engine) -> None:
    engine.check()
    assert not engine.has_work()
    assert not engine.requests
    assert not engine._sequences
    assert not engine._prompt_logprobs
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    for drafter in engine.drafters.values():
        assert not drafter._indices   # type: ignore[attr-defined]


def fails(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[int]:
    engine.add(request("alone"))
    return tokens_of(run(engine), "alone")


def first_text(engine: Engine, name: str, index: int = 0) -> Any:
    return engine._texts[engine.requests[name][index].seq_id]


@pytest.mark.parametrize("where", ["the first step", "the middle", "the step in which it finishes", "its end", "a stop string"])
def test_an_error_in_one_text_ends_one_sequence(engine: Engine, expected: list[int], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add(request("broken", stop=["never written"]))
    engine.add(request("whole"))
    text = first_text(engine, "broken")
    push, seq = text.push, engine.requests["broken"][0]

    def push_until(token_ids: list[int]) -> tuple[str, int]:
        if {
            "the first step": True,
            "the middle": seq.num_output_tokens > NUM_TOKENS // 2,
            "the step in which it finishes": seq.status is Status.FINISHED,
        }.get(where, False):
            fails()
        found: tuple[str, int] = push(token_ids)
        return found

    monkeypatch.setattr(text, "push", push_until)
    if where == "its end":
        monkeypatch.setattr(text, "flush", fails)
    if where == "a stop string":
        monkeypatch.setattr(text, "_cut_at_stop", fails)
    deltas = run(engine)
    assert ends_of(deltas) == {("broken", 0): "error", ("whole", 0): "length"}
    assert tokens_of(deltas, "whole") == expected
    [end] = [delta for delta in deltas if delta.finish_reason == "error"]
    assert end.text == ""
    assert_empty(engine)
    engine.add(request("after"))
    assert tokens_of(run(engine), "after") == expected


def test_an_error_in_prompt_logprobs_ends_one_sequence(engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    finished = engine.metrics.finished["error"]
    engine.add(request("broken", prompt_logprobs=2, n=2))
    engine.add(request("whole"))
    monkeypatch.setattr(engine._prompt_logprobs["broken"], "observe", fails)
    deltas = run(engine)
    assert ends_of(deltas) == {("broken", 0): "error", ("broken", 1): "length", ("whole", 0): "length"}
    assert tokens_of(deltas, "whole") == tokens_of(deltas, "broken", 1) == expected
    assert engine.metrics.finished["error"] == finished + 1
    assert_empty(engine)


def test_the_others_of_a_request_can_be_aborted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add(request("broken", n=3))
    monkeypatch.setattr(first_text(engine, "broken", 1), "push", fails)
    while not any(delta.finish_reason == "error" for delta in engine.step()):
        engine.check()
    engine.check()
    engine.abort("broken")
    assert_empty(engine)


def test_a_request_that_cannot_enter_changes_nothing(engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(engine_module.TextOutput):
        def __init__(self, tokenizer: Any, seq: Any) -> None:
            super().__init__(tokenizer, seq)
            if seq.index == 1:
                fails()

    monkeypatch.setattr(engine_module, "TextOutput", Broken)
    with pytest.raises(RuntimeError, match="injected"):
        engine.add(request("broken", n=2, prompt_logprobs=1))
    assert_empty(engine)
    engine.abort("broken")
    engine.add(request("after"))
    assert tokens_of(run(engine), "after") == expected


def test_a_drafter_that_does_not_let_go_harms_nobody(engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    [drafter] = engine.drafters.values()
    stop = drafter.stop

    def stop_and_fail(seq_id: int) -> None:
        stop(seq_id)
        fails()

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "stop", stop_and_fail)
        engine.add(request("first"))
        engine.add(request("second"))
        deltas = engine.step()
        engine.abort("first")
        engine.check()
        assert tokens_of(deltas + run(engine), "second") == expected
    assert_empty(engine)
    engine.add(request("after"))
    assert tokens_of(run(engine), "after") == expected


def test_a_step_that_fails_when_a_sequence_has_just_finished(engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences of such a step are dropped, those of later ones are whole."""
    [drafter] = engine.drafters.values()
    engine.add(request("short", max_tokens=3))
    engine.add(request("long"))
    short = engine.requests["short"][0]

    def commit(committed: Any) -> None:
        if short.status is Status.FINISHED:
            fails()

    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "commit", lambda self, committed: commit(committed))
        patch.setattr(type(drafter), "reads_commits", True)
        with pytest.raises(RuntimeError, match="injected"):
            run(engine)
    for name in ("short", "long"):
        engine.abort(name)
    assert_empty(engine)
    engine.add(request("after"))
    assert tokens_of(run(engine), "after") == expected
