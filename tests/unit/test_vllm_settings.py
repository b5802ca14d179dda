"""What a user may say to the vLLM plugin. Needs no vLLM."""

from __future__ import annotations

import pytest

from headway.control.policies.goodput import Goodput
from headway.errors import ConfigError, InvalidRequestError
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
