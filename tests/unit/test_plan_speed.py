"""The roofline: what is published, what must hold of any machine, and what a recording teaches it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.control.policy import BatchView, SequenceView
from headway.errors import ConfigError, ModelError
from headway.json_object import JsonObject
from headway.plan import calibration, device, drafting, families, memory
from headway.plan.network import NetworkShape
from headway.plan.quantization import named
from headway.plan.speed import PUBLISHED, Load, Machine, tokens_per_step
from headway.telemetry.trace import TraceWriter, read_trace
from headway.types import Feedback, SequenceFeedback
from tests import published_models as models


def network(values: dict[str, Any], name: str = "small") -> NetworkShape:
    return families.read(JsonObject(values, "config.json", ModelError), name)


def machine(
    target: dict[str, Any], gpu: str = "H100", method: str | None = None, draft: dict[str, Any] | None = None, **changes: Any
) -> Machine:
    read = network(target)
    drafts = drafting.build(method, read, None, None, network(draft) if draft else None, 4) if method else None
    stored = named(changes.pop("quantization")) if "quantization" in changes else None
    return Machine(read, drafts, stored, memory.Deployment(device.find(gpu), **changes))


@pytest.mark.parametrize(
    ("config", "gpu", "quantization", "published", "source"),
    [
        (models.LLAMA_8B, "H100", "none", 158.34, "https://docs.sglang.io/advanced_features/speculative_decoding.html"),
        (models.LLAMA_70B, "H200", "fp8", 51.14,
         "https://developer.nvidia.com/blog/boost-llama-3-3-70b-inference-throughput-3x-with-nvidia-tensorrt-llm-speculative-decoding/"),
    ],
)  # fmt: skip
def test_one_request_at_published_speed(config: dict[str, Any], gpu: str, quantization: str, published: float, source: str) -> None:
    found = machine(config, gpu, quantization=quantization).step_ms(Load(1, 128, 512), 0)
    assert 1e3 / found == pytest.approx(published, rel=0.1)


def test_tokens_of_a_step() -> None:
    assert tokens_per_step(0, [0.5]) == 1.0
    assert tokens_per_step(2, [0.5]) == pytest.approx(1 + 0.5 + 0.25)
    assert tokens_per_step(3, [0.8, 0.5]) == pytest.approx(1 + 0.8 + 0.4 + 0.2)


def test_at_break_even_the_time_per_token_is_that_of_plain_decoding() -> None:
    found, load = machine(models.LLAMA_70B, method="draft_model", draft=models.LLAMA_1B, tp=4), Load(8, 1024, 128)
    for k in (1, 3, 8):
        even = found.break_even(load, k)
        assert even is not None
        assert found.time_per_token_ms(load, k, [even]) == pytest.approx(found.step_ms(load, 0), rel=1e-6)
    slower = machine(models.LLAMA_8B, "H200", method="draft_model", draft=models.LLAMA_70B)
    assert slower.break_even(load, 2) is None


def test_speculation_gains_less_at_more_load_and_with_longer_inputs() -> None:
    """The findings of the studies that this answers for."""
    found = machine(models.LLAMA_70B, "A100-80", method="draft_model", draft=models.LLAMA_1B, tp=4)

    def gain(load: Load, k: int = 4, acceptance: float = 0.6) -> float:
        return found.throughput(load, k, [acceptance]) / found.throughput(load, 0, [0.0])

    by_load = [gain(Load(size, 1024, 128)) for size in (1, 4, 16, 64, 256)]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[0] > 1.5
    assert by_load[-1] < 1.0
    assert gain(Load(16, 2048, 128)) < gain(Load(16, 1024, 128))
    best = [max((0, 1, 2, 3, 4, 6, 8), key=lambda k: found.throughput(Load(size, 1024, 128), k, [0.6])) for size in (1, 16, 64, 256)]
    assert best == sorted(best, reverse=True)
    large = machine(models.LLAMA_70B, "A100-80", method="draft_model", draft=models.LLAMA_8B, tp=4)
    load = Load(16, 1024, 128)
    assert large.throughput(load, 4, [0.765]) < found.throughput(load, 4, [0.535])


def test_more_devices_are_faster_and_pay_for_talking() -> None:
    times = [machine(models.LLAMA_70B, "H200", tp=tp).step_ms(Load(8, 1024, 128), 0) for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[3] < 8
    slow = machine(models.LLAMA_70B, "L40S", tp=8)
    assert slow.target_parts(512, 512, 512, 512).communication > 0.2 * slow.step_ms(Load(512, 1, 1), 0)


def test_a_pipeline_shortens_nobody_s_step() -> None:
    load = Load(32, 1024, 128)
    one, two = (machine(models.LLAMA_70B, "H200", pp=pp).step_ms(load, 0) for pp in (1, 2))
    assert two >= 0.9 * one


def test_of_experts_those_that_are_chosen_are_read() -> None:
    found = machine(models.QWEN3_30B)
    stage = found.target.stage(0, 1)
    one, many = stage.bytes_read(1, None, 1), stage.bytes_read(1, None, 4096)
    assert one == pytest.approx(2 * found.target.num_active_parameters, rel=0.02)
    assert many == pytest.approx(stage.weight_bytes(1, None) - 2 * 151936 * 2048, rel=0.01)


def test_lookups_cost_a_little_and_heads_one_pass_for_all() -> None:
    load = Load(4, 512, 128)
    assert machine(models.LLAMA_8B, method="ngram").draft_ms(load, 4) == PUBLISHED.lookup_ms
    medusa, eagle = machine(models.LLAMA_8B, method="medusa"), machine(models.LLAMA_8B, method="eagle3")
    assert medusa.draft_ms(load, 1) == medusa.draft_ms(load, 4)
    assert eagle.draft_ms(load, 4) == pytest.approx(4 * eagle.draft_ms(load, 1))
    assert eagle.draft_ms(load, 0) == 0.0


# -- recordings -----------------------------------------------------------------------------------------------------------


def record(path: Path, known: Machine, accepted: int = 2, num_steps: int = 120, noise: float = 0.02) -> str:
    """Steps of 1 to 32 sequences, 4 drafts each, that take what `known` says, and a little noise."""
    random = np.random.default_rng(0)
    writer = TraceWriter(path, {"max_k": 4, "drafters": ["draft_model"], "model": "small"})
    for step in range(num_steps):
        rows, context, k = int(random.choice([1, 4, 16, 32])), int(random.integers(200, 2000)), 4 * (step % 3 > 0)
        sequences = tuple(SequenceFeedback(i, "draft_model" if k else "none", k, k, k, min(k, accepted), context) for i in range(rows))
        verify = known.verify_ms(rows, rows * (1 + k), rows * context) * (1 + noise * float(random.standard_normal()))
        drafted = known.draft_ms(Load(rows, context, 0), k)
        views = tuple(SequenceView(i, context, step, True, 8, True, 0, 0, 0) for i in range(rows))
        feedback = Feedback(step, sequences, 0, rows * (1 + k), rows * context, drafted, verify, verify + drafted, rows)
        writer.write(BatchView(step, views, 0, 100, 512, ("draft_model",), 4), feedback)
    writer.close()
    return str(path)


def test_a_recording_teaches_what_the_machine_reaches(tmp_path: Path) -> None:
    general = machine(models.LLAMA_8B, method="draft_model", draft=models.LLAMA_1B)
    true = dataclasses.replace(PUBLISHED, bandwidth=0.55, compute=0.35, fixed_ms=2.0, draft_scale=1.8)
    known = dataclasses.replace(general, corrections=true)
    trace = read_trace(record(tmp_path / "t.jsonl", known))
    found = calibration.corrections([trace], general)
    learned = dataclasses.replace(general, corrections=found)
    assert found.error < 0.03
    assert "120 recorded steps" in found.source
    for size, k in ((1, 0), (8, 2), (64, 4)):
        load = Load(size, 700, 100)
        assert learned.step_ms(load, k) == pytest.approx(known.step_ms(load, k), rel=0.1)
        assert abs(general.step_ms(load, k) / known.step_ms(load, k) - 1) > 0.2
    assert calibration.acceptance([trace]) == [1.0, 1.0, 0.0]


def test_interrupted_steps_are_not_believed(tmp_path: Path) -> None:
    general = machine(models.LLAMA_8B)
    trace = read_trace(record(tmp_path / "t.jsonl", general))
    steps = list(trace.steps)
    for index in (10, 50, 90):
        slow = dataclasses.replace(steps[index].feedback, step_ms=500.0)
        steps[index] = dataclasses.replace(steps[index], feedback=slow)
    found = calibration.corrections([dataclasses.replace(trace, steps=tuple(steps))], general)
    assert found.error < 0.05


def test_too_few_steps_teach_nothing(tmp_path: Path) -> None:
    general = machine(models.LLAMA_8B)
    trace = read_trace(record(tmp_path / "t.jsonl", general, num_steps=10))
    with pytest.raises(ConfigError, match="the recording has 10 steps: at least 40"):
        calibration.corrections([trace], general)
    assert calibration.acceptance([read_trace(record(tmp_path / "u.jsonl", general, num_steps=1))]) == []
