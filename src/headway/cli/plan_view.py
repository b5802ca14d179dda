"""A plan in the terminal, and as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from headway.plan.answer import size

if TYPE_CHECKING:
    from headway.plan.answer import Candidate
    from headway.plan.memory import Capacity
    from headway.plan.planner import ServingPlan


def show(planned: ServingPlan) -> None:
    """Words first, then what every device holds, then every draft length of every drafter."""
    from rich.console import Console

    for sentence in planned.words:
        print(sentence)
    console = Console()
    console.print()
    console.print(_memory_table(planned))
    for candidate in planned.candidates:
        console.print(_speed_table(candidate))


def _memory_table(planned: ServingPlan) -> Any:
    from rich.table import Table

    capacity = planned.chosen.capacity
    table = Table(title=f"memory with {planned.chosen.drafting.method}", title_justify="left", header_style="bold")
    table.add_column("")
    for device in capacity.devices:
        table.add_column(device.name, justify="right")
    lines = {
        "may be used": [size(device.usable) for device in capacity.devices],
        "target's weights": [size(device.weights) for device in capacity.devices],
        "draft's weights": [size(device.draft_weights) for device in capacity.devices],
        "activations (estimate)": [size(device.activations) for device in capacity.devices],
        "graphs and runtime (estimate)": [size(device.graphs + device.runtime) for device in capacity.devices],
        "left for K/V": [size(device.kv_room) for device in capacity.devices],
        "K/V per token, target": [f"{device.kv_per_token / 1024:.1f} KiB" for device in capacity.devices],
        "K/V per token, draft": [f"{device.draft_kv_per_token / 1024:.1f} KiB" for device in capacity.devices],
        "unused": [size(capacity.idle(device, planned.deployment.block_size)) for device in capacity.devices],
    }
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _speed_table(candidate: Candidate) -> Any:
    from rich.table import Table

    network = candidate.drafting.network
    title = f"{candidate.drafting.method}{f' ({network.name})' if network else ''}, {candidate.load.num_requests} in flight"
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("k", "step ms", "ms per token", "tokens/s", "gain", "pays from acceptance"):
        table.add_column(name, justify="right")
    plain = candidate.rows[0].throughput or 1.0
    for row in candidate.rows:
        even = "" if row.k == 0 else "never" if row.break_even is None else f"{row.break_even:.2f}"
        known = ("?", "?", "?")
        if row.throughput is not None and row.time_per_token_ms is not None:
            known = (f"{row.time_per_token_ms:.2f}", f"{row.throughput:,.0f}", f"{row.throughput / plain:.2f}")
        style = "bold green" if row is candidate.best else None
        table.add_row(str(row.k) if row.k else "plain", f"{row.step_ms:.2f}", *known, even, style=style)
    return table


def document(planned: ServingPlan) -> dict[str, Any]:
    """Sizes in bytes, times in milliseconds, throughput in tokens per second."""
    deployment, chosen = planned.deployment, planned.chosen
    return {
        "model": planned.model,
        "words": list(planned.words),
        "target": _network(planned.target),
        "quantization": planned.quantization.name if planned.quantization else None,
        "deployment": {**dataclasses.asdict(deployment), "device": dataclasses.asdict(deployment.device)},
        "load": dataclasses.asdict(planned.asked),
        "plain": _capacity(planned.plain),
        "chosen": planned.candidates.index(chosen),
        "candidates": [_candidate(candidate) for candidate in planned.candidates],
        "corrections": dataclasses.asdict(planned.corrections),
    }


def _network(network: Any) -> dict[str, Any]:
    return {
        "name": network.name, "model_type": network.model_type, "num_parameters": network.num_parameters,
        "num_active_parameters": round(network.num_active_parameters), "num_layers": len(network.layers),
    }  # fmt: skip


def _capacity(capacity: Capacity) -> dict[str, Any]:
    return {**dataclasses.asdict(capacity), "devices": [dataclasses.asdict(device) for device in capacity.devices]}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    drafting = candidate.drafting
    return {
        "method": drafting.method,
        "model": drafting.model,
        "network": _network(drafting.network) if drafting.network else None,
        "acceptance": dataclasses.asdict(candidate.acceptance),
        "capacity": _capacity(candidate.capacity),
        "load": dataclasses.asdict(candidate.load),
        "k": candidate.best.k,
        "gain": candidate.gain,
        "rows": [dataclasses.asdict(row) for row in candidate.rows],
        "throughput_by_load": {str(size): {str(k): value for k, value in found.items()} for size, found in candidate.by_load.items()},
    }
