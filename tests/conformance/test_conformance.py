"""Every drafter x every policy x {greedy, sampled} x {free, constrained} x {alone, batched, preempted, aborted}, found by listing.

A new file in drafters/ or control/policies/ is tested here from the moment it exists. The reference is the same engine
without speculation, on the same tiny random model in fp32: outputs are equal token for token, and nothing leaks. Where it is constrained,
every other request must keep to a grammar, and the others of its batch need not.

Drafts that are drawn at random keep the distribution of sampled text, not its tokens. There the text is compared with the target's exact
distribution by a chi-square test, which a correct engine fails with probability `FALSE_ALARM` for each drafter and policy: for the hundred
or so pairs together once in 10,000 sets of seeds, and the seeds are fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headway import plugins
from headway.config import EngineConfig, SpeculativeConfig
from headway.control import driver as driver_module
from headway.engine import engine as engine_module
from headway.engine import proposing
from headway.engine.engine import Engine
from headway.models.attention import KVCache
from headway.sampling_params import SamplingParams
from headway.structured_outputs import StructuredOutputsParams
from headway.types import OutputDelta, Request
from tests.drafter_models import drafter_config, kinds, policies
from tests.sampling import chi_square, make_sequence, reference_probs
from tests.tiny import tiny_model_dir

# Policies whose options have no default, and one that would soon settle for no drafts in so few steps.
OPTIONS = {
    "bandit": {"exploration": 10.0},
    "batch_table": {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 2]]},
    "disable_by_batch_size": {"disable_by_batch_size": 3},
}
NUM_REQUESTS = 5
OUTPUT_LEN = 24
FALSE_ALARM = 1e-6
NUM_TOKENS = 3
ALPHABET = (20, 60, 130, 250)   # all that is written: of so few tokens drafters of random weights guess many right
WAVES = (800, *[2] * 10)   # texts written at once: some policies draft for few requests only
PROMPT = [5, 6, 7, 8, 9] * 4
# Words in which what may come depends on what came, by themselves and as an expression.
WORDS = ("ac", "ad", "ba", "bb", "bc", "cad", "cbd", "ccd", "cdd", "dd")
WORD_EXPRESSION = "(a[cd]|b[abc]|c[abcd]d|dd)*"
LETTERS = tuple(3 + ord(letter) for letter in "abcd")
FORM = StructuredOutputsParams(regex="(<(one|two|three)>( [abc]{1,3})*;){3,}")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module", params=kinds())
def drafter(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return drafter_config(request.param, tmp_path_factory.mktemp(request.param.replace(" ", "_")), model_dir)


@pytest.fixture(scope="module", params=policies())
def engine(request: pytest.FixtureRequest, drafter: dict[str, Any], model_dir: Path) -> Engine:
    policy = {"name": request.param, **OPTIONS.get(request.param, {})}
    return build(model_dir, SpeculativeConfig.parse({**drafter, "num_speculative_tokens": 4, "policy": policy}))


def build(model_dir: Path, speculative: SpeculativeConfig | None) -> Engine:
    shape = {"max_model_len": 256, "block_size": 16, "profile": False}
    return Engine(EngineConfig(model=str(model_dir), dtype="float32", device="cpu", speculative=speculative, **shape))


def make_requests(sampled: bool, constrained: bool = False) -> list[Request]:
    """Prompts that repeat themselves, so that drafts are made and some of them hold."""
    params = [
        SamplingParams(
            temperature=0.7 if sampled else 0.0, seed=1000 + i, top_p=0.95 if i % 2 else 1.0, max_tokens=OUTPUT_LEN, ignore_eos=True,
            structured_outputs=FORM if constrained and i % 2 == 0 else None,
        )
        for i in range(NUM_REQUESTS)
    ]
    prompts = [([5 + i, 6, 7, 8 + i, 9] * 9)[: 20 + 5 * i] for i in range(NUM_REQUESTS)]
    return [Request(f"r{i}", prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))]


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return collect(drain(engine))


def drain(engine: Engine) -> Iterator[OutputDelta]:
    while engine.has_work():
        yield from engine.step()
        engine.check()


def collect(deltas: Iterator[OutputDelta]) -> dict[str, list[int]]:
    written: dict[str, list[int]] = {}
    for delta in deltas:
        written.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert len(delta.from_draft) == len(delta.token_ids)
    return written


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a tenth of a millisecond after the one before: what a policy that decides by time drafts is the same
    wherever it runs."""
    looks = count()
    for module in (engine_module, proposing, driver_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(looks) * 1e-4))


