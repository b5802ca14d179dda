"""From what a user asks to a plan: the networks, the devices, every drafter considered, and the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway.config import option
from headway.errors import ConfigError
from headway.plan import answer, calibration, configs, drafting, families, memory, quantization
from headway.plan.answer import Candidate, KnownAcceptance
from headway.plan.device import THIS_MACHINE, Device
from headway.plan.drafting import Drafting
from headway.plan.memory import Capacity, Deployment
from headway.plan.network import NetworkShape
from headway.plan.quantization import Quantization
from headway.plan.speed import LENGTHS, PUBLISHED, Corrections, Load, Machine
from headway.telemetry.trace import Trace

TENSOR_PARALLEL = (1, 2, 4, 8)
LONGEST_DRAFT = 64


@dataclass(frozen=True)
class PlanOptions:
    """The command-line flags are made from these fields."""

    gpu: str = option("H100", f"device of the table (a wrong name lists it), or {THIS_MACHINE}, which is measured")
    tp: int | None = option(None, "tensor parallelism (default: the least that holds the load, up to 8)")
    pp: int = option(1, "pipeline stages")
    draft: list[str] | None = option(None, "draft network: directory, config.json, built-in or hub id; several are compared")
    method: list[str] | None = option(
        None, "draft_model, eagle, eagle3, mtp, medusa, ngram or suffix; several are compared (default: what --draft is; without one mtp "
        "where the model has it, else eagle3)"
    )  # fmt: skip
    draft_tp: int | None = option(None, "tensor parallelism of the draft network (default: the target's where it can be)")
    spec_tokens: int | None = option(None, "draft so many tokens (default: the best of 1 to 8)")
    acceptance: str | None = option(None, "share of drafts that are right: one number, or one per position (0.8,0.7,0.6)")
    kv_dtype: str = option("auto", "type of the K/V cache", choices=tuple(memory.KV_DTYPES))
    quantization: str | None = option(None, f"of weights: none, {', '.join(quantization.NAMED)} (default: as config.json says)")
    dtype: str = option("auto", "type of weights that are not quantised", choices=("auto", *families.BYTES))
    concurrency: int = option(16, "requests in flight")
    input_len: int = option(1024, "tokens per prompt")
    output_len: int = option(128, "tokens to write per request")
    max_model_len: int | None = option(None, "longest request to serve (default: input plus output)")
    max_num_batched_tokens: int = option(8192, "tokens per step, for the estimate of activations")
    block_size: int = option(16, "tokens per K/V block")
    gpu_memory_utilization: float = option(0.9, "share of a device's memory to use")
    trace: list[str] | None = option(None, "recorded steps of this model on this device, for times and acceptance; may be repeated")

    def __post_init__(self) -> None:
        counts = ("tp", "pp", "draft_tp", "spec_tokens", "concurrency", "input_len", "output_len", "max_model_len", "block_size",
                  "max_num_batched_tokens")  # fmt: skip
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if self.spec_tokens is not None and self.spec_tokens > LONGEST_DRAFT:
            raise ConfigError(f"spec_tokens must be <= {LONGEST_DRAFT}, got {self.spec_tokens}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization:g}")
        if self.max_model_len is not None and self.input_len + self.output_len > self.max_model_len:
            raise ConfigError(f"max_model_len {self.max_model_len} is less than input_len + output_len, {self.input_len + self.output_len}")

    @property
    def longest(self) -> int:
        return self.max_model_len or self.input_len + self.output_len

    @property
    def lengths(self) -> tuple[int, ...]:
        return LENGTHS if self.spec_tokens is None else (0, self.spec_tokens)


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What was asked, and the answer. `deployment` is that of the chosen candidate, `model` the name as it was given."""

    model: str
    target: NetworkShape
    quantization: Quantization | None
    deployment: Deployment
    asked: Load
    plain: Capacity
    candidates: tuple[Candidate, ...]
    corrections: Corrections
    words: tuple[str, ...]

    @property
    def chosen(self) -> Candidate:
        return answer.choose(self.candidates)


def make(model: str, options: PlanOptions, device: Device, traces: Sequence[Trace] = ()) -> ServingPlan:
    """Raises ConfigError or ModelError for what cannot be read, is not known, or does not fit (by how much, and what would)."""
    target = families.read(configs.find(model), configs.short_name(model), options.dtype)
    stored = quantization.named(options.quantization) if options.quantization else target.quantization
    if options.longest > target.max_position:
        raise ConfigError(f"requests of {options.longest} tokens are longer than the {target.max_position} that {target.name} attends to")
    draftings = tuple(_draftings(target, options))
    asked = Load(options.concurrency, options.input_len, options.output_len)
    deployment = _deployment(target, stored, device, options)
    plain = _fitting(target, None, stored, deployment, 0, asked)
    given = _given(options.acceptance) or _recorded(traces)
    found: list[tuple[Candidate, Machine]] = []
    for each in draftings:
        machine = Machine(target, each, stored, replace(deployment, draft_tp=_draft_tp(each, deployment.tp, options)), PUBLISHED)
        if traces:
            machine = replace(machine, corrections=calibration.corrections(traces, machine))
        found.append((_candidate(machine, given or answer.ASSUMED[each.method], asked, options.lengths), machine))
    candidates = tuple(candidate for candidate, _ in found)
    machine = next(machine for candidate, machine in found if candidate is answer.choose(candidates))
    said = answer.words(target, machine.deployment, plain, candidates, asked, machine.corrections)
    return ServingPlan(model, target, stored, machine.deployment, asked, plain, candidates, machine.corrections, tuple(said))


