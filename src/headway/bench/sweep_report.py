"""A sweep as one HTML file that needs nothing else: tables and inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from headway.bench.svg import COLORS, GRAY, Line, heat_map, line_chart
from headway.bench.sweep import OFF, is_static
from headway.bench.sweep_analysis import CURVES, Analysis

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1320px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #8884; } th:first-child, td:first-child { text-align: left; }
.bad { color: #c0392b; font-weight: 600; } .good { color: #1e8449; font-weight: 600; } code { font-size: 0.9em; }
.charts { display: flex; flex-wrap: wrap; gap: 1em; } .note { color: #777; max-width: 60em; }
"""
FLOOR_OFF, FLOOR_BEST = 0.98, 0.95


def html(document: Mapping[str, Any]) -> str:
    """The whole page."""
    analysis = Analysis(document)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Headway sweep</title>",
        f"<style>{STYLE}</style><h1>Speculation against load: {escape(str(document['model']))}</h1>",
        _provenance(document, analysis),
    ]
    if analysis.cells:
        sections = (_summary, _losses, _accounts, _recoveries, _heat_maps, _curves, _k_over_time, _throughputs)
        parts += [section(analysis) for section in sections]
    else:
        parts.append("<p>No cell has a valid run of every configuration yet.</p>")
    return "\n".join([*parts, "</html>"])


def _provenance(document: Mapping[str, Any], analysis: Analysis) -> str:
    commit, hardware = document.get("commit") or {}, document.get("hardware", {})
    rows = [
        ("command", f"<code>{escape(document.get('command', ''))}</code>"),
        ("commit", escape(str(commit.get("sha", "unknown"))[:12] + (" with changes" if commit.get("dirty") else ""))),
        ("machine", escape(f"{hardware.get('cpu')}, {hardware.get('cores')} cores; {document.get('dtype')} on {document.get('device')}")),
        ("measured", f"{sum(map(len, analysis.rounds.values()))} rounds in {len(analysis.cells)} cells"),
    ]
    share = analysis.equal_outputs()
    if share is not None:
        rows.append(("outputs", f"{share:.2%} of the answers are exactly those of plain decoding"))
    left_out = document.get("left_out", [])
    if left_out:
        named = ", ".join(f"{item['cell']} ({item['num_rounds']} rounds)" for item in left_out)
        rows.append(("left out for time", escape(named)))
    text = (
        "One engine per configuration stays up, around one loaded model, and all get the same prompts, none of them twice. In a round each "
        "goes on with the cell's load until so many more requests have ended, one engine after the other; who begins rotates, and a closed "
        "loop stays full from round to round. A ratio is one of totals: all tokens over all seconds of the rounds, over "
        "the same of the other configuration; least and greatest ratio within a round say how far to trust it. "
        "Policies go on learning and drafters remember earlier answers across rounds and cells, as in a server. The best static k is "
        "picked with hindsight in each cell; the chosen one is, in each round, the one that the cell's other rounds call best."
    )
    return "<table>" + "".join(f"<tr><td>{name}</td><td style='text-align:left'>{value}</td></tr>" for name, value in rows) + (
        f"</table><p class='note'>{text}</p>"
    )


def _summary(analysis: Analysis) -> str:
    head = (
        "configuration", "against off: worst", "in cell", "mean", "against the best static k: worst", "in cell", "mean",
        "against a chosen static k: worst", "in cell", "mean",
    )  # fmt: skip
    rows = []
    for name, found in analysis.summary().items():
        cells = [escape(name)]
        for key, floor in (("against_off", FLOOR_OFF), ("against_best_static", FLOOR_BEST), ("against_chosen_static", FLOOR_BEST)):
            value = found[key]
            if value is None:
                cells += ["-"] * 3
            else:
                cells += [_ratio(value["worst"], floor), escape(value["worst_cell"]), _ratio(value["mean"], 1.0)]
        rows.append(cells)
    others = [[escape(name), *(f"{found['mean_against'].get(other, 1.0):.3f}" for other in analysis.adaptive)]
              for name, found in analysis.summary().items()]
    return (
        "<h2>Configurations that are not one static k</h2>" + _table(head, rows)
        + "<h2>Mean over cells, row over column</h2>" + _table(("", *map(escape, analysis.adaptive)), others)
    )


def _losses(analysis: Analysis) -> str:
    head = ("configuration", "cell", "best static k", "ratio", "within rounds", "against off", "tokens/s", "best tokens/s")
    rows = [
        [
            escape(loss["configuration"]), escape(loss["cell"]), escape(loss["best_static"]), _ratio(loss["ratio"], FLOOR_BEST),
            "{:.3f} to {:.3f}".format(*loss["spread"]), "-" if loss["against_off"] is None else f"{loss['against_off']:.3f}",
            f"{loss['output_tokens_per_s']:.1f}", f"{loss['best_output_tokens_per_s']:.1f}",
        ]
        for loss in analysis.losses()
    ]
    return "<h2>Where they lose against the best static k</h2>" + (_table(head, rows) if rows else "<p>Nowhere.</p>")


