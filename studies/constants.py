"""What each constant of the default policy is worth: every one at half and at twice its value, in computed worlds.

    python studies/constants.py [--only NAME ...] [--seeds 4] [--traces FILE ...] [--output FILE.json]

Each world of WORLDS has known costs and acceptance (tests/closed_loop.py). A constant's figure is the geometric mean, over worlds and
seeds, of tokens per millisecond with the changed constant against tokens per millisecond as it is; beside it the world that changes most.
Recorded traces (`--trace` of `headway bench`) are decided again with 1, 4 and 16 requests in flight and count as worlds, too.
Seeds are the same for both, but a decision that differs changes all that is drawn after it: `noise` in the output says how much the
mean and the worst world move when nothing but the seeds changes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import origin, publish

import headway.control
from headway.control.costs import Work
from headway.control.policies.goodput import Goodput
from headway.telemetry.trace import read_trace
from headway.tune import replay
from headway.types import Feedback
from tests.closed_loop import DrafterCost, Texture, World, cpu, gpu, run

OWN_MS = 0.15   # milliseconds of the policy's own time in each step, as it is told
EDIT, CHAT = Texture(hit=0.9, rate=0.93), Texture(hit=0.15, rate=0.4, length=4)
NEVER = Texture(hit=0.3, rate=0.02, length=4)
SUFFIX, COPIER = {"suffix": DrafterCost(0.01, 0.06)}, {"suffix": DrafterCost(0.005, 0.02)}
HEAD = DrafterCost(0.1, 0.05, 0.27)
NETWORK = {"eagle": DrafterCost(0.6, 0.2, 0.9, unseen=0.07), "suffix": DrafterCost(0.05, 0.05)}

Textures = Callable[[int, int], Mapping[str, Texture]]


@dataclass(frozen=True)
class Case:
    """A world, for how many steps, and how it begins."""

    world: World
    steps: int = 240
    profiled: bool = True
    options: Goodput.Options = Goodput.Options()
    slowest: bool = False   # judged by the tokens of the slowest request, not by those of all


def always(**textures: Texture) -> Textures:
    return lambda step, request: textures


def turning(every: int, first: Texture, then: Texture) -> Textures:
    return lambda step, request: {"suffix": then if (step // every) % 2 else first}


def half(step: int, request: int) -> Mapping[str, Texture]:
    return {"suffix": EDIT if request % 2 else CHAT}


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


def simple(num_requests: int, texture: Texture, **more: Any) -> World:
    return World(num_requests, always(suffix=texture), **({"drafters": SUFFIX} | more))


UNEVEN = Texture(rates=(0.998,) * 10 + (0.97,) * 3 + (0.86, 0.7, 0.55))
WORLDS: dict[str, Case] = {
    **{f"edit@{n}": Case(simple(n, EDIT)) for n in (1, 4, 16)},
    **{f"chat@{n}": Case(simple(n, CHAT)) for n in (1, 4, 16)},
    **{f"half@{n}": Case(World(n, half, drafters=SUFFIX)) for n in (2, 16, 48)},
    "never@8": Case(simple(8, NEVER), 400),
    "never, drafting has its price@32": Case(simple(32, NEVER, drafters={"suffix": DrafterCost(0.05, 0.2)}), 300),
    "all alike@32, gpu": Case(simple(32, Texture(hit=0.5, rate=0.8), cost=gpu), 300),
    "turns every 150 steps@24": Case(World(24, turning(150, CHAT, EDIT), drafters=SUFFIX), 600),
    "turns every 25 steps@16": Case(World(16, turning(25, NEVER, EDIT), drafters=SUFFIX), 400),
    "bursts@1": Case(World(1, bursts, drafters={"suffix": DrafterCost(0.02, 0.2)}), 1000),
    "bursts@4": Case(World(4, bursts, drafters={"suffix": DrafterCost(0.02, 0.2)}), 600),
    "requests come and go@8": Case(World(8, half, drafters=SUFFIX, request=lambda serial: (200, 60)), 400),
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
        4, always(suffix=Texture(rate=0.7, told=None)), drafters=SUFFIX, deterministic=False, greedy=False, breadth=4
    )),
    "draft model, token by token@1": Case(World(
        1, always(small=UNEVEN), large_cpu, drafters={"small": DrafterCost(2.0, 0.0, 53.0)}, deterministic=False, stepwise=True,
        request=lambda serial: (45, 200),
    )),
    "draft model, token by token@4": Case(World(
        4, always(small=UNEVEN), small_cpu, drafters={"small": DrafterCost(0.5, 0.2, 3.0)}, deterministic=False, stepwise=True
    )),
    "a target of 18 ms per token@8": Case(World(
        8, lambda step, request: {"suffix": NEVER if request == 0 else Texture(hit=1.0, rate=0.99)}, drafters=SUFFIX, max_k=16
    ), options=Goodput.Options(tpot_slo_ms=18.0), slowest=True),
    "latency@16": Case(World(16, half, drafters=SUFFIX), options=Goodput.Options(objective="latency")),
    "a clock that breaks@8": Case(simple(8, EDIT, clock=lambda step, ms: float("nan") if step % 7 == 3 else ms)),
}


class Timed(Goodput):
    """Its own time has a price, the same in every run."""

    def observe(self, feedback: Feedback) -> None:
        super().observe(replace(feedback, policy_ms=OWN_MS))


def measured(name: str, seed: int) -> tuple[float, str]:
    """(tokens per millisecond, digest of every decision) of one world."""
    if name not in WORLDS:
        path, _, in_flight = name.rpartition("@")
        outcome = replay.run(Timed(), replay.World(read_trace(path), seed=seed, in_flight=int(in_flight)))
        return outcome.num_tokens / outcome.ms, ""
    case = WORLDS[name]
    result = run(Timed(case.options), replace(case.world, seed=seed), case.steps, profiled=case.profiled)
    tokens = result.by_request.sum(axis=0).min() if case.slowest else result.tokens.sum()
    digest = hashlib.sha256(result.k_by_request.tobytes() + result.ms.tobytes()).hexdigest()[:16]
    return float(tokens / result.ms.sum()), digest


# -- constants --------------------------------------------------------------------------------------------------------


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(headway.control.__path__, "headway.control."):
        yield importlib.import_module(found.name)


def constants() -> dict[str, float]:
    """module.NAME -> value, of every numeric constant of the modules that `goodput` consists of."""
    found: dict[str, float] = {}
    for module in modules():
        short = module.__name__.removeprefix("headway.control.")
        if short.startswith(("goodput.", "policies.goodput", "costs", "cost_")):
            for name, value in vars(module).items():
                if name.lstrip("_").isupper() and type(value) in (int, float) and name not in ("FORMAT",):
                    found.setdefault(f"{short}.{name}", value)
    first: dict[str, str] = {}
    for path in sorted(found, key=lambda path: defined_in(path)):
        first.setdefault(path.rpartition(".")[2], path)
    return {path: found[path] for path in found if first[path.rpartition(".")[2]] == path}


def defined_in(path: str) -> bool:
    """False (sorts first) for the module that assigns the name, True where it is imported."""
    module, _, name = path.rpartition(".")
    source = Path(importlib.import_module(f"headway.control.{module}").__file__ or "").read_text(encoding="utf-8")
    return not any(line.startswith((f"{name} =", f"{name}:")) for line in source.splitlines())


@contextmanager
def changed(path: str, factor: float) -> Iterator[None]:
    """The constant times `factor`, wherever it was imported."""
    if not path:
        yield
        return
    name = path.rpartition(".")[2]
    old = getattr(importlib.import_module(f"headway.control.{path.rpartition('.')[0]}"), name)
    new = max(1, round(old * factor)) if isinstance(old, int) else old * factor
    users = [module for module in modules() if vars(module).get(name) is old or vars(module).get(name) == old]
    for module in users:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module in users:
            setattr(module, name, old)


def sweep(path: str, factor: float, seeds: range, names: tuple[str, ...] = tuple(WORLDS)) -> dict[str, float]:
    """world -> mean tokens per millisecond over seeds."""
    with changed(path, factor):
        return {name: float(np.mean([measured(name, seed)[0] for seed in seeds])) for name in names}


def against(base: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any]:
    ratios = {name: other[name] / base[name] for name in base}
    worst = max(ratios, key=lambda name: abs(math.log(ratios[name])))
    return {"mean": round(math.exp(sum(map(math.log, ratios.values())) / len(ratios)), 4), "world": worst, "there": round(ratios[worst], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of constants")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--digest", action="store_true", help="print a digest of all decisions of each world instead")
    options = parser.parse_args()
    if options.digest:
        for name in WORLDS:
            for seed in range(options.seeds):
                print(f"{name:45} {seed} {measured(name, seed)}", flush=True)
        return
    paths = [path for path, _ in constants().items() if not options.only or path.rpartition(".")[2] in options.only]
    seeds = range(options.seeds)
    jobs = [("", 1.0, seeds), ("", 1.0, range(options.seeds, 2 * options.seeds))] + [(path, f, seeds) for path in paths for f in (0.5, 2.0)]
    with ProcessPoolExecutor(options.workers) as pool:
        found = list(pool.map(partial(sweep_of), jobs))
    base, noise = found[0], against(found[0], found[1])
    table = {
        path: {"value": constants()[path], "half": against(base, found[2 + 2 * i]), "twice": against(base, found[3 + 2 * i])}
        for i, path in enumerate(paths)
    }
    for path, row in table.items():
        changes = [f"{row[at]['mean']:.4f} ({row[at]['there']:.3f} {row[at]['world']})" for at in ("half", "twice")]
        print(f"{path:45} {row['value']:>8}  {'  '.join(changes)}")
    print("noise", noise)
    if options.output is not None:
        publish(options.output, {"origin": origin(), "noise": noise, "seeds": options.seeds, "rates": base, "constants": table})


def sweep_of(job: tuple[str, float, range]) -> dict[str, float]:
    return sweep(*job)


if __name__ == "__main__":
    main()
