"""What `headway audit` finds, and how often it accuses a sound server.

    python studies/audit_power.py faults [--only FAULT ...] [--runs 1] [--budget 3] [--slice 170] --output FILE.json
    python studies/audit_power.py sound [--runs 3] [--budget 1] [--slice 170] --output FILE.json
    python studies/audit_power.py simulated [--slice 170] --output FILE.json

faults     real servers with one planted fault each (tests/audit_faults.py), a tiny random model in float32, a draft model close to it
sound      the same server without a fault
simulated  whole audits of sides that draw from exact distributions (tests/audit_sides.py): sound ones without and with noise (false
           alarms), and ones with a bias of 1 % total variation (power)

Adds to the file what it does not hold yet and ends after `--slice` seconds, so that it can be run again and again on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import origin, write
from safetensors.torch import load_file, save_file
from servers import Server

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from headway.audit.records import FAULT  # noqa: E402
from headway.audit.run import AuditTarget, audit, checks  # noqa: E402
from headway.errors import ConfigError  # noqa: E402
from tests.audit_faults import FAULTS  # noqa: E402
from tests.audit_sides import Simulated, simulated_session  # noqa: E402
from tests.tiny import tiny_model_dir  # noqa: E402

NEAR = 0.05   # of a weight's standard deviation: how far the draft model is from the target
WRITTEN = range(3 + ord(" "), 3 + ord("~") + 1)   # the tokens of printable ASCII: text that is tokenized again is the same tokens
EOS = [2, 3 + ord("q"), 3 + ord("~")]
POINT_MASS = {"biased_acceptance"}   # faults of the rule for drafts that are functions of the text
SIMULATED: dict[str, tuple[dict[str, float], dict[str, float], int, float]] = {   # of plain and speculating side; audits, seconds each
    "sound": ({}, {}, 200, 1.0),
    "sound, noise of bf16": ({"noise": 0.02}, {"noise": 0.02}, 200, 1.0),
    "bias of 1 %": ({}, {"too_often": 0.01}, 20, 20.0),
}


def models(folder: Path) -> tuple[Path, Path]:
    """(target, draft model). They write ASCII, some tokens end the text, and the distribution is sharp enough that texts meet again."""
    random = torch.Generator().manual_seed(1)
    directories = []
    for is_draft in (False, True):
        directory = tiny_model_dir(folder, vocab_size=300, max_position_embeddings=1024)
        weights = load_file(directory / "model.safetensors")
        if is_draft:
            weights = {
                name: w + NEAR * w.std() * torch.randn(w.shape, generator=random) if w.ndim > 1 else w for name, w in weights.items()
            }
        others = [token for token in range(300) if token not in WRITTEN]
        weights["model.embed_tokens.weight"][others] = 0.0
        weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": EOS}))
        directories.append(directory)
    return directories[0], directories[1]


def server(fault: str, folder: Path) -> Server:
    target, draft = models(folder)
    speculative = {
        "method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, "policy": "static",
        "draft_sample_method": "greedy" if fault in POINT_MASS else "probabilistic",
    }  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "tests.audit_faults", fault, "serve", str(target), "--port", str(port), "--served-model-name", "tiny",
        "--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--no-profile", "--speculative-config", json.dumps(speculative),
    ]  # fmt: skip
    return Server(fault, command, port, {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})


def audited(fault: str, runs: list[dict[str, Any]], wanted: int, budget: float, ends: float) -> None:
    """Audits of one server, added to `runs` until there are as many as wanted."""
    with tempfile.TemporaryDirectory() as folder:
        running = server(fault, Path(folder))
        try:
            while len(runs) < wanted and (not runs or time.monotonic() < ends):
                began = time.monotonic()
                report = asyncio.run(audit(AuditTarget(running.url), budget, len(runs), lambda what: None, fail_fast=True))
                found = [result.name for result in report.faults]
                runs.append({"found_by": found, "seconds": round(time.monotonic() - began, 1), "drafted": report.num_drafted})
                print(fault, runs[-1], flush=True)
        except ConfigError as error:
            print(fault, error, flush=True)
        finally:
            running.stop()


def simulated(name: str, seed: int, seconds: float) -> list[str]:
    """The checks that call this pair of sides faulty."""
    plain, other, *_ = SIMULATED[name]
    session = simulated_session(seed, seconds, Simulated(seed, **plain), Simulated(seed, **other))

    async def collect() -> list[str]:
        return [result.name async for result in checks(session, lambda what: None, True) if result.status == FAULT]

    return asyncio.run(collect())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "sound", "simulated"))
    parser.add_argument("--only", nargs="+", choices=sorted(FAULTS), default=[name for name in FAULTS if name != "none"])
    parser.add_argument("--runs", type=int, default=None)
    parser.add_argument("--budget", type=float, default=None, help="minutes of an audit")
    parser.add_argument("--slice", type=float, default=170.0, help="seconds after which nothing new begins")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    document = json.loads(args.output.read_text()) if args.output.exists() else {}
    document.update(origin())
    ends = time.monotonic() + args.slice
    if args.what == "simulated":
        for name, (_, _, wanted, seconds) in SIMULATED.items():
            runs = document.setdefault("simulated", {}).setdefault(name, {"seconds": seconds, "found_by": []})["found_by"]
            while len(runs) < wanted and time.monotonic() < ends:
                runs.append(simulated(name, len(runs), seconds))
    else:
        for fault in args.only if args.what == "faults" else ["none"]:
            wanted, budget = (args.runs or 1, args.budget or 3.0) if args.what == "faults" else (args.runs or 3, args.budget or 1.0)
            runs = document.setdefault(args.what, {}).setdefault(fault, [])
            if len(runs) < wanted and time.monotonic() < ends:
                audited(fault, runs, wanted, budget, ends)
            write(document, args.output)
    document["summary"] = summary(document)
    write(document, args.output)
    print(json.dumps(document["summary"], indent=1))


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """Counts of what was found, and times."""
    faults = {name: runs for name, runs in document.get("faults", {}).items() if runs}
    return {
        "faults": len(faults),
        "faults_found_in_every_run": sum(all(run["found_by"] for run in runs) for runs in faults.values()),
        "longest_seconds": max((run["seconds"] for runs in faults.values() for run in runs if run["found_by"]), default=None),
        "missed": sorted(name for name, runs in faults.items() if not all(run["found_by"] for run in runs)),
        "sound_runs": len(document.get("sound", {}).get("none", [])),
        "sound_runs_accused": sum(bool(run["found_by"]) for run in document.get("sound", {}).get("none", [])),
        "simulated": {
            name: {"runs": len(each["found_by"]), "accused": sum(map(bool, each["found_by"]))}
            for name, each in document.get("simulated", {}).items()
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
