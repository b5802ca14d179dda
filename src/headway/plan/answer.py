"""One plan: what fits, how fast it is, and what to do, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.plan.device import GIB
from headway.plan.drafting import Drafting
from headway.plan.memory import Capacity, Deployment
from headway.plan.network import NetworkShape
from headway.plan.speed import LENGTHS, Corrections, Load, Machine, tokens_per_step

# The ratio of two predicted times is surer than either, and still not surer than this.
CLEAR_GAIN = 1.1
DRAFT_MODEL_SOURCE = "53.5 % were measured for a 0.5B draft of Llama-3.1-70B and 76.5 % for an 8B one"


@dataclass(frozen=True, slots=True)
class KnownAcceptance:
    """by_position: as in `tokens_per_step`; None: not known. is_measured: by a recording, or given by the user."""

    by_position: tuple[float, ...] | None
    source: str
    is_measured: bool = False

    def __str__(self) -> str:
        shown = ", ".join(f"{value:.2f}" for value in self.by_position or ())
        return f"{shown} ({self.source})"


ASSUMED = {
    "draft_model": KnownAcceptance((0.65,), f"assumed: {DRAFT_MODEL_SOURCE}"),
    "eagle3": KnownAcceptance((0.70,), "assumed"),
    "eagle": KnownAcceptance((0.60,), "assumed"),
    "mtp": KnownAcceptance((0.85, 0.70), "assumed: DeepSeek-V3's report says 85 to 90 % of the first token"),
    "medusa": KnownAcceptance((0.60, 0.45), "assumed"),
    "ngram": KnownAcceptance(None, "of lookups nothing can be said without the text"),
    "suffix": KnownAcceptance(None, "of lookups nothing can be said without the text"),
}


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """One draft length at the load that was asked for. break_even: as Machine's; throughput: tokens per second, prompts included."""

    k: int
    step_ms: float
    break_even: float | None
    time_per_token_ms: float | None = None
    throughput: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One drafter on the devices.

    by_load     in flight -> k -> throughput; empty where acceptance is not known
    spread      what would fit if the draft network were on all devices of its stage; None where it is, or cannot be
    """

    drafting: Drafting
    acceptance: KnownAcceptance
    capacity: Capacity
    load: Load
    rows: tuple[AnswerRow, ...]
    by_load: dict[int, dict[int, float]]
    spread: Capacity | None = None

    @property
    def best(self) -> AnswerRow:
        """The k with the highest throughput; plain decoding where nothing is known."""
        known = [row for row in self.rows if row.throughput is not None]
        return max(known, key=lambda row: row.throughput or 0.0) if len(known) > 1 else self.rows[0]

    @property
    def gain(self) -> float:
        """Over plain decoding of as many requests."""
        plain = self.rows[0].throughput
        return (self.best.throughput or 0.0) / plain if plain else 1.0

    @property
    def least_accepted(self) -> float | None:
        """Of all draft tokens of the best length, the share from which on it is faster than plain decoding."""
        best = self.best
        return None if best.k == 0 or best.break_even is None else (tokens_per_step(best.k, [best.break_even]) - 1.0) / best.k


def consider(
    machine: Machine, capacity: Capacity, acceptance: KnownAcceptance, asked: Load, lengths: Sequence[int] = LENGTHS
) -> Candidate:
    """Every draft length at the load, as far as that many requests fit, and at every smaller load for a schedule."""
    assert machine.drafting is not None
    fits = max(1, min(asked.num_requests, capacity.num_requests))
    load = Load(fits, asked.input_len, asked.output_len)
    known = acceptance.by_position
    rows = []
    for k in lengths:
        even = machine.break_even(load, k) if k else None
        if known is None and k:
            rows.append(AnswerRow(k, machine.step_ms(load, k), even))
        else:
            each = known or (0.0,)
            per_token, throughput = machine.time_per_token_ms(load, k, each), machine.throughput(load, k, each)
            rows.append(AnswerRow(k, machine.step_ms(load, k), even, per_token, throughput))
    by_load = {}
    for size in _sizes(fits) if known else ():
        at = Load(size, asked.input_len, asked.output_len)
        by_load[size] = {k: machine.throughput(at, k, known or (0.0,)) for k in lengths}
    return Candidate(machine.drafting, acceptance, capacity, load, tuple(rows), by_load)


def _sizes(most: int) -> list[int]:
    return sorted({*(1 << i for i in range(most.bit_length()) if 1 << i <= most), most})


def words(
    target: NetworkShape, deployment: Deployment, plain: Capacity, candidates: Sequence[Candidate], asked: Load, sure: Corrections
) -> list[str]:
    """Three to eight sentences: what fits, what speculation takes and gives, what to start with, how sure that is."""
    chosen = choose(candidates)
    return [
        _fits(target, deployment, plain, asked),
        *_takes(deployment, plain, chosen),
        *_gives(chosen),
        *_switches(chosen),
        _start(deployment, chosen, asked),
        *target.notes,
        *(chosen.drafting.network.notes if chosen.drafting.network else ()),
        f"Times are a roofline's: {sure.source}; expect {sure.error:.0%} of error.",
    ]


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the highest throughput at the load."""
    return max(candidates, key=lambda each: each.best.throughput or 0.0)


