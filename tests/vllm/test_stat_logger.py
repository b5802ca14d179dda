"""The stat logger with vLLM's classes and no server: made twice, several engines, several API servers, numbers of an unknown shape."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from headway.bench.scrape import Scrape
from headway.types import Feedback, SequenceFeedback
from headway.vllm.scheduler_counters import Counters
from headway.vllm.stat_logger import StatLogger
from headway.vllm.telemetry import Sender

CONFIG = SimpleNamespace(model_config=SimpleNamespace(served_model_name="a-model"))


def step(counters: Counters, num_drafts: int = 4, num_accepted: int = 3, reason: str = "") -> None:
    row = SequenceFeedback(0, "ngram", num_drafts, num_drafts, num_drafts, num_accepted, 50)
    counters.observe_feedback(Feedback(1, (row,), 0, 1 + num_drafts, 50, 0.0, 10.0, 10.0, reason=reason))


def message(sender: Sender) -> SchedulerStats:
    """As it arrives in the API server's process."""
    stats = SchedulerStats(num_running_reqs=3)
    sender.attach(stats, idle=True)
    return MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))


def sender() -> tuple[Counters, Sender]:
    counters = Counters("goodput", "ngram", 4)
    return counters, Sender(counters)


def scrape() -> Scrape:
    return Scrape.parse(generate_latest(REGISTRY).decode())


def test_vllm_finds_it_by_its_entry_point() -> None:
    assert StatLogger in load_stat_logger_plugin_factories()
    assert issubclass(StatLogger, AggregateStatLoggerBase)


def test_numbers_arrive_through_vllms_messages_and_leave_no_trace_in_them() -> None:
    before = scrape().total("headway:steps_total", engine="7") or 0.0
    counters, end = sender()
    logger = StatLogger(CONFIG, [7])
    for _ in range(3):
        step(counters)
        counters.plugin_ms += 2.0
        stats = message(end)
        logger.record(stats, None, engine_idx=7)
        assert stats.waiting_lora_adapters == {}
        assert stats.num_running_reqs == 3
    seen = scrape()
    assert seen.total("headway:steps_total", engine="7") == before + 3
    assert seen.by("headway:reached_per_pos_total", "position", engine="7") == {"0": 3.0, "1": 3.0, "2": 3.0, "3": 3.0}
    assert seen.by("headway:accepted_per_pos_total", "position", engine="7") == {"0": 3.0, "1": 3.0, "2": 3.0, "3": 0.0}
    assert seen.by("headway:chosen_k_bucket", "le", engine="7")["3.0"] == 0.0
    assert seen.by("headway:chosen_k_bucket", "le", engine="7")["4.0"] == 3.0
    assert seen.total("headway:chosen_k_sum", engine="7") == 12.0
    assert seen.total("headway:plugin_seconds_total", engine="7") == pytest.approx(0.006)


def test_loggers_made_again_go_on_counting_and_engines_stay_apart() -> None:
    (one, one_end), (two, two_end) = sender(), sender()
    StatLogger(CONFIG, [11, 12])
    logger = StatLogger(CONFIG, [11, 12])
    for _ in range(2):
        step(one)
    step(two)
    logger.record(message(one_end), None, engine_idx=11)
    logger.record(message(two_end), None, engine_idx=12)
    assert {at: scrape().total("headway:steps_total", engine=at) for at in ("11", "12")} == {"11": 2.0, "12": 1.0}


def test_one_reason_at_a_time() -> None:
    counters, end = sender()
    logger = StatLogger(CONFIG, [21])
    for reason in ("first", "second", "third"):
        step(counters, reason=reason)
        logger.record(message(end), None, engine_idx=21)
    changes = scrape().by("headway:policy_last_change_timestamp_seconds", "reason", engine="21")
    assert list(changes) == ["third"]
    assert changes["third"] > 0
    counters.off = "an error"
    step(counters)
    logger.record(message(end), None, engine_idx=21)
    assert scrape().by("headway:controller", "reason", engine="21") == {"an error": 0.0}


def test_what_cannot_be_read_ends_the_metrics_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    logger = StatLogger(CONFIG, [31])
    for _ in range(3):
        logger.record(SchedulerStats(waiting_lora_adapters={'headway:{"numbers": 3}': 0}), None, engine_idx=31)
    logger.record(None, None, engine_idx=31)
    logger.log()
    assert scrape().total("headway:steps_total", engine="31") in (None, 0.0)


API_SERVER = """
import sys
sys.path.insert(0, {here!r})
import test_stat_logger as t
counters, end = t.sender()
logger = t.StatLogger(t.CONFIG, [0])
for reason in ("first", "second"):
    t.step(counters, reason=reason)
    logger.record(t.message(end), None)
"""


SHOW = """
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
print(generate_latest(get_prometheus_registry()).decode())
"""


def test_several_api_servers_add_up(tmp_path: Path) -> None:
    environment: dict[str, Any] = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    code = API_SERVER.format(here=str(Path(__file__).parent))
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, timeout=120)
    seen = Scrape.parse(done.stdout)
    assert seen.total("headway:steps_total") == 4.0
    assert seen.total("headway:chosen_k_count") == 4.0
    assert list(seen.by("headway:policy_last_change_timestamp_seconds", "reason")) == [""]
