"""What each constant of the default policy does: every one of control/constants.py at half and at twice its value.

    python studies/constants.py [--only NAME ...] [--worlds NAME ...] [--seeds 4] [--output FILE.json]

Each world of WORLDS has known costs and acceptance (tests/closed_loop.py); TRACE.jsonl@8 is a recorded trace (`--trace` of `headway
bench`), decided again with 8 requests in flight. `mean` is the geometric mean, over worlds and seeds, of tokens per millisecond with the
changed constant against tokens per millisecond as it is; `world` is the one that changes most, to `there`. Seeds are the same for both,
but a decision that differs changes all that is drawn after it: `noise` says how much both move when nothing but the seeds changes.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import origin, publish

from headway.control import constants as const
from headway.control.costs import Work
from headway.control.policies.goodput import Goodput
from headway.telemetry.trace import read_trace
from headway.tune import replay
from headway.types import Feedback
from tests.closed_loop import (
    CHAT,
    COPIER,
    EDIT,
    HEAD,
    NEVER,
    SUFFIX,
    DrafterCost,
    Texture,
    Textures,
    World,
    always,
    cpu,
    gpu,
    half_and_half,
    run,
)  # fmt: skip

OWN_MS = 0.15   # milliseconds of the policy's own time in each step, in its feedback
NETWORK = {"eagle": DrafterCost(0.6, 0.2, 0.9, unseen=0.07), "suffix": DrafterCost(0.05, 0.05)}


@dataclass(frozen=True)
class Case:
    """A world, for how many steps, and how it begins."""

    world: World
    steps: int = 240
    profiled: bool = True
    options: Goodput.Options = Goodput.Options()
    slowest: bool = False   # judged by the tokens of the slowest request, not by those of all


def turning(every: int, first: Texture, then: Texture) -> Textures:
    return lambda step, request: {"suffix": then if (step // every) % 2 else first}


def half_without_confidence(step: int, request: int) -> Mapping[str, Texture]:
    return {name: replace(texture, stated=None) for name, texture in half_and_half(step, request).items()}


def three(step: int, request: int) -> Mapping[str, Texture]:
    """The network has two thirds right; the copies of one drafter hold now and then, those of the other for half of the requests."""
    suffix = EDIT if (request + step // 60) % 3 == 0 else CHAT
    return {"eagle": Texture(rate=0.65), "suffix": suffix, "ngram": NEVER if request % 2 else EDIT}


def bursts(step: int, request: int) -> Mapping[str, Texture]:
    """25 steps of copied text now and then, nothing in between."""
    begins = np.random.default_rng([request, step // 200]).integers(0, 250)
    return {"suffix": Texture(hit=1.0, rate=0.97) if begins <= step % 200 < begins + 25 else Texture(hit=0.1, rate=0.2, length=1)}


def copies_here_and_there(step: int, request: int) -> Mapping[str, Texture]:
    """A long copy in a quarter of the steps; the network has two thirds right throughout."""
    copied = np.random.default_rng([7, step, request]).random() < 0.25
    return {"suffix": Texture(1.0, 8, 0.9) if copied else Texture(0.35, 2, 0.25), "eagle": Texture(1.0, 16, 0.65)}


def network_turns(step: int, request: int) -> Mapping[str, Texture]:
    """Copies hold at first and the network is wrong; then the other way round."""
    if step < 400:
        return {"eagle": Texture(1.0, 16, 0.2), "suffix": Texture(0.6, 8, 0.9)}
    return {"eagle": Texture(1.0, 16, 0.65), "suffix": Texture(0.08, 3, 0.4)}


def edits_then_chat(step: int, request: int) -> Mapping[str, Texture]:
    if request < 6:
        return {"eagle": Texture(1.0, 16, 0.12), "suffix": Texture(0.6, 8, 0.9)}
    return {"eagle": Texture(1.0, 16, 0.5), "suffix": Texture(0.15, 3, 0.35)}


def priced(share: float) -> Callable[[Work], float]:
    """Each further token costs this share of a plain step of one request."""
    return lambda work: 60.0 * (1.0 + share * (work.num_tokens - 1))


def small_cpu(work: Work) -> float:
    return 12.6 + 1.2 * work.num_tokens + 5.0 * (work.num_tokens > 3)


def large_cpu(work: Work) -> float:
    return 110.0 + 30.0 * work.num_tokens


def third_of_a_step(work: Work) -> float:
    """Flat for three tokens, then 8 % of a step for each: a draft that is verified costs little beside drafting it."""
    return 146.0 if work.num_tokens <= 3 else 140.0 + 12.0 * work.num_tokens


def simple(num_requests: int, texture: Texture, **more: Any) -> World:
    return World(num_requests, always(suffix=texture), **({"drafters": SUFFIX} | more))


UNEVEN = Texture(rates=(0.998,) * 10 + (0.97,) * 3 + (0.86, 0.7, 0.55))
WORLDS: dict[str, Case] = {
    **{f"edit@{n}": Case(simple(n, EDIT)) for n in (1, 4, 16)},
    **{f"chat@{n}": Case(simple(n, CHAT)) for n in (1, 4, 16)},
    **{f"half@{n}": Case(World(n, half_and_half, drafters=SUFFIX)) for n in (2, 16, 48)},
    "never@8": Case(simple(8, NEVER), 400),
    "never, drafting has its price@32": Case(simple(32, NEVER, drafters={"suffix": DrafterCost(0.05, 0.2)}), 300),
    "all alike@32, gpu": Case(simple(32, Texture(hit=0.5, rate=0.8), cost=gpu), 300),
    "turns every 150 steps@24": Case(World(24, turning(150, CHAT, EDIT), drafters=SUFFIX), 600),
    "turns every 25 steps@16": Case(World(16, turning(25, NEVER, EDIT), drafters=SUFFIX), 400),
    "bursts@1": Case(World(1, bursts, drafters={"suffix": DrafterCost(0.02, 0.2)}), 1000),
    "bursts@4": Case(World(4, bursts, drafters={"suffix": DrafterCost(0.02, 0.2)}), 600),
    "requests come and go@8": Case(World(8, half_and_half, drafters=SUFFIX, request=lambda serial: (200, 60)), 400),
    "costs change@16": Case(simple(16, Texture(hit=0.9, rate=0.8), cost=gpu, later=(150, cpu)), 400),
    "slows down@16": Case(simple(16, EDIT, slowdown=lambda step: 1.6 if step >= 100 else 1.0)),
    "cold@1": Case(simple(1, EDIT), 120, profiled=False),
    "cold@16": Case(simple(16, EDIT), 200, profiled=False),
    "cold, first steps compile@8": Case(
        simple(8, EDIT, drafts_ahead=True, clock=lambda step, ms: ms * (100.0 if step < 3 else 1.0)), 240, profiled=False
    ),
    "confidence lies, useless@16": Case(simple(16, Texture(0.3, 4, 0.02, lambda rate: 0.99))),
    "confidence is upside down@8": Case(simple(8, Texture(0.9, 16, 0.93, lambda rate: 1.0 - rate))),
    "no confidence@8": Case(simple(8, Texture(0.9, 16, 0.9, None))),
    "one misses, others hit@24": Case(World(
        24, lambda step, request: {"suffix": Texture(1.0, 16, 0.0 if request == 7 else 0.97, None)}, drafters=SUFFIX, cost=gpu
    )),
    "new and useless, verifying is expensive@1": Case(
        simple(1, Texture(0.6, 4, 0.05, lambda rate: 0.85), cost=priced(0.9), drafters={"suffix": DrafterCost(0.1, 0.1)}), 100
    ),
    "new and right@1": Case(
        simple(1, Texture(rate=0.97), cost=priced(0.15), drafters={"suffix": DrafterCost(0.1, 0.1)}), 40
    ),
    "head and copier@1": Case(World(1, copies_here_and_there, cost=gpu, drafters={"eagle": HEAD, **COPIER}), 400),
    "head and copier, sampled@8": Case(World(
        8, copies_here_and_there, cost=gpu, drafters={"eagle": HEAD, **COPIER}, deterministic=False, greedy=False, copying=("suffix",)
    )),
    "network is for few@8": Case(World(
        8, lambda step, request: {
            "suffix": Texture(0.0) if (step + request) % 8 == 0 else Texture(1.0, 8, 0.9), "eagle": Texture(1.0, 16, 0.65)
        }, cost=gpu, drafters={"eagle": DrafterCost(2.0, 0.02, 0.05), **COPIER},
    )),
    "copier lies beside a head@8": Case(World(
        8, always(suffix=Texture(0.6, 8, 0.05, lambda rate: 0.95), eagle=Texture(1.0, 16, 0.65)), cost=gpu,
        drafters={"eagle": HEAD, **COPIER},
    )),
    "network turns right@1": Case(World(
        1, network_turns, lambda work: 11.0 + 2.8 * work.num_tokens, deterministic=False, copying=("suffix",),
        drafters={"eagle": DrafterCost(0.6, 0.2, 0.9), "suffix": DrafterCost(0.05, 0.05)},
    ), 900),
    "network has to read@1": Case(World(
        1, edits_then_chat, small_cpu, drafters=NETWORK, deterministic=False, copying=("suffix",),
        request=lambda serial: (500, 64) if serial < 6 else (50, 72),
    ), 900),
    "network pays by the step@4": Case(
        World(4, always(eagle=Texture(rate=0.6)), cost=gpu, drafters={"eagle": DrafterCost(0.1, 0.0, 0.7)})
    ),
    "network pays by the step, sampled@8": Case(World(
        8, always(eagle=Texture(rate=0.7)), deterministic=False, greedy=False, drafters={"eagle": DrafterCost(0.1, 0.02, 0.1)}
    )),
    "sampled trees@4": Case(World(
        4, always(suffix=Texture(rate=0.7, stated=None)), drafters=SUFFIX, deterministic=False, greedy=False, breadth=4
    )),
    "draft model, token by token@1": Case(World(
        1, always(small=UNEVEN), large_cpu, drafters={"small": DrafterCost(2.0, 0.0, 53.0)}, deterministic=False, stepwise=True,
        request=lambda serial: (45, 200),
    )),
    "draft model, token by token@4": Case(World(
        4, always(small=UNEVEN), small_cpu, drafters={"small": DrafterCost(0.5, 0.2, 3.0)}, deterministic=False, stepwise=True
    )),
    "draft model, a third of a step for each token@1": Case(World(
        1, always(small=Texture(rate=0.8)), third_of_a_step, drafters={"small": DrafterCost(2.0, 0.0, 53.0, unseen=5.0)},
        deterministic=False, request=lambda serial: (45, 48),
    )),
    "half, no confidence@16": Case(World(16, half_without_confidence, drafters=SUFFIX)),
    "three drafters@6": Case(World(6, three, max_k=16, copying=("suffix", "ngram"), drafters={
        "eagle": DrafterCost(0.6, 0.1, 0.5, 0.002), **COPIER, "ngram": DrafterCost(0.005, 0.03)
    })),
    "a target of 18 ms per token@8": Case(World(
        8, lambda step, request: {"suffix": NEVER if request == 0 else Texture(hit=1.0, rate=0.99)}, drafters=SUFFIX, max_k=16
    ), options=Goodput.Options(tpot_slo_ms=18.0), slowest=True),
    "latency@16": Case(World(16, half_and_half, drafters=SUFFIX), options=Goodput.Options(objective="latency")),
    "a clock that breaks@8": Case(simple(8, EDIT, clock=lambda step, ms: float("nan") if step % 7 == 3 else ms)),
}


class Timed(Goodput):
    """Its own time has a price, the same in every run."""

    def observe(self, feedback: Feedback) -> None:
        super().observe(replace(feedback, policy_ms=OWN_MS))


def measured(name: str, seed: int) -> float:
    """Tokens per millisecond of one world."""
    if name not in WORLDS:
        path, _, in_flight = name.rpartition("@")
        outcome = replay.run(Timed(), replay.World(read_trace(path), seed=seed, in_flight=int(in_flight)))
        return outcome.num_tokens / outcome.ms
    case = WORLDS[name]
    result = run(Timed(case.options), replace(case.world, seed=seed), case.steps, profiled=case.profiled)
    tokens = result.by_request.sum(axis=0).min() if case.slowest else result.tokens.sum()
    return float(tokens / result.ms.sum())


# -- constants --------------------------------------------------------------------------------------------------------

LINE = re.compile(r"^([A-Z_]+) = .*# ([^:]+): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Constant:
    name: str
    value: float
    unit: str
    meaning: str


def all_constants() -> list[Constant]:
    """Those of control/constants.py that are numbers."""
    lines = LINE.findall(Path(const.__file__).read_text(encoding="utf-8"))
    found = [Constant(name, getattr(const, name), unit, meaning) for name, unit, meaning in lines]
    return [constant for constant in found if isinstance(constant.value, (int, float))]


@contextmanager
def changed(name: str, factor: float) -> Iterator[None]:
    """The constant times `factor`; "" for none."""
    if not name:
        yield
        return
    old = getattr(const, name)
    setattr(const, name, max(1, round(old * factor)) if isinstance(old, int) else old * factor)
    try:
        yield
    finally:
        setattr(const, name, old)


def sweep(name: str, factor: float, seeds: range, worlds: Sequence[str]) -> dict[str, float]:
    """world -> mean tokens per millisecond over seeds."""
    with changed(name, factor):
        return {world: float(np.mean([measured(world, seed) for seed in seeds])) for world in worlds}


def against(base: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any]:
    ratios = {name: other[name] / base[name] for name in base}
    worst = max(ratios, key=lambda name: abs(math.log(ratios[name])))
    return {
        "mean": round(math.exp(sum(map(math.log, ratios.values())) / len(ratios)), 4), "world": Path(worst).name,
        "there": round(ratios[worst], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of constants")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), help="of WORLDS, or TRACE.jsonl@IN_FLIGHT")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    constants = [constant for constant in all_constants() if not options.only or constant.name in options.only]
    seeds, again = range(options.seeds), range(options.seeds, 2 * options.seeds)
    jobs = [("", 1.0, seeds), ("", 1.0, again), *((constant.name, factor, seeds) for constant in constants for factor in (0.5, 2.0))]
    with ProcessPoolExecutor(options.workers) as pool:
        base, other, *found = pool.map(partial(sweep_of, options.worlds), jobs)
    noise = against(base, other)
    rows = {
        constant.name: {
            "value": constant.value, "unit": constant.unit, "meaning": constant.meaning,
            "half": against(base, found[2 * i]), "twice": against(base, found[2 * i + 1]),
        }
        for i, constant in enumerate(constants)
    }  # fmt: skip
    for name, row in rows.items():
        changes = [f"{row[at]['mean']:.4f} ({row[at]['there']:.3f} {row[at]['world']})" for at in ("half", "twice")]
        print(f"{name:25} {row['value']:>8}  {'  '.join(changes)}")
    print("noise", noise)
    if options.output is not None:
        rates = {Path(world).name: rate for world, rate in base.items()}
        publish({**origin(), "seeds": options.seeds, "noise": noise, "rates": rates, "constants": rows}, options.output)


def sweep_of(worlds: Sequence[str], job: tuple[str, float, range]) -> dict[str, float]:
    return sweep(*job, worlds)


if __name__ == "__main__":
    main()