@cache
def reference(model_dir: Path, sampled: bool, constrained: bool = False) -> dict[str, list[int]]:
    """What plain decoding writes, each request alone."""
    engine = build(model_dir, None)
    written = {}
    for request in make_requests(sampled, constrained):
        written |= run(engine, [request])
    return written


def sampled(seed: int, constrained: bool = False) -> SamplingParams:
    """Longer than what is looked at: drafts reach beyond it."""
    alphabet = LETTERS if constrained else ALPHABET
    return SamplingParams(
        temperature=2.5, top_k=len(alphabet), logit_bias=dict.fromkeys(alphabet, 80.0), seed=seed, max_tokens=NUM_TOKENS + 3,
        ignore_eos=True, structured_outputs=StructuredOutputsParams(regex=WORD_EXPRESSION) if constrained else None,
    )   # fmt: skip


def allowed(text: tuple[int, ...]) -> set[int]:
    """The letters that may follow these: found by trying all words, not by a grammar."""
    beginnings = {""}
    for _ in range(NUM_TOKENS + 1):
        beginnings |= {text + word for text in beginnings for word in WORDS if len(text) <= NUM_TOKENS}
    written = "".join(chr(token - 3) for token in text)
    return {3 + ord(letter) for letter in "abcd" if any(each.startswith(written + letter) for each in beginnings)}


@cache
def exact(model_dir: Path, constrained: bool) -> dict[tuple[int, ...], float]:
    """P(the text behind PROMPT begins so), for every text that can be."""
    model = build(model_dir, None).model
    seq = make_sequence(PROMPT, sampled(0, constrained))
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for text, mass in texts.items():
            tokens = torch.tensor([*PROMPT, *text])
            cache = KVCache(model.config, 4, 16, model.dtype, model.device)
            x, _ = model.forward(tokens, torch.arange(len(tokens)), cache.plan([(list(range(4)), 0, len(tokens))]), cache, ())
            logits = model.logits(x[-1:])[0].double().numpy()
            if constrained:
                logits[[token for token in range(len(logits)) if token not in allowed(text)]] = -np.inf
            probs = reference_probs(logits, seq, text)
            longer |= {(*text, int(token)): mass * float(probs[token]) for token in np.flatnonzero(probs)}
        texts = longer
    assert len(texts) == len(ALPHABET) ** NUM_TOKENS or constrained
    return texts


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_sampled_text_has_the_target_s_distribution(engine: Engine, model_dir: Path, constrained: bool) -> None:
    if all(drafter.deterministic for drafter in engine.drafters.values()):
        pytest.skip("its drafts are a function of the prefix: sampled text is compared token for token above")
    before = sum(engine.metrics.verified.values())
    written, seeds = {}, count()
    for size in WAVES:
        written |= run(engine, [Request(f"r{seed}", PROMPT, sampled(seed, constrained)) for seed in islice(seeds, size)])
    # By the second time a policy may have learned that such drafts do not pay.
    assert sum(engine.metrics.verified.values()) > before or constrained, "nothing was ever drafted: the test proves nothing"
    expected = exact(model_dir, constrained)
    found = Counter(tuple(tokens[:NUM_TOKENS]) for tokens in written.values())
    assert set(found) <= set(expected)
    counts = np.array([found[text] for text in expected])
    assert chi_square(counts, np.array(list(expected.values()))) > FALSE_ALARM


def draws(kind: str) -> bool:
    """Whether its drafts for requests that sample are drawn at random, unless it is told otherwise."""
    options = getattr(plugins.load("drafter", kind.removesuffix(" tree")), "Options", None)
    return options is not None and any(field.name == "draft_sample_method" for field in fields(options))


