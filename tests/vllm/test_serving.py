"""A running vLLM with Headway's scheduler, from outside: metrics, `headway top`, traces, requests' own wishes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import NGRAM, REPEATING, Server, flags_of

from headway.bench.scrape import Growth, Scrape
from headway.telemetry.counters import CHOSEN_K, StepCounters, measurements
from headway.telemetry.trace import read_trace

ORIGINAL = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return width * height * depth\n"


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], trace_path: Path) -> Server:
    policy = {"name": "static"}    # drafts always, so that there is something to see
    return serve(*flags_of(NGRAM, {"policy": policy, "trace": str(trace_path), "costs": "off"}))


def growth(server: Server, work: Callable[[], object]) -> Growth:
    """What the metrics grew by during `work`."""
    before = server.settled()
    work()
    return Growth(before, server.settled(), 1.0)


def drafted(grown: Growth) -> float:
    return sum(grown.by("headway:drafted_per_pos_total", "drafter").values())


def test_all_of_our_servers_metrics_are_there(server: Server) -> None:
    server.complete()
    seen = server.settled()
    names = {found.name for found in measurements(StepCounters(), ["ngram"], 8, "static") if not found.gauge}
    assert {f"{name}_total" for name in names} - seen.samples.keys() == set()
    assert f"{CHOSEN_K[0]}_bucket" in seen
    assert "headway:policy_last_change_timestamp_seconds" in seen
    assert seen.by("headway:controller", "engine") == {"0": 1.0}
    plugin, steps = seen.total("headway:plugin_seconds_total"), seen.total("headway:step_seconds_total")
    assert plugin is not None
    assert steps is not None
    assert 0.0 < plugin < steps


def test_counters_agree_with_vllms_own_and_with_the_text(server: Server) -> None:
    def work() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: server.complete(f"{REPEATING} {at}", max_tokens=20 + at, ignore_eos=True), range(16)))

    grown = growth(server, work)
    accepted = sum(grown.by("headway:accepted_per_pos_total", "drafter").values())
    assert drafted(grown) > 0
    assert drafted(grown) == grown.total("vllm:spec_decode_num_draft_tokens_total")
    assert accepted == grown.total("vllm:spec_decode_num_accepted_tokens_total")
    by_position = grown.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert grown.by("headway:accepted_per_pos_total", "position") == by_position
    # A row writes one token and what was accepted; the last of a request may have accepted more than it had room for.
    written, rows = grown.total("vllm:generation_tokens_total"), grown.total("headway:sampling_rows_total")
    assert written == sum(20 + at for at in range(16))
    assert rows is not None
    assert written <= rows + accepted <= written + 16 * 8
    assert grown.by("headway:chosen_k_bucket", "le")["+Inf"] == rows
    assert grown.total("headway:errors_total") == 0
    assert grown.total("headway:fallback_steps_total") == 0


def test_a_request_can_switch_speculation_off_or_cap_it(server: Server) -> None:
    off = growth(server, lambda: server.complete(vllm_xargs={"headway_enabled": 0}, ignore_eos=True))
    assert drafted(off) == 0
    assert off.total("headway:sampling_rows_total") == 24
    capped = growth(server, lambda: server.complete(vllm_xargs={"headway_max_tokens": 2}, ignore_eos=True))
    positions = capped.by("headway:drafted_per_pos_total", "position")
    assert positions["0"] > 0
    assert sum(count for at, count in positions.items() if int(at) >= 2) == 0
    free = growth(server, lambda: server.complete(ignore_eos=True))
    assert free.by("headway:drafted_per_pos_total", "position")["2"] > 0


def test_a_wish_nobody_understands_is_counted_and_the_request_served(server: Server) -> None:
    grown = growth(server, lambda: server.complete(vllm_xargs={"headway_max_tokens": "many"}))
    assert grown.total("headway:invalid_requests_total") == 1
    assert grown.total("vllm:request_success_total") == 1


def test_top_shows_what_speculation_does(server: Server) -> None:
    server.complete(f"{ORIGINAL}{ORIGINAL}", max_tokens=48)
    server.settled()
    words = [sys.executable, "-m", "headway.cli.main", "top", server.url, "--once", "--interval", "0.2"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for expected in ("smollm2-135m", "k chosen", "policy       static", "accepted when reached, by position", "\nngram "):
        assert expected in shown.stdout, shown.stdout


def test_the_trace_can_be_replayed_and_tuned_from(server: Server, trace_path: Path) -> None:
    server.complete(f"{ORIGINAL}{ORIGINAL}", max_tokens=48)
    server.settled()
    recorded = read_trace(trace_path)
    assert recorded.max_k == 8
    assert recorded.drafters == ("ngram",)
    verified = [seq for step in recorded.steps for seq in step.feedback.sequences if seq.num_drafts]
    assert verified
    assert all(0 <= seq.num_accepted <= seq.num_drafts <= seq.num_proposed <= seq.k <= 8 for seq in verified)
    assert all(step.feedback.step_ms > 0.0 for step in recorded.steps)
    tuned = trace_path.with_name("tuned")
    for words in (["replay", str(trace_path)], ["tune", "--trace", str(trace_path), "--output", str(tuned)]):
        done = subprocess.run([sys.executable, "-m", "headway.cli.main", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert json.loads((tuned / "vllm.json").read_text())["num_speculative_tokens_per_batch_size"]


def test_what_vllm_reads_is_not_disturbed(server: Server) -> None:
    """The carrier of the counters is emptied before vLLM's own loggers see it."""
    assert not any("headway" in value for have in labels_of(server.metrics(), "vllm:") for value in have.values() if "adapter" in str(have))
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log, server.tail()


def labels_of(scrape: Scrape, prefix: str) -> list[dict[str, str]]:
    return [have for name, series in scrape.samples.items() if name.startswith(prefix) for have, _ in series]
