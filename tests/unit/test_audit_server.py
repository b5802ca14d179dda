"""An audit of our own server over HTTP: sound as it is, and found out with a fault planted."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.audit.greedy import check_greedy, check_prefix_cache, measure_noise
from headway.audit.limits import check_structure
from headway.audit.records import FAULT, SKIPPED, SOUND, CheckResult
from headway.audit.run import AuditTarget, audit, open_session
from headway.audit.sampled import SETTINGS, SampledCheck, survey_prompts
from headway.audit.side import Refused
from headway.cli.main import main
from headway.errors import ConfigError
from tests.audit_faults import FAULTS
from tests.integration.conftest import LiveServer, live_server
from tests.tiny import tiny_model_dir

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "results/audit/zen5.json").read_text(encoding="utf-8"))["faults"]
sys.path.insert(0, str(ROOT / "studies"))
import audit_power  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tiny_model_dir(tmp_path_factory.mktemp("audit"), max_position_embeddings=1024)
    with live_server(directory, kv_cache_memory_bytes=32 << 20) as live:
        yield live


def test_the_switch_of_our_server_is_found_and_used(server: LiveServer) -> None:
    async def run() -> list[CheckResult]:
        session, side = await open_session(AuditTarget(server.url), 1.0, 0)
        assert session.salted
        assert session.neutral["top_k"] == 0
        assert side.repeats
        before = await side.num_drafted()
        await session.plain.complete("a b a b a b a b", max_tokens=8, temperature=0, ignore_eos=True)
        assert await side.num_drafted() == before
        results = [await measure_noise(session), *await check_greedy(session), await check_prefix_cache(session)]
        assert (await side.num_drafted() or 0) > (before or 0)
        check = SampledCheck(SETTINGS[0], session, await survey_prompts(session))
        for _ in range(3):
            await check.step()
        return [*results, check.result(), await check_structure(session)]

    results = asyncio.run(run())
    assert [result.status for result in results[:5]] == [SOUND] * 5
    assert "cache_salt keeps prefixes apart" in results[3].summary
    assert results[0].figures["largest_logprob_difference"] == 0.0
    assert results[5].status in (SKIPPED, SOUND)


def test_what_a_server_refuses_is_told_from_what_breaks(server: LiveServer) -> None:
    async def run() -> None:
        session, side = await open_session(AuditTarget(server.url), 1.0, 0)
        with pytest.raises(Refused, match="400"):
            await side.complete("a", nonsense=1)
        command = session.plain.curl("it's", max_tokens=2)
        assert command.startswith(f"curl {server.url}/v1/completions")
        assert '"enabled": false' in command

    asyncio.run(run())


def test_a_server_that_drafts_nothing_cannot_be_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(tiny_model_dir(tmp_path, max_position_embeddings=1024), speculative=None, kv_cache_memory_bytes=32 << 20) as live:
        with pytest.raises(ConfigError, match="drafted nothing"):
            asyncio.run(audit(AuditTarget(live.url, live.url), 0.01, 0, lambda what: None))
        assert main(["audit", live.url, live.url, "--budget", "0.01"]) == 2
    assert "drafted nothing" in capsys.readouterr().err


def test_the_command_writes_its_reports(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--junit", str(tmp_path / "a.xml")]
    assert main(["audit", server.url, "--budget", "0.02", *files]) == 0
    assert capsys.readouterr().out.startswith("SOUND")
    assert json.loads((tmp_path / "a.json").read_text())["verdict"] == "sound"
    assert "<testsuite" in (tmp_path / "a.xml").read_text()


@pytest.mark.parametrize("fault", ["stale_kv", "draft_logprobs"])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    """Those that temperature 0 shows, so that no test waits for chance."""
    assert found_by(fault, tmp_path, 1.0)


@pytest.mark.heavy
@pytest.mark.parametrize("fault", [name for name in MEASURED if name not in ("stale_kv", "draft_logprobs")])
def test_what_was_found_once_is_found_again(fault: str, tmp_path: Path) -> None:
    assert found_by(fault, tmp_path, 10.0)


def test_every_measured_fault_is_one_that_can_be_planted() -> None:
    assert set(MEASURED) <= set(FAULTS)


@pytest.mark.heavy
def test_a_server_without_a_fault_is_not_accused(tmp_path: Path) -> None:
    assert found_by("none", tmp_path, 3.0) == []


def found_by(fault: str, folder: Path, minutes: float) -> list[str]:
    running = audit_power.server(fault, folder)
    try:
        report = asyncio.run(audit(AuditTarget(running.url), minutes, 0, lambda what: None, fail_fast=True))
    finally:
        running.stop()
    return [result.name for result in report.results if result.status == FAULT]
