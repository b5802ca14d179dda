"""`headway top`: from Prometheus text to a frame, for Headway, for vLLM, and for nobody at all."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from headway.bench.scrape import Growth, Scrape
from headway.cli import top_view
from headway.cli.main import main
from headway.config import SpeculativeConfig
from headway.engine.metrics import EngineMetrics
from headway.server.prometheus import EngineCollector, build_registry
from headway.types import DrafterFeedback, Feedback, Forecast, OutputDelta, Request, SequenceFeedback

VLLM = """
vllm:num_requests_running{engine="0",model_name="big"} 12.0
vllm:num_requests_waiting{engine="0",model_name="big"} 3.0
vllm:gpu_cache_usage_perc{engine="0",model_name="big"} 0.5
vllm:generation_tokens_total{engine="0",model_name="big"} %d
vllm:spec_decode_num_drafts_total{engine="0",model_name="big"} %d
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="big"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="big"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="big",position="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="big",position="1"} %d
"""


def row(drafter: str, k: int, proposed: int, verified: int, accepted: int, seq_id: int = 0) -> SequenceFeedback:
    return SequenceFeedback(seq_id, drafter, k, proposed, verified, accepted, 100)


def step(*rows: SequenceFeedback, **more: Any) -> Feedback:
    values: dict[str, Any] = {
        "step": 1, "num_prefill_tokens": 0, "num_tokens": 8, "num_context_tokens": 100, "draft_ms": 2.0, "verify_ms": 17.0, "step_ms": 20.0,
    }
    return Feedback(sequences=rows, **(values | more))


def text_of(metrics: EngineMetrics, **config: Any) -> str:
    speculative = SpeculativeConfig.parse({"method": ["suffix", "ngram"], "num_speculative_tokens": 4, **config})
    collector = EngineCollector(metrics, SimpleNamespace(num_rejected=0, memory=SimpleNamespace(num_dropped=0)), "small", speculative)   # type: ignore[arg-type]
    return generate_latest(build_registry(collector)).decode()


def frame(before: str, after: str, seconds: float = 2.0, now: float = 0.0) -> str:
    numbers = top_view.read(Scrape.parse(before), Scrape.parse(after), seconds, now)
    return "\n".join("".join(text for text, _ in line) for line in top_view.lines(numbers, "http://here", [1.0, 4.0, 2.0]))


# -- the engine's side --------------------------------------------------------------------------------------------


def test_time_won_and_wasted_are_against_the_forecast_of_a_plain_step() -> None:
    m = EngineMetrics()
    # Two sequences, six drafts verified, three accepted: five tokens in 20 ms, where a plain step of two takes 12.
    m.observe_step(step(row("suffix", 4, 4, 4, 3), row("ngram", 2, 2, 2, 0), forecast=Forecast(16.0, 4.0, 12.0)), [])
    assert m.compared_ms == 20.0
    assert m.plain_equivalent_ms == pytest.approx(12.0 * 5 / 2)
    assert m.wasted_ms == pytest.approx(2.0 * (1 - 3 / 6) + (20.0 - 2.0 - 12.0) * (1 - 3 / 6))
    assert m.step_time_error == pytest.approx(0.2)
    assert m.token_error == pytest.approx(4.0 / 5.0 - 1.0)


def test_steps_without_a_forecast_or_with_a_prompt_are_not_compared() -> None:
    m = EngineMetrics()
    m.observe_step(step(row("suffix", 4, 4, 4, 3)), [])
    assert (m.compared_ms, m.step_time_error, m.token_error) == (0.0, None, None)
    m.observe_step(step(row("suffix", 4, 4, 4, 3), forecast=Forecast(20.0, 4.0, 12.0), num_prefill_tokens=5), [])
    assert (m.compared_ms, m.step_time_error) == (0.0, 0.0)


@pytest.mark.parametrize("times", [{"step_ms": 0.0}, {"step_ms": float("nan")}, {"forecast": Forecast(float("nan"), 1.0, float("nan"))}])
def test_numbers_that_are_none_break_nothing(times: dict[str, Any]) -> None:
    m = EngineMetrics()
    m.observe_step(step(row("suffix", 4, 4, 4, 3), **({"forecast": Forecast(1.0, 1.0, 1.0)} | times)), [])
    m.observe_step(step(), [])
    assert m.compared_ms == 0.0


def test_the_reason_of_the_last_change_is_kept_while_nothing_changes() -> None:
    m = EngineMetrics()
    for reason in ("", "start", "start", "k 4 to 2", "k 4 to 2"):
        m.observe_step(step(row("suffix", 4, 0, 0, 0), reason=reason), [])
    assert m.num_changes == 2
    assert m.last_change is not None
    assert m.last_change[0] == "k 4 to 2"


def busy() -> EngineMetrics:
    m = EngineMetrics()
    m.observe_request(Request("r", [1, 2, 3]))
    drafting = (DrafterFeedback("suffix", 1, 4, 0, 4, 2.0),)
    m.observe_step(
        step(row("suffix", 4, 4, 3, 2), row("ngram", 1, 1, 1, 0), row("none", 0, 0, 0, 0), forecast=Forecast(22.0, 4.0, 10.0),
             reason='k 4 to "2": 0.31 accepted', drafters=drafting),
        [OutputDelta("r", 0, [1, 2, 3], [True, True, False])],
    )
    m.observe_load(3, 1, 0.25)
    return m


def test_metrics_of_the_controller_have_names_and_stay_true_when_k_varies() -> None:
    scrape = Scrape.parse(text_of(busy()))
    assert [scrape.by("headway:chosen_k_bucket", "le")[le] for le in ("0.0", "1.0", "3.0", "4.0", "+Inf")] == [1, 2, 2, 3, 3]
    assert scrape.by("headway:wasted_drafts_total", "stage") == {"trimmed": 1.0, "rejected": 2.0}
    assert scrape.total("headway:plain_equivalent_seconds_total") == pytest.approx(10.0e-3 * 5 / 3)
    assert scrape.total("headway:step_time_error") == pytest.approx(0.1)
    assert scrape.by("headway:policy_last_change_timestamp_seconds", "reason").keys() == {'k 4 to "2"'}   # no numbers that change
    assert scrape.by("headway:policy_last_change_timestamp_seconds", "policy").keys() == {"goodput"}
    assert scrape.total("headway:accepted_per_pos_total", drafter="suffix", position="1") == 1.0
    assert scrape.total("headway:reached_per_pos_total", drafter="suffix", position="2") == 1.0


# -- reading ------------------------------------------------------------------------------------------------------


def test_growth_of_counters_restarts_and_unknown_names() -> None:
    before, after = Scrape.parse("a_total 10\nb_total 5\n"), Scrape.parse("a_total 16\nb_total 2\nc NaN\nnonsense\n")
    grown = Growth(before, after, 2.0)
    assert grown.total("a_total") == 6.0
    assert grown.rate("a_total") == 3.0
    assert grown.total("b_total") == 2.0   # it restarted
    assert grown.total("missing", "a_total") == 6.0
    assert grown.total("missing") is None
    assert grown.total("c") is None
    assert grown.ratio("a_total", "missing") is None
    assert Growth(before, after, 0.0).rate("a_total") is None


def test_labels_are_unescaped() -> None:
    scrape = Scrape.parse(r'x{a="one, \"two\" \\ {three}",b="4"} 7')
    assert scrape.by("x", "a") == {r'one, "two" \ {three}': 7.0}
    assert scrape.total("x", b="4") == 7.0
    assert scrape.total("x", b="5") is None


def test_buckets_become_shares() -> None:
    buckets = {"0.0": 2.0, "1.0": 2.0, "2.0": 6.0, "8.0": 9.0, "+Inf": 10.0}
    assert top_view._shares_of_buckets(buckets) == {"0": 0.2, "2": pytest.approx(0.4), "3-8": pytest.approx(0.3), ">8": pytest.approx(0.1)}
    assert top_view._shares_of_buckets({}) == {}


# -- frames -------------------------------------------------------------------------------------------------------


def test_a_frame_of_headway() -> None:
    metrics = busy()
    assert metrics.last_change is not None
    shown = frame("", text_of(metrics), now=metrics.last_change[1] + 7.0)
    assert "small" in shown
    assert "running 3   waiting 1" in shown
    assert "25%" in shown
    assert "goodput      0.83x plain decoding   wasted time 26%   step-time error 10%" in shown
    assert "k 1.33   tokens per step 1.67   accepted 50%   wasted drafts 60%" in shown
    assert 'goodput   k 4 to "2" (7 s ago)' in shown
    suffix = next(line for line in shown.splitlines() if line.startswith("suffix"))
    assert suffix.split() == ["suffix", "75%", "67%", "1.00", "1.00", "0.00", "-"]
    assert "▂█▄" in shown
    assert "plugin" not in shown
    inside_vllm = frame("", text_of(metrics) + "headway:plugin_seconds_total 0.0001\n")
    assert "step-time error 10%   plugin 0.5%" in inside_vllm


def test_a_frame_of_vllm_shows_what_it_tells() -> None:
    shown = frame(VLLM % (0, 0, 0, 0, 0, 0), VLLM % (400, 100, 400, 150, 90, 60))
    assert "big" in shown
    assert "running 12   waiting 3" in shown
    assert "output 200 tokens/s" in shown
    assert "k 4.00 when drafting   tokens per step 2.50   accepted 38%" in shown
    assert "drafts          100%       38%     0.90  0.67" in shown
    assert "exact while k is constant" in shown
    assert "goodput" not in shown


def test_a_controller_that_is_off_says_why() -> None:
    text = (
        "vllm:generation_tokens_total 50\nvllm:spec_decode_num_drafts_total 20\nvllm:spec_decode_num_draft_tokens_total 60\n"
        'vllm:spec_decode_num_accepted_tokens_total 30\nheadway:controller{engine="0",reason="%s"} %d\n'
        'headway:policy_last_change_timestamp_seconds{policy="goodput",reason="it pays"} 100\n'
    )
    off = top_view.read(Scrape(), Scrape.parse(text % ("an error inside", 0)), 1.0, 101.0)
    works = top_view.read(Scrape(), Scrape.parse(text % ("", 1)), 1.0, 101.0)
    assert (off.off, works.off) == ("an error inside", None)
    lines = ["".join(piece for piece, _ in line) for line in top_view.lines(off, "url")]
    assert any(line.startswith("controller") and "off: an error inside" in line for line in lines)
    assert not any("it pays" in line for line in lines)


def test_a_server_without_speculation() -> None:
    shown = frame("", "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")
    assert "this server reports none" in shown
    assert "None" not in shown


def test_a_quiet_interval_shows_the_whole_life() -> None:
    same = VLLM % (400, 100, 400, 150, 90, 60)
    shown = frame(same, same)
    assert "output 0 tokens/s" in shown
    assert "accepted 38%" in shown
    assert "since the server's start" in shown


@pytest.mark.parametrize(("share", "text"), [(0.0, "    "), (1.0, "████"), (0.5, "██  "), (7.0, "████"), (1 / 32, "▏   ")])
def test_bars(share: float, text: str) -> None:
    assert top_view.bar(share, 4) == text


# -- the command --------------------------------------------------------------------------------------------------


class Answer(BaseHTTPRequestHandler):
    status, body = 200, (VLLM % (400, 100, 400, 150, 90, 60)).encode()

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_once_prints_one_plain_frame(url: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url + path, "--once", "--interval", "0.05"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"headway top  {url}")
    assert "accepted 38%" in out
    assert "\x1b" not in out


def test_without_a_terminal_it_prints_frame_after_frame(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.cli import top

    frames = 0

    def look(self: Any) -> Any:
        nonlocal frames
        frames += 1
        if frames == 4:
            raise KeyboardInterrupt
        return Scrape.parse(Answer.body.decode())

    monkeypatch.setattr(top._Watch, "_look", look)
    assert main(["top", url, "--interval", "0.05"]) == 0
    assert capsys.readouterr().out.count("headway top") == 2


def test_a_server_that_goes_away_is_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.bench.client import Endpoint
    from headway.cli import top

    watch = top._Watch(Endpoint.parse(url), url, 0.05)
    monkeypatch.setattr(Answer, "status", 503)
    assert "answers 503 to /metrics" in watch.next().plain
    assert "trying again" in watch.next().plain
    monkeypatch.setattr(Answer, "status", 200)
    assert "accepted 38%" in watch.next().plain


def test_a_dead_url_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["top", dead, "--once"]) == 2
    assert f"headway top: error: no answer from {dead}: cannot connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [(404, b"", "answers 404 to /metrics"), (200, b"<html>", "neither Headway's nor vLLM's"), (200, b"python_info 1\n", "neither")],
)
def test_something_else_is_an_error(
    url: str, status: int, body: bytes, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Answer, "status", status)
    monkeypatch.setattr(Answer, "body", body)
    assert main(["top", url, "--once"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["top", "127.0.0.1:8000"], ["top", "ftp://x"]])
def test_a_url_that_is_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "http://127.0.0.1:8000" in capsys.readouterr().err