def _fits(target: NetworkShape, deployment: Deployment, plain: Capacity, asked: Load) -> str:
    tight, many = plain.tightest, deployment.num_devices
    split = f"{many} x {deployment.device.name}" + (f" (tp {deployment.tp}, pp {deployment.pp})" if many > 1 else "")
    room = "enough for" if plain.num_requests >= asked.num_requests else "too little for"
    return (
        f"{target.name} fits on {split}: {size(tight.weights)} of weights on the fullest device leave {size(tight.kv_room)} for K/V, "
        f"{plain.num_tokens:,} tokens or {plain.num_requests:,} requests of {plain.request_len:,} tokens, "
        f"{room} {asked.num_requests} in flight."
    )


def _takes(deployment: Deployment, plain: Capacity, chosen: Candidate) -> list[str]:
    drafting, capacity = chosen.drafting, chosen.capacity
    if drafting.network is None:
        return [f"{drafting.method} takes no memory of the device."]
    with_draft = next(device for device in capacity.devices if device.draft_weights)
    kv = f" and {with_draft.draft_kv_per_token / 1024:.1f} KiB per token" if with_draft.draft_kv_per_token else ""
    lost = 1.0 - capacity.num_tokens / max(1, plain.num_tokens)
    said = (
        f"Speculation takes {size(with_draft.draft_weights)} for {drafting.network.name}{kv} on {with_draft.name}: {lost:.1%} of the "
        f"tokens ({capacity.num_tokens:,} left, {capacity.num_requests:,} requests)"
    )
    unused = [(device, capacity.idle(device, deployment.block_size)) for device in capacity.devices]
    device, most = max(unused, key=lambda pair: pair[1])
    if most > 0.5 * GIB and len(capacity.devices) > 1:
        said += f"; {device.name} {'keeps' if device.count == 1 else 'keep'} {size(most)} each that nothing can use"
    if chosen.spread is not None:
        said += f"; with --draft-tp {deployment.tp} it takes {1.0 - chosen.spread.num_tokens / max(1, plain.num_tokens):.1%}"
    return [said + "."]


def _gives(chosen: Candidate) -> list[str]:
    method, load, best = chosen.drafting.method, chosen.load, chosen.best
    where = f"With {load.num_requests} in flight, {load.input_len:,} tokens in and {load.output_len:,} out"
    if chosen.acceptance.by_position is None:
        first = next(row for row in chosen.rows if row.k)
        pays = f"pays where more than {first.break_even:.0%} of first drafts are right" if first.break_even else "does not pay"
        how = "measure it (record with headway serve --trace, then give --trace here)"
        return [f"{where}, {method} {pays}: {chosen.acceptance.source}, so {how}."]
    if best.k == 0:
        why = f"no length of {method} drafts is faster than plain decoding at an acceptance of {chosen.acceptance}"
        return [f"{where}, do not speculate: {why}."]
    assert best.throughput is not None
    assert best.time_per_token_ms is not None
    plain = chosen.rows[0]
    said = (
        f"{where}, draft k = {best.k} with {method}: {chosen.gain:.2f}x plain decoding, {best.throughput:,.0f} instead of "
        f"{plain.throughput:,.0f} tokens/s, {best.time_per_token_ms:.1f} instead of {plain.time_per_token_ms:.1f} ms per token, "
        f"at an acceptance of {chosen.acceptance}."
    )
    unsure = "; measure yours" if not chosen.acceptance.is_measured else ""
    if chosen.gain < CLEAR_GAIN:
        unsure = "; the gain is too small to be sure of, so measure"
    return [f"{said} It shortens the time per token from an acceptance of {best.break_even or 1.0:.2f} on{unsure}."]


def _switches(chosen: Candidate) -> list[str]:
    """Where the best k changes with load."""
    best = {load: max(found, key=lambda k: found[k]) for load, found in chosen.by_load.items()}
    if len(set(best.values())) < 2:
        return []
    loads = sorted(best)
    turns = [load for i, load in enumerate(loads) if i == 0 or best[load] != best[loads[i - 1]]]
    said = ", ".join(f"{best[load]} from {load} on" for load in turns)
    return [f"The best k changes with the load ({said}): take the table that --emit-dir writes, or a policy that adapts."]


def _start(deployment: Deployment, chosen: Candidate, asked: Load) -> str:
    most = max(1, min(asked.num_requests, chosen.capacity.num_requests))
    said = f"Start with tp {deployment.tp}, max-num-seqs {most} and max-model-len {deployment.max_model_len}"
    if most < asked.num_requests:
        said += f": {asked.num_requests - most} of {asked.num_requests} requests would wait"
    return said + "."


def size(num_bytes: float) -> str:
    if num_bytes == 0:
        return "0"
    return f"{num_bytes / GIB:.1f} GiB" if abs(num_bytes) >= GIB / 10 else f"{num_bytes / (1 << 20):.1f} MiB"