def _draftings(target: NetworkShape, options: PlanOptions) -> Iterator[Drafting]:
    """The drafters to compare: one per draft network and one per method that needs none."""
    k, methods = max(options.lengths), list(options.method or ())
    for name in options.draft or ():
        raw = configs.find(name)
        kinds = [method for method in methods if method not in drafting.LOOKUPS] or [drafting.method_of(raw)]
        if len(kinds) > 1:
            raise ConfigError(f"with --draft give one method that drafts with a network, got {', '.join(kinds)}")
        draft = families.read(raw, configs.short_name(name), options.dtype) if kinds[0] == "draft_model" else None
        yield drafting.build(kinds[0], target, raw, name, draft, k)
    alone = [method for method in methods if method in drafting.LOOKUPS or not options.draft]
    if not options.draft and not methods:
        alone = ["mtp" if target.mtp else "eagle3"]
    for method in alone:
        yield drafting.build(method, target, None, None, None, k)


def _deployment(target: NetworkShape, stored: Quantization | None, device: Device, options: PlanOptions) -> Deployment:
    """With the least tensor parallelism that holds all requests, or one where none holds all; as asked where it was asked."""

    def with_tp(tp: int) -> Deployment:
        return Deployment(
            device, tp, options.pp, 1, options.kv_dtype, options.block_size, options.concurrency, options.max_num_batched_tokens,
            options.longest, options.gpu_memory_utilization,
        )  # fmt: skip

    if options.tp is not None or device.name == THIS_MACHINE:
        return with_tp(options.tp or 1)
    possible = [with_tp(tp) for tp in TENSOR_PARALLEL if not target.num_heads % tp]
    room = [memory.measure(target, None, stored, each, 0, options.longest).num_requests for each in possible]
    for wanted in (options.concurrency, 1):
        for each, number in zip(possible, room, strict=True):
            if number >= wanted:
                return each
    return possible[-1]


def _draft_tp(each: Drafting, tp: int, options: PlanOptions) -> int:
    if options.draft_tp is not None or each.network is None:
        return options.draft_tp or 1
    try:
        each.network.check_split(tp, "--draft-tp")
    except ConfigError:
        return 1
    return tp


def _fitting(
    target: NetworkShape, each: Drafting | None, stored: Quantization | None, deployment: Deployment, k: int, asked: Load
) -> Capacity:
    """Raises ConfigError when not one request fits: by how much, and what would make it fit."""
    length = asked.input_len + asked.output_len
    found = memory.measure(target, each, stored, deployment, k, length)
    if found.num_requests:
        return found
    tight = found.tightest
    missing = (length + k) * (tight.kv_per_token + tight.draft_kv_per_token) - tight.kv_room
    changes = memory.smallest_changes(target, each, stored, deployment, k, length)
    what = target.name + (f" with {each.network.name}" if each is not None and each.network is not None else "")
    combine = "no one flag makes it fit: combine --tp, --quantization and --kv-dtype"
    advice = f"it fits with {' or with '.join(changes)}" if changes else combine
    raise ConfigError(
        f"{what} does not fit on {deployment.num_devices} x {deployment.device.name}: for one request of {length:,} tokens {tight.name} "
        f"{'needs' if tight.count == 1 else 'need'} {answer.size(tight.usable + missing)} of the {answer.size(tight.usable)} that may be "
        f"used, {answer.size(missing)} too much; {advice}"
    )


def _candidate(machine: Machine, acceptance: KnownAcceptance, asked: Load, lengths: Sequence[int]) -> Candidate:
    """What a length takes of the memory is known once the length is: the shortest one says how many requests to choose it for."""

    def with_room_for(k: int) -> Candidate:
        capacity = _fitting(machine.target, machine.drafting, machine.quantization, machine.deployment, k, asked)
        return replace(answer.consider(machine, capacity, acceptance, asked, lengths), spread=_spread(machine, k, asked))

    first = with_room_for(lengths[1])
    return first if first.best.k <= lengths[1] else with_room_for(first.best.k)


def _spread(machine: Machine, k: int, asked: Load) -> Capacity | None:
    """With the draft network on as many devices as the target."""
    deployment = machine.deployment
    if machine.drafting is None or machine.drafting.network is None or deployment.draft_tp == deployment.tp:
        return None
    length, shared = asked.input_len + asked.output_len, replace(deployment, draft_tp=deployment.tp)
    try:
        return memory.measure(machine.target, machine.drafting, machine.quantization, shared, k, length)
    except ConfigError:
        return None


def _given(text: str | None) -> KnownAcceptance | None:
    if text is None:
        return None
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0.0 <= value <= 1.0 for value in values):
        raise ConfigError(f"acceptance must be numbers from 0 to 1 separated by commas, got {text!r}")
    return KnownAcceptance(values, "given", is_measured=True)


def _recorded(traces: Sequence[Trace]) -> KnownAcceptance | None:
    found = calibration.acceptance(traces)
    return KnownAcceptance(tuple(found), "recorded", is_measured=True) if found else None
