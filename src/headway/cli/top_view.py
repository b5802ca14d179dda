"""One frame of `headway top`: numbers from two scrapes, then lines of text.

Works from /metrics alone: Headway's own counters where they are, vLLM's names otherwise. What a server does not tell is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headway.bench.scrape import Growth, Scrape

SPEC = "vllm:spec_decode_num_"
BARS = " ▏▎▍▌▋▊▉█"
SPARKS = "▁▂▃▄▅▆▇█"
MAX_POSITIONS = 8
LABEL_WIDTH = 13

Piece = tuple[str, str]
"""(text, style): a style of rich, "" for none."""


@dataclass(slots=True)
class DrafterNumbers:
    """One drafter in the window. acceptance[j]: P(position j accepted | reached), None where it was not reached."""

    name: str
    share: float                # of all verified drafts
    accepted: float             # of its own
    acceptance: list[float | None]


@dataclass(slots=True)
class Numbers:
    """What one frame shows. None: the server does not tell. Rates per second, times in seconds."""

    model: str | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prefix_hits: float | None = None
    output_rate: float | None = None
    prompt_rate: float | None = None
    ttft: float | None = None
    token_time: float | None = None
    mean_k: float | None = None             # drafts verified per sequence and step
    k_of_steps_that_draft: float | None = None
    tokens_per_step: float | None = None
    accepted: float | None = None           # share of verified drafts
    k_shares: dict[str, float] = field(default_factory=dict)    # "0", "1", ... "9-12" -> share of (sequence, step)
    drafters: list[DrafterNumbers] = field(default_factory=list)
    conditional: bool = True                # acceptance by position is exactly conditional (else: of varying k, an estimate)
    against_plain: float | None = None      # time plain decoding would have taken / time it took
    wasted_time: float | None = None        # share of step time
    wasted_drafts: float | None = None      # share of proposed drafts
    model_error: float | None = None
    plugin_time: float | None = None        # share of step time that Headway takes inside vLLM
    policy: str | None = None
    reason: str | None = None
    reason_age: float | None = None
    off: str | None = None                  # why a controller inside vLLM is not at work
    phases: dict[str, float] = field(default_factory=dict)      # share of step time
    since_start: bool = False               # nothing was written in the window: ratios are of the server's whole life


def read(before: Scrape, after: Scrape, seconds: float, now: float) -> Numbers:
    """now: wall-clock time of `after`, for the age of the last change."""
    window = Growth(before, after, seconds)
    quiet = not window.total("vllm:generation_tokens_total")
    grown = Growth(Scrape(), after, 0.0) if quiet else window
    n = Numbers(
        model=_first_label(after, "model_name"),
        running=after.total("vllm:num_requests_running"),
        waiting=after.total("vllm:num_requests_waiting"),
        kv_usage=after.total("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        prefix_hits=grown.ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        output_rate=window.rate("vllm:generation_tokens_total"),
        prompt_rate=window.rate("vllm:prompt_tokens_total"),
        ttft=grown.ratio("vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count"),
        token_time=grown.ratio("vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count")
        or grown.ratio("vllm:time_per_output_token_seconds_sum", "vllm:time_per_output_token_seconds_count"),
        since_start=quiet,
    )
    _speculation(n, grown)
    _controller(n, grown, after, now)
    return n


def _first_label(scrape: Scrape, label: str) -> str | None:
    return next((have[label] for series in scrape.samples.values() for have, _ in series if label in have), None)


def _speculation(n: Numbers, grown: Growth) -> None:
    drafts, steps = grown.total(f"{SPEC}draft_tokens_total"), grown.total(f"{SPEC}drafts_total")
    accepted = grown.total(f"{SPEC}accepted_tokens_total")
    rows = grown.total("headway:sampling_rows_total")
    if drafts is not None and steps and accepted is not None:
        n.k_of_steps_that_draft = drafts / steps
        n.accepted = accepted / drafts if drafts else None
        n.tokens_per_step = 1.0 + accepted / steps
    if rows:
        n.mean_k = (drafts or 0.0) / rows
        n.tokens_per_step = 1.0 + (accepted or 0.0) / rows
    n.k_shares = _shares_of_buckets(grown.by("headway:chosen_k_bucket", "le"))
    n.drafters = _drafters(grown)
    if not n.drafters and steps and accepted:
        # Accepted at j over accepted at j - 1: the conditional acceptance as long as every draft has the same length.
        by_position = grown.by(f"{SPEC}accepted_tokens_per_pos_total", "position")
        counts = [steps, *(by_position[at] for at in sorted(by_position, key=int))]
        rates = [above / below if below else None for below, above in pairwise(counts)]
        n.drafters, n.conditional = [DrafterNumbers("drafts", 1.0, n.accepted or 0.0, rates)], False
    n.phases = _shares(grown.by("headway:step_seconds_total", "phase"))


def _drafters(grown: Growth) -> list[DrafterNumbers]:
    name = "headway:{}_per_pos_total".format
    drafted = {drafter: count for drafter, count in grown.by(name("drafted"), "drafter").items() if count}
    accepted = grown.by(name("accepted"), "drafter")
    total = sum(drafted.values())
    found = []
    for drafter, count in sorted(drafted.items(), key=lambda item: -item[1]):
        reached_at = grown.by(name("reached"), "position", drafter=drafter)
        accepted_at = grown.by(name("accepted"), "position", drafter=drafter)
        rates = [accepted_at.get(at, 0.0) / reached_at[at] if reached_at[at] else None for at in sorted(reached_at, key=int)]
        found.append(DrafterNumbers(drafter, count / total, accepted.get(drafter, 0.0) / count, rates))
    return found


def _controller(n: Numbers, grown: Growth, after: Scrape, now: float) -> None:
    n.against_plain = grown.ratio("headway:plain_equivalent_seconds_total", "headway:compared_seconds_total")
    n.wasted_time = grown.ratio("headway:wasted_seconds_total", "headway:compared_seconds_total")
    n.wasted_drafts = grown.ratio("headway:wasted_drafts_total", "headway:proposed_drafts_total")
    n.model_error = after.total("headway:step_time_error")
    n.plugin_time = grown.ratio("headway:plugin_seconds_total", "headway:step_seconds_total")
    change = "headway:policy_last_change_timestamp_seconds"
    n.policy = next(iter(after.by(change, "policy")), None)
    n.reason = next(iter(after.by(change, "reason")), None) or None
    n.off = next((why for why, works in after.by("headway:controller", "reason").items() if not works), None)
    changed = after.total(change)
    n.reason_age = max(0.0, now - changed) if changed else None


def _shares_of_buckets(cumulative: dict[str, float]) -> dict[str, float]:
    """Cumulative Prometheus buckets of whole numbers -> share of each range that occurred."""
    bounds = sorted((bound for bound in cumulative if bound != "+Inf"), key=float)
    total = cumulative.get("+Inf", 0.0)
    found, below, last = {}, 0.0, -1
    for bound in bounds:
        high = int(float(bound))
        if total and cumulative[bound] > below:
            found[str(high) if high == last + 1 else f"{last + 1}-{high}"] = (cumulative[bound] - below) / total
        below, last = cumulative[bound], high
    if total > below:
        found[f">{last}"] = (total - below) / total
    return found


def _shares(parts: dict[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total > 0.0 else {}


# -- text -----------------------------------------------------------------------------------------------------------


def lines(n: Numbers, title: str, history: Sequence[float] = ()) -> list[list[Piece]]:
    """The frame: one list of pieces per line. history: output tokens/s of the last frames."""
    found: list[list[Piece]] = [[("headway top", "bold"), (f"  {title}" + (f"  {n.model}" if n.model else ""), "")], []]
    found.append(_line("requests", ("running ", _count(n.running)), ("waiting ", _count(n.waiting))))
    if n.kv_usage is not None:
        found.append(_line("K/V cache", ("", f"{bar(n.kv_usage, 20)} {n.kv_usage:.0%}"), ("prefix hits ", _percent(n.prefix_hits))))
    found.append(_line(
        "speed", ("output ", _unit(n.output_rate, "tokens/s")), ("prompt ", _unit(n.prompt_rate, "tokens/s")),
        ("first token ", _ms(n.ttft)), ("per token ", _ms(n.token_time)),
    ))
    if len(history) > 1 and max(history) > 0:
        found.append(_line("", ("", f"{spark(history)}"), ("up to ", _unit(max(history), "tokens/s"))))
    found.append([])
    found += _speculation_lines(n)
    if n.since_start:
        found += [[], [("nothing was written in the last interval: speculation and latencies since the server's start", "dim")]]
    return found


def _speculation_lines(n: Numbers) -> list[list[Piece]]:
    if n.tokens_per_step is None and not n.drafters:
        return [_line("speculation", ("", "this server reports none"))]
    found: list[list[Piece]] = []
    if n.against_plain is not None:
        style = "bold green" if n.against_plain >= 1.0 else "bold red"
        found.append([*_line("goodput"), (f"{n.against_plain:.2f}x plain decoding   ", style), *_fields(
            ("wasted time ", _percent(n.wasted_time)), ("step-time error ", _percent(n.model_error)),
            ("plugin ", _percent(n.plugin_time)),
        )])
    k = _number(n.mean_k) if n.mean_k is not None else f"{_number(n.k_of_steps_that_draft)} when drafting"
    found.append(_line(
        "speculation", ("k ", k), ("tokens per step ", _number(n.tokens_per_step)), ("accepted ", _percent(n.accepted)),
        ("wasted drafts ", _percent(n.wasted_drafts)),
    ))
    if n.k_shares:
        shown = [(f"{k}: ", f"{bar(share, 6).rstrip()} {share:.0%}") for k, share in n.k_shares.items()]
        found.append(_line("k chosen", *shown))
    if n.off is not None:
        found.append([*_line("controller"), (f"off: {n.off or 'see the log of vLLM'}", "bold red")])
    elif n.policy and n.policy != "none":
        age = f" ({n.reason_age:.0f} s ago)" if n.reason_age is not None else ""
        found.append(_line("policy", ("", n.policy), ("", f"{n.reason}{age}" if n.reason else None)))
    if n.phases:
        found.append(_line("step time", *((f"{phase} ", f"{share:.1%}") for phase, share in n.phases.items())))
    return found + (_drafter_lines(n) if n.drafters else [])


def _drafter_lines(n: Numbers) -> list[list[Piece]]:
    width = max(LABEL_WIDTH, *(len(drafter.name) + 2 for drafter in n.drafters))
    num_positions = min(MAX_POSITIONS, max(len(drafter.acceptance) for drafter in n.drafters))
    note = "accepted when reached, by position" if n.conditional else "accepted of those before, by position (exact while k is constant)"
    positions = "".join(f"{at + 1:>6}" for at in range(num_positions))
    found: list[list[Piece]] = [[], [(f"{'':<{width}}{'drafts':>7}{'accepted':>10}   {positions}   {note}", "dim")]]
    for drafter in n.drafters:
        row: list[Piece] = [(f"{drafter.name:<{width}}", "cyan"), (f"{drafter.share:>7.0%}{drafter.accepted:>10.0%}   ", "")]
        for rate in drafter.acceptance[:num_positions]:
            row.append((f"{rate:>6.2f}", _heat(rate)) if rate is not None else (f"{'-':>6}", "dim"))
        found.append(row)
    return found


def _line(label: str, *fields: tuple[str, str | None]) -> list[Piece]:
    return [(f"{label:<{LABEL_WIDTH}}", "cyan"), *_fields(*fields)]


def _fields(*fields: tuple[str, str | None]) -> list[Piece]:
    """Fields whose value is None are left out."""
    pieces: list[Piece] = []
    for name, value in fields:
        if value is not None:
            pieces += [(name, "dim"), (f"{value}   ", "")]
    return pieces


def bar(share: float, width: int) -> str:
    """[0, 1] as a bar of `width` characters."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return (BARS[8] * full + (BARS[part] if part else "")).ljust(width)


def spark(values: Sequence[float]) -> str:
    top = max(values) or 1.0
    return "".join(SPARKS[min(7, int(max(0.0, value) / top * 7.999))] for value in values)


def _heat(rate: float) -> str:
    return "green" if rate >= 0.75 else "yellow" if rate >= 0.4 else "red"


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _unit(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:,.0f} {unit}" if value >= 10 or value == 0 else f"{value:.1f} {unit}"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
