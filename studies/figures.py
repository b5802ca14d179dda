"""Figures in the documents come from files under results/, and this says so or puts them there.

    python studies/figures.py            writes results/INDEX.md and fills the tables of README.md and docs/
    python studies/figures.py --check    writes nothing; exit code 1 when something differs

A figure in a sentence is a link whose target names the value: `[1.16x](results/sweep/zen5.json#analysis/num_rounds/chat@1)`. Behind `#`
stand the keys down to the number, list items by their index. A table stands between `<!-- table: KIND FILE [NAME ...] -->` and
`<!-- end -->`; KIND is a function in TABLES. A ratio such as 1.16x anywhere else is refused, except in UNCHECKED.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
TABLE = re.compile(r"(<!-- table: (\S+) (\S+)((?: \S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"\[\**([^\]\[]*?)\**\]\(([^()\s]+\.json)#([^()\s]+)\)")
REFERENCE = re.compile(r"\[\**([^\]\[]*?)\**\]\[([\w-]+)\]")
DEFINITION = re.compile(r"^\[([\w-]+)\]: (\S+\.json)#(\S+)$", re.MULTILINE)
UNCHECKED = ("log.md",)   # history
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
RATIO = re.compile(r"(?<![\w.])\d+\.\d+x")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def value_at(document: Any, path: str) -> Any:
    """What the keys of `path` ("a/b/0") lead to. KeyError or IndexError when nothing."""
    for key in path.split("/"):
        document = document[int(key) if isinstance(document, list) else key]
    return document


def wrong(path: Path) -> Iterator[str]:
    """What is not as the files have it, one sentence each."""
    text = path.read_text(encoding="utf-8")
    where = path.relative_to(ROOT)
    if fill(text) != text:
        yield f"{where}: a table differs from its file; run python studies/figures.py"
    defined = {name: (target, keys) for name, target, keys in DEFINITION.findall(text)}
    links = [(shown, target, keys) for shown, target, keys in LINK.findall(text)]
    links += [(shown, *defined[name]) for shown, name in REFERENCE.findall(text) if name in defined]
    for shown, target, keys in links:
        number = NUMBER.search(shown)
        try:
            value = float(value_at(json.loads((path.parent / target).read_text(encoding="utf-8")), keys))
        except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
            yield f"{where}: [{shown}] points to {target}#{keys}, which is no number: {error!r}"
            continue
        decimals = len(number[0].partition(".")[2]) if number else 0
        value *= 100 if "%" in shown else 1
        if number is None or f"{value:.{decimals}f}" != f"{float(number[0].replace(',', '')):.{decimals}f}":
            yield f"{where}: [{shown}] is {value:g} in {target}#{keys}"
    if path.name not in UNCHECKED:
        bare = REFERENCE.sub("", LINK.sub("", CODE.sub("", TABLE.sub("", text))))
        yield from (f"{where}: {found[0]} does not say which file it is from" for found in RATIO.finditer(bare))


def fill(text: str) -> str:
    """The text with every table as its file has it."""
    return TABLE.sub(lambda m: f"{m[1]}{TABLES[m[2]](_load(m[3]), m[4].split())}\n{m[5]}", text)


def _load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / name).read_text(encoding="utf-8"))
    return document


def sweep(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """Output tokens/s against no speculation, a column a cell; `names`: the cells to show."""
    ratios = document["analysis"]["against_off"]
    cells = list(names) or list(ratios)
    rows = [
        [_configuration(name), *(_ratio(_value(ratios[cell][name]), _configuration(name).startswith("**")) for cell in cells)]
        for name in document["configurations"] if name != "off"
    ]  # fmt: skip
    return _markdown(["", *map(_cell, cells)], rows)


def _value(found: Mapping[str, Any]) -> float:
    """The ratio of totals; older files have the median over rounds."""
    return float(found["ratio"] if "ratio" in found else found["median"])


def against_vllm(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """Headway's figure over vLLM's, median of the rounds; `names`: the cells to show."""
    found = {cell["cell"]: cell["ratios"] for cell in document["cells"]}
    cells = list(names) or list(found)
    rows = []
    for title, ours, metric, theirs in AGAINST_VLLM:
        values = [found[cell].get(ours, {}).get(metric, {}).get(theirs) for cell in cells]
        if any(values):
            strong = title.startswith("**")
            rows.append([title, *("" if value is None else _ratio(value[0], strong) for value in values)])
    return _markdown(["Headway over vLLM", *map(_cell, cells)], rows)


AGAINST_VLLM = (
    ("**as it comes, over the fastest vLLM**", "headway:default", "output_tokens_per_s", "best"),
    ("neither speculates", "headway:off", "output_tokens_per_s", "vllm:off+all"),
    ("both `ngram`, 4 drafts", "headway:ngram-k4", "output_tokens_per_s", "vllm:ngram-k4"),
    ("time to first token (less is better)", "headway:off", "ttft_ms", "vllm:off+all"),
)


def vllm_plugin(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """Output tokens/s inside vLLM, with the ratio to the best of vLLM's own behind Headway's."""
    rows = []
    for cell in document["summary"]:
        speed = cell["output_tokens_per_s"]
        rows.append([_cell(f"{cell['workload']}@{cell['concurrency']}")])
        for name in ("none", "k4", "headway", "headway+proposer"):
            text = f"{speed[name]:.1f}" if name in speed else ""
            rows[-1].append(f"{text} ({cell[name]['over_best']:.2f}x)" if name in cell else text)
    return _markdown(["workload, requests", "none", "k=4", "Headway's scheduler over `ngram`", "and its proposer"], rows)


def constants(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """Each constant of the default policy, with throughput at half and at twice its value: the mean, and the world that changes most."""
    def change(found: Mapping[str, Any]) -> str:
        return f"{found['mean']:.3f} ({found['there']:.2f} {found['world']})" if found["there"] != 1.0 else "no change"

    rows = [
        [f"`{name}`", f"{row['value']:g}", f"{row['unit']}: {row['meaning']}", change(row["half"]), change(row["twice"])]
        for name, row in document["constants"].items()
    ]
    return _markdown(["constant", "value", "unit and meaning", "half", "twice"], rows)


TABLES: Mapping[str, Callable[[Mapping[str, Any], Sequence[str]], str]] = {
    "sweep": sweep, "against-vllm": against_vllm, "vllm-plugin": vllm_plugin, "constants": constants,
}  # fmt: skip


def _configuration(name: str) -> str:
    drafters, fixed, k = name.partition("-k")
    if fixed:
        return f"`{drafters}`, always {k}"
    return "**" + " + ".join(f"`{drafter}`" for drafter in name.split("+")) + ("**" if name == "goodput" else "**, policy")


def _cell(name: str) -> str:
    workload, _, load = name.partition("@")
    return f"{workload}, {load}"


def _ratio(value: float, strong: bool) -> str:
    return f"**{value:.2f}x**" if strong else f"{value:.2f}x"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)).replace("|  |", "| |")


def index() -> str:
    """results/INDEX.md: every file with where, when and how it was measured, and who quotes it."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in documents()}
    rows = []
    for path in sorted(RESULTS.glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        commit, name = document.get("commit") or {}, f"{path.parent.name}/{path.name}"
        quoted = ", ".join(title for title, text in texts.items() if f"results/{name}" in text and title != "log.md")
        sha = commit.get("sha", "")[:8] + (" and changes" if commit.get("dirty") else "")
        origin = [_machine(document["hardware"]), document["date"][:10], sha, f"`{document['command']}`"]
        rows.append([f"[{name}]({name})", quoted, *origin])
    return INDEX + _markdown(["file", "quoted in", "machine", "date", "commit", "command"], rows) + "\n"


INDEX = """# Results

One folder a study, one file a machine. Written by `python studies/figures.py`; superseded files are in the history. The date is that
of the measurement, or of its commit where the file is older than 2026-11-23. `benchmarks/` in a command is `studies/` today.

"""


def _machine(hardware: Mapping[str, Any]) -> str:
    flags = hardware.get("cpu_flags") or []
    best = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2") if flag in flags), "")
    return f"{hardware['cpu']} ({hardware.get('cpu_family_model')}, {best}), {hardware['cores']} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    check = parser.parse_args().check
    if not check:
        for path in documents():
            path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
        (RESULTS / "INDEX.md").write_text(index(), encoding="utf-8")
    complaints = [sentence for path in documents() for sentence in wrong(path)]
    if (RESULTS / "INDEX.md").read_text(encoding="utf-8") != index():
        complaints.append("results/INDEX.md is out of date; run python studies/figures.py")
    print("\n".join(complaints) or "every figure is as its file has it")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
