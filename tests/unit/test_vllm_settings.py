"""What a user may say to the vLLM plugin, and the counters on their way to the process that serves them. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.control.policies.goodput import Goodput
from headway.errors import ConfigError, InvalidRequestError
from headway.types import Feedback, SequenceFeedback
from headway.vllm.counters import Counters, Publisher, read, stats_path
from headway.vllm.settings import RequestSettings, Settings, k_table


def test_defaults_and_other_plugins_keys() -> None:
    assert Settings.parse(None) == Settings.parse({}) == Settings.parse({"other": {"x": 1}}) == Settings()
    assert isinstance(Settings().build_policy(8), Goodput)


def test_a_policy_with_options() -> None:
    settings = Settings.parse({"headway": {"policy": {"name": "goodput", "tpot_slo_ms": 30}}})
    policy = settings.build_policy(4)
    assert isinstance(policy, Goodput)
    assert policy.options.tpot_slo_ms == 30.0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"polcy": "static"}, "enabled, policy"),
        ({"policy": "nonesuch"}, "goodput"),
        ({"policy": {"name": "goodput", "slo": 1}}, "tpot_slo_ms"),
        ({"enabled": 1}, "true or false"),
        ({"trace": 3}, "a string"),
        ("static", "a JSON object"),
    ],
)
def test_wrong_settings_name_what_is_accepted(given: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings.parse({"headway": given})


def test_one_requests_wishes() -> None:
    assert RequestSettings.parse(None) == RequestSettings.parse({"theirs": "x"}) == RequestSettings()
    asked = RequestSettings.parse({"headway_enabled": "0", "headway_max_tokens": 2, "headway_tpot_slo_ms": "30.5", "theirs": 1})
    assert asked == RequestSettings(False, 2, 30.5)


@pytest.mark.parametrize(
    "given",
    [{"headway_enabled": 2}, {"headway_max_tokens": -1}, {"headway_max_tokens": 1.5}, {"headway_tpot_slo_ms": 0},
     {"headway_tpot_slo_ms": "x"}, {"headway_tpot_slo_ms": "nan"}, {"headway_k": 1}],
)  # fmt: skip
def test_wrong_wishes(given: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(given))):
        RequestSettings.parse(given)


def test_the_table_names_every_k_once() -> None:
    table = k_table(4)
    assert [k for _, _, k in table] == [4, 3, 2, 1, 0]
    assert [first for first, _, _ in table] == [last for _, last, _ in table] == [1, 2, 3, 4, 5]


def test_counters_travel_whole(tmp_path: Path) -> None:
    counters = Counters("goodput", "ngram", 8)
    rows = (SequenceFeedback(1, "ngram", 3, 3, 3, 2, 40), SequenceFeedback(2, "none", 0, 0, 0, 0, 50))
    counters.observe_feedback(Feedback(1, rows, 0, 5, 90, 0.5, 9.5, 10.0, reason="ngram pays"))
    counters.num_errors = 1
    path = stats_path(Settings(stats=str(tmp_path / "stats")), SimpleNamespace(instance_id="ab12c_dp1"), 1)
    assert read(path) is None
    publisher = Publisher(path)
    publisher.publish(counters)
    found = read(path)
    assert found is not None
    assert json.dumps(found.to_json()) == json.dumps(counters.to_json())
    assert found.verified == {("ngram", 3, 2): 1}
    assert found.positions()["ngram"][2].accepted == 0
    counters.num_steps = 99
    publisher.publish(counters)   # too soon
    assert read(path).num_steps == 1   # type: ignore[union-attr]
    publisher.publish(counters, now=True)
    assert read(path).num_steps == 99   # type: ignore[union-attr]
    publisher.close()
    assert read(path) is None


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    publisher = Publisher(tmp_path / "file" / "x.json")
    publisher.publish(Counters())
    publisher.publish(Counters(), now=True)
    assert len(caplog.records) == 1
    publisher.close()


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', "[]", "nonsense"])
def test_a_damaged_file_is_no_counters(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read(tmp_path / "x.json") is None
