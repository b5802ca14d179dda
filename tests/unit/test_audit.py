"""The checks of an audit against sides whose distributions and faults are known, and its reports."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from xml.etree import ElementTree

import pytest

from headway.audit import greedy, limits, report
from headway.audit.records import FAULT, SKIPPED, SOUND, CheckResult, GreedyPair, Session
from headway.audit.run import AuditTarget, Report, checks, verdict
from headway.audit.sampled import SETTINGS, SampledCheck, anticipation, survey_prompts
from headway.audit.side import Continuation, _continuation
from headway.cli.main import main
from tests.audit_sides import Simulated, simulated_session


def session(seconds: float = 30.0, plain: Simulated | None = None, **fault: object) -> Session:
    return simulated_session(1, seconds, plain or Simulated(), Simulated(**fault))


def greedy_results(found: Session) -> dict[str, CheckResult]:
    async def run() -> list[CheckResult]:
        return [await greedy.measure_noise(found), *await greedy.check_greedy(found), await limits.check_ends(found),
                await limits.check_seeds(found), await greedy.check_load(found), await greedy.check_prefix_cache(found)]  # fmt: skip

    return {result.name: result for result in asyncio.run(run())}


def test_equal_sides_are_sound() -> None:
    results = greedy_results(session())
    assert {result.status for result in results.values()} == {SOUND}


def test_another_model_is_a_fault() -> None:
    result = greedy_results(session(seed=1))["greedy text"]
    assert result.status == FAULT
    assert result.examples[0].startswith("curl")


def test_log_probabilities_that_are_off_are_a_fault() -> None:
    results = greedy_results(session(wrong_logprobs=0.01))
    assert results["log probabilities"].status == results["prefix cache"].status == FAULT
    assert results["greedy text"].status == SOUND


def test_noise_is_measured_and_explains_what_it_can() -> None:
    results = greedy_results(session(plain=Simulated(noise=0.02), noise=0.02))
    assert results["noise"].figures["largest_logprob_difference"] > 0.01
    assert {result.status for name, result in results.items() if name != "ends of texts"} <= {SOUND, SKIPPED}


def test_seeds_that_do_not_repeat_are_a_fault_only_where_plain_decoding_repeats_them() -> None:
    assert greedy_results(session(seeds=False))["seeds"].status == FAULT
    assert greedy_results(session(plain=Simulated(seeds=False), seeds=False))["seeds"].status == SKIPPED


def test_a_near_tie_is_told_from_a_fault() -> None:
    plain = Continuation("ab", "length", ("a", "b"), (-0.1, -0.7), ({"a": -0.1}, {"b": -0.7, "c": -0.7005}))
    other = dataclasses.replace(plain, text="ac", tokens=("a", "c"))
    found = session()
    pair = [GreedyPair("p", plain, other, 2)]
    assert greedy.judge_texts("greedy text", found, pair).status == SOUND
    far = dataclasses.replace(plain, tops=({"a": -0.1}, {"b": -0.7, "c": -0.9}))
    result = greedy.judge_texts("greedy text", found, [GreedyPair("p", far, other, 2)])
    assert result.status == FAULT
    assert result.figures["divergences"][0]["margin"] == pytest.approx(0.2)


def batches(name: str, count: int, plain: Simulated | None = None, **fault: object) -> SampledCheck:
    """After so many batches, or fewer where a fault was found."""
    found = session(3600, plain, **fault)
    check = SampledCheck(next(setting for setting in SETTINGS if setting.name == name), found, asyncio.run(survey_prompts(found)))

    async def run() -> None:
        while check.batches < count and not check.found:
            await check.step()

    asyncio.run(run())
    return check


def test_a_sound_side_passes_the_sampled_checks() -> None:
    for name in ("sampling at temperature 1", "top_p", "length"):
        check = batches(name, 30)
        assert check.result().status == SOUND
        assert "would have been found" in check.result().summary


def test_a_small_bias_is_found_by_told_probabilities() -> None:
    check = batches("sampling at temperature 1", 600, too_often=0.02)
    assert check.result().status == FAULT
    assert check.test.num_samples[0] < check.known.num_samples   # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["sampling at temperature 0.6", "top_k", "min_p"])
def test_a_sharper_distribution_is_found_by_two_samples(name: str) -> None:
    assert batches(name, 300, sharper=1.6).result().status == FAULT


def test_lengths_that_differ_are_found() -> None:
    assert batches("length", 300, sharper=0.5).result().status == FAULT


def test_anticipation_is_the_likeliest_token_alone() -> None:
    check = batches("sampling at temperature 1", 600, too_often=0.05)
    assert anticipation(check).status == FAULT
    assert anticipation(batches("sampling at temperature 1", 40)).status == SOUND


def test_told_probabilities_that_are_wrong_are_not_relied_on() -> None:
    """Both sides draw alike, and tell something else: that is a question of log probabilities, not of sampling."""
    check = batches("sampling at temperature 1", 200, Simulated(wrong_logprobs=-0.4), wrong_logprobs=-0.4)
    assert check.result().status == SOUND
    assert check.result().figures["probabilities_told"] is False


def test_a_whole_audit_of_a_sound_side() -> None:
    found = session(3.0)
    results = asyncio.run(collect(found))
    assert {result.status for result in results} == {SOUND, SKIPPED}
    assert len({result.name for result in results}) == len(results)
    assert verdict(Report(AuditTarget("http://a"), 1, results)).startswith("SOUND")


async def collect(found: Session) -> list[CheckResult]:
    return [result async for result in checks(found, lambda what: None)]


# -- reports ----------------------------------------------------------------------------------------------------------

RESULTS = [
    CheckResult("noise", SOUND, "none"), CheckResult("seeds", SKIPPED, "not\x00supported"),
    CheckResult("greedy text", FAULT, "token 3 is <b>", {"faults": 1}, ("curl -d '{}'",)),
]  # fmt: skip


def test_the_forms_of_a_report() -> None:
    found = Report(AuditTarget("http://a", "http://b", api_key="secret"), 7, RESULTS, 12.0, 60.0)
    page = report.page(found)
    assert page.startswith("FAULT: greedy text (1 of 2 checks)")
    assert "curl -d" in page
    written = report.as_json(found)
    assert json.loads(written)["verdict"] == "fault"
    assert "secret" not in written + page + report.as_junit(found)
    suite = ElementTree.fromstring(report.as_junit(found))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert suite.find("testcase/failure").get("message") == "token 3 is <b>"   # type: ignore[union-attr]


def test_log_probabilities_of_completions_and_of_chats_are_read() -> None:
    told = {"tokens": ["a", "b"], "token_logprobs": [-1, -2], "top_logprobs": [{"a": -1}, None]}
    old = {"text": "ab", "finish_reason": "stop", "logprobs": told}
    assert _continuation(old, 3) == Continuation("ab", "stop", ("a", "b"), (-1.0, -2.0), ({"a": -1}, {}), 3)
    new = {"text": "a", "logprobs": {"content": [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "b", "logprob": -2}]}]}}
    assert _continuation(new, None) == Continuation("a", None, ("a",), (-1.0,), ({"b": -2.0},))
    assert _continuation({"text": "a", "logprobs": None}, None) == Continuation("a", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ftp://a"], "must look like"),
        (["http://127.0.0.1:9"], "does not answer"),
        (["http://127.0.0.1:9", "--plain", "[1]"], "must be a JSON object"),
        (["http://127.0.0.1:9", "http://127.0.0.1:9", "--plain", "{}"], "not both"),
        (["http://127.0.0.1:9", "--json", "/nowhere/at/all.json"], "no directory"),
    ],
)
def test_bad_input_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_budget_is_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "http://a", "--budget", "0"])
    assert ended.value.code == 2
    assert "number of minutes" in capsys.readouterr().err
