"""What deciding costs: microseconds per step of each hook of a policy, by batch size. No model, no engine: a computed world.

    python studies/policy_overhead.py [--policies goodput,smartspec] [--requests 1,4,8,16,64] [--output FILE]

Requests decode for ever; costs and acceptance are those of tests/closed_loop.py. `edit` is text that nearly always can be drafted, `chat`
text that rarely can, `half` one of each in turn. Times are CPU time of the one thread, the mean over all steps but the first ones (what
happens every hundredth step counts), so what else runs on the machine matters little. `share` is against the computed time of a step.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from record import origin, write

from headway import plugins
from headway.control.policy import Policy
from tests.closed_loop import DrafterCost, Texture, World, gpu, run

HOOKS = ("plan", "shadow", "choose_lookup", "select", "observe")
TEXTURES = {"edit": Texture(hit=0.9, rate=0.93), "chat": Texture(hit=0.15, rate=0.4, length=4)}
DRAFTERS = {"suffix": DrafterCost(0.01, 0.06), "ngram": DrafterCost(0.01, 0.03)}


def world(workload: str, num_requests: int, max_k: int, on_gpu: bool) -> World:
    def textures(step: int, request: int) -> dict[str, Texture]:
        kind = workload if workload in TEXTURES else ("edit" if request % 2 else "chat")
        return dict.fromkeys(DRAFTERS, TEXTURES[kind])

    more: dict[str, Any] = {"cost": gpu} if on_gpu else {}
    return World(num_requests, textures, drafters=DRAFTERS, max_k=max_k, **more)


class Clocks:
    """Wraps a policy's hooks; seconds by hook and step."""

    def __init__(self, policy: Policy) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        for hook in HOOKS:
            setattr(policy, hook, self._timed(hook, getattr(policy, hook)))

    def _timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            found = call(*args)
            self.spent[hook].append(time.thread_time() - began)
            return found

        return timed


def measure(name: str, workload: str, num_requests: int, args: argparse.Namespace) -> dict[str, Any]:
    policy = plugins.load("policy", name)()
    clocks = Clocks(policy)
    skip = min(args.skip, args.steps // 2)
    result = run(policy, world(workload, num_requests, args.max_k, args.gpu), args.steps)
    row: dict[str, Any] = {"policy": name, "text": workload, "requests": num_requests}
    for hook in HOOKS:
        row[f"{hook}_us"] = 1e6 * sum(clocks.spent[hook][skip:]) / (args.steps - skip)
    totals = [sum(step) for step in zip(*(clocks.spent[hook] for hook in HOOKS), strict=True)]
    row["total_us"] = 1e6 * sum(totals[skip:]) / (args.steps - skip)
    row["worst_us"] = 1e6 * max(totals[skip:])
    row["first_us"] = 1e6 * sum(totals[:skip]) / max(1, skip)
    row["share"] = row["total_us"] * 1e-3 / float(result.ms[skip:].mean())
    row["mean_k"] = float(result.drafts[skip:].mean() / num_requests)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", default="goodput")
    parser.add_argument("--workloads", default="edit,chat,half")
    parser.add_argument("--requests", default="1,4,8,16,64")
    parser.add_argument("--max-k", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--skip", type=int, default=100, help="first steps, reported by themselves")
    parser.add_argument("--gpu", action="store_true", help="costs of a step that is bound by memory, instead of those of a CPU")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    profiler = cProfile.Profile() if args.profile else None
    head = ("policy", "text", "requests", *(f"{hook}_us" for hook in HOOKS), "total_us", "worst_us", "first_us", "share", "mean_k")
    print("".join(f"{name:>11}" for name in head))
    rows = []
    if profiler:
        profiler.enable()
    for name in args.policies.split(","):
        for workload in args.workloads.split(","):
            for number in args.requests.split(","):
                row = measure(name, workload, int(number), args)
                rows.append(row)
                shown = [row[key] if isinstance(row[key], (str, int)) else f"{row[key]:.1f}" for key in head[:-2]]
                shown += [f"{row['share']:.3%}", f"{row['mean_k']:.1f}"]
                print("".join(f"{value:>11}" for value in shown), flush=True)
    if profiler:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    if args.output:
        write({"benchmark": "policy_overhead", **origin(), "rows": rows}, args.output)


if __name__ == "__main__":
    main()