def _accounts(analysis: Analysis) -> str:
    """Where the time of the policies that forecast went: what is lost to deciding, drafting and wrong guesses."""
    head = ("configuration", "cell", "policy", "drafting", "for tokens that were rejected", "step time off by", "tokens expected / written")
    rows = [
        [escape(name), escape(cell), *(_percent(found[key]) for key in ("policy", "draft", "wasted", "step_time_error")),
         "-" if found["token_error"] is None else f"{1.0 + found['token_error']:.3f}"]
        for name in analysis.adaptive for cell, found in analysis.accounts(name).items() if found["token_error"] is not None
    ]  # fmt: skip
    note = "<p class='note'>Shares of step time. `headway replay TRACE --split` splits the regret itself.</p>"
    return "<h2>Where the time of policies went</h2>" + _table(head, rows) + note if rows else ""


def _recoveries(analysis: Analysis) -> str:
    head = ("cell", "configuration", "switch to", "switches", "recovered", "steps", "seconds")
    rows = [
        [escape(cell), escape(name), escape(kind), str(item["switches"]), str(item["recovered"]),
         *("-" if item[key] is None else f"{item[key]:g}" for key in ("steps", "seconds"))]
        for cell, found in analysis.recoveries().items() for name in analysis.adaptive for kind, item in found.get(name, {}).items()
    ]  # fmt: skip
    note = (
        "<p class='note'>Until a run is, to the phase's end, at 95 % of the best static k of that phase and round; medians over switches. "
        "-: fewer than half of them were made good in their phase.</p>"
    )
    return "<h2>Recovery after the workload switched</h2>" + _table(head, rows) + note if rows else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _heat_maps(analysis: Analysis) -> str:
    return "<h2>Regret</h2><div class='charts'>" + "".join(
        heat_map(title, analysis.configurations, analysis.cells, ratios)
        for title, ratios in (
            ("throughput over that of the best static k of the cell", analysis.against(None)),
            ("throughput over that of plain decoding", analysis.against(OFF)),
        )
        if ratios
    ) + "</div>"


def _curves(analysis: Analysis) -> str:
    """Throughput and TPOT against concurrency, one line per configuration, one pair of charts per workload."""
    parts = []
    for workload, cells in analysis.by_concurrency().items():
        for label, read in CURVES:
            lines = [
                Line(name, [(load, read(analysis, cell, name)) for load, cell in cells], **_look(analysis, name))
                for name in analysis.configurations
            ]
            parts.append(line_chart(f"{workload}: {label}", "requests in flight", label, lines, log_x=True))
    return "<h2>Throughput and time per output token against concurrency</h2><div class='charts'>" + "".join(parts) + "</div>"


def _k_over_time(analysis: Analysis) -> str:
    parts = []
    for cell in analysis.cells:
        runs = analysis.rounds[cell][-1]
        lines = [
            Line(name, list(zip(series["t_s"], series["k"], strict=True)), **_look(analysis, name))
            for name in analysis.adaptive
            if (series := runs[name].get("series"))
        ]
        parts.append(line_chart(f"{cell}: k over time", "seconds", "drafts verified per sequence and step", lines))
    return "<h2>k over time (last round)</h2><div class='charts'>" + "".join(parts) + "</div>"


def _throughputs(analysis: Analysis) -> str:
    head = ("cell", *map(escape, analysis.configurations))
    rows = [[escape(cell), *(f"{analysis.tokens_per_s(cell, name):.1f}" for name in analysis.configurations)] for cell in analysis.cells]
    page = "<h2>Output tokens/s</h2>" + _table(head, rows)
    off = analysis.against(OFF)
    if off:
        rows = [
            [f"{escape(cell)}, {len(analysis.rounds[cell])} rounds", *(
                "{:.2f} ({:.2f} to {:.2f})".format(off[name, cell], *analysis.spread(cell, name, OFF))
                for name in analysis.configurations
            )]
            for cell in analysis.cells
        ]  # fmt: skip
        page += "<h2>Against no speculation, least and greatest ratio within a round</h2>" + _table(head, rows)
    return page


def _look(analysis: Analysis, name: str) -> dict[str, Any]:
    """Plain decoding black and dashed, static k thin, policies strong."""
    if name == OFF:
        return {"color": GRAY, "dashed": True, "strong": True}
    return {"color": COLORS[analysis.configurations.index(name) % len(COLORS)], "strong": not is_static(name)}


def _ratio(value: float, floor: float) -> str:
    return f"<span class='{'good' if value >= floor else 'bad'}'>{value:.3f}</span>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + f"</tr>{body}</table>"
