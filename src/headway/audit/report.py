"""An audit for people, for programs (JSON) and for continuous integration (JUnit's XML)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from headway.audit.records import FAULT, SKIPPED
from headway.audit.run import Report, verdict
from headway.audit.sampled import ALPHA, SETTINGS
from headway.version import __version__

SIGNS = {FAULT: "FAULT", SKIPPED: "skip", "sound": "ok"}


def page(report: Report) -> str:
    """One page of plain text."""
    target = report.target
    against = f"against {target.plain_url}" if target.plain_url else "against itself with speculation off, request by request"
    width = max(len(result.name) for result in report.results)
    lines = [verdict(report), "", f"{target.url}, {against}; {report.seconds / 60:.1f} minutes, seed {report.seed}"]
    if report.num_drafted is not None:
        lines.append(f"{report.num_drafted:.0f} tokens were drafted meanwhile")
    lines += ["", *(f"{SIGNS[result.status]:5}  {result.name:{width}}  {result.summary}" for result in report.results), ""]
    lines.append(
        f"How strong it is: the {len(SETTINGS) + 1} sampled checks accuse a sound server at most once in {1 / ALPHA:.0f} audits together, "
        "whenever one looks. The others compare texts and numbers; their tolerance is four times the noise of plain decoding."
    )
    examples = [(result.name, example) for result in report.faults for example in result.examples[:1]]
    for name, example in examples[:3]:
        lines += ["", f"To see it ({name}):", f"  {example}"]
    return "\n".join(lines)


def document(report: Report) -> dict[str, Any]:
    """The report as JSON. The API key stays out of it."""
    return {
        "headway": __version__,
        "verdict": "fault" if report.faults else "sound",
        "url": report.target.url,
        "plain_url": report.target.plain_url,
        "seed": report.seed,
        "seconds": round(report.seconds, 1),
        "drafted_tokens": report.num_drafted,
        "alpha": ALPHA,
        "checks": [asdict(result) for result in report.results],
    }


def as_json(report: Report) -> str:
    return json.dumps(document(report), indent=1) + "\n"


def as_junit(report: Report) -> str:
    """One test case a check."""
    skipped = sum(result.status == SKIPPED for result in report.results)
    suite = ElementTree.Element("testsuite", {
        "name": "headway audit", "tests": str(len(report.results)), "failures": str(len(report.faults)), "errors": "0",
        "skipped": str(skipped), "time": f"{report.seconds:.1f}",
    })  # fmt: skip
    for result in report.results:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "headway.audit", "name": result.name})
        if result.status == FAULT:
            failure = ElementTree.SubElement(case, "failure", {"message": _printable(result.summary)})
            failure.text = _printable("\n".join(result.examples))
        elif result.status == SKIPPED:
            ElementTree.SubElement(case, "skipped", {"message": _printable(result.summary)})
        else:
            said = ElementTree.SubElement(case, "system-out")
            said.text = _printable(result.summary)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """XML has no control characters, and models write what they like."""
    return "".join(each if each in "\t\n" or (each.isprintable() and ord(each) < 0xFFFE) else "?" for each in text)