@pytest.mark.parametrize("kind", filter(draws, kinds()))
def test_likeliest_drafts_leave_sampled_text_as_it_is(kind: str, model_dir: Path, tmp_path: Path) -> None:
    """With `draft_sample_method` greedy the drafts are a function of the prefix."""
    config = {**drafter_config(kind, tmp_path, model_dir), "num_speculative_tokens": 4, "policy": "static"}
    engine = build(model_dir, SpeculativeConfig.parse({**config, "draft_sample_method": "greedy"}))
    assert run(engine, make_requests(True)) == reference(model_dir, True)
    assert sum(engine.metrics.verified.values()) > 0


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
class TestEveryDrafterUnderEveryPolicy:
    def test_alone(self, engine: Engine, model_dir: Path, sampled: bool, constrained: bool, steady_clock: None) -> None:
        written = {}
        for request in make_requests(sampled, constrained):
            written |= run(engine, [request])
        self.assert_same(engine, written, model_dir, sampled, constrained)
        idle = not constrained and all(drafter.needs_grammar for drafter in engine.drafters.values())
        assert sum(engine.metrics.verified.values()) > 0 or idle, "nothing was ever drafted: the test proves nothing"

    def test_batched(self, engine: Engine, model_dir: Path, sampled: bool, constrained: bool) -> None:
        self.assert_same(engine, run(engine, make_requests(sampled, constrained)), model_dir, sampled, constrained)

    def test_preempted(self, engine: Engine, model_dir: Path, sampled: bool, constrained: bool) -> None:
        hogs = self.take_blocks(engine, leave=7 if constrained else 11)
        before = engine.scheduler.num_preemptions
        for request in make_requests(sampled, constrained):
            engine.add(request)
        written = collect(delta for _ in iter(engine.has_work, False) for delta in engine.step())
        assert engine.scheduler.num_preemptions > before
        engine.scheduler.pool.release(hogs)
        self.assert_same(engine, written, model_dir, sampled, constrained)

    def test_aborted(self, engine: Engine, model_dir: Path, sampled: bool, constrained: bool) -> None:
        for request in make_requests(sampled, constrained):
            engine.add(request)
        written: dict[str, list[int]] = {}
        for step in range(1000):
            if step == 4:
                engine.abort("r1")
                engine.abort("r3")
            if not engine.has_work():
                break
            for delta in engine.step():
                written.setdefault(delta.request_id, []).extend(delta.token_ids)
            engine.check()
        for gone in ("r1", "r3"):
            expected = reference(model_dir, sampled, constrained)[gone]
            assert not self.is_exact(engine, sampled) or written[gone] == expected[: len(written[gone])]
            assert len(written.pop(gone)) < OUTPUT_LEN
            written[gone] = expected
        self.assert_same(engine, written, model_dir, sampled, constrained)

    @staticmethod
    def take_blocks(engine: Engine, leave: int) -> list[int]:
        pool = engine.scheduler.pool
        return pool.allocate(pool.num_free - leave)

    @staticmethod
    def is_exact(engine: Engine, sampled: bool) -> bool:
        """Whether the tokens are those of plain decoding: sampled drafts keep the distribution, not the tokens."""
        return not sampled or all(drafter.deterministic for drafter in engine.drafters.values())

    @staticmethod
    def assert_same(engine: Engine, written: dict[str, list[int]], model_dir: Path, sampled: bool, constrained: bool) -> None:
        pool = engine.scheduler.pool
        assert pool.num_free == pool.num_blocks
        if not TestEveryDrafterUnderEveryPolicy.is_exact(engine, sampled):
            assert {name: len(tokens) for name, tokens in written.items()} == {f"r{i}": OUTPUT_LEN for i in range(NUM_REQUESTS)}
        else:
            assert written == reference(model_dir, sampled, constrained)


def test_what_another_salt_wrote_changes_no_draft(drafter: dict[str, Any], model_dir: Path) -> None:
    """What a client sees of its drafts says nothing of another's text, whoever drafts: not what the engine kept of it either."""
    speculative = SpeculativeConfig.parse({**drafter, "num_speculative_tokens": 4, "policy": "static"})

    def seen(engine: Engine, salt: str) -> list[tuple[str, list[int], list[bool], list[int], int]]:
        for request in make_requests(sampled=False, constrained=True):
            engine.add(replace(request, cache_salt=salt))
        return [(d.request_id, d.token_ids, d.from_draft, d.rejected, d.num_cached) for d in drain(engine)]

    used = build(model_dir, speculative)
    seen(used, "theirs")
    mine = seen(used, "mine")
    assert mine == seen(build(model_dir, speculative), "mine")
    assert any(rejected or any(from_draft) for _, _, from_draft, rejected, _ in mine), "nothing was ever drafted: the test proves nothing"
    assert any(num_cached for *_, num_cached in seen(used, "mine")), "no prefix was ever found: the test proves nothing"
