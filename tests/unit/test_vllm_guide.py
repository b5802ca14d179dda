"""docs/vllm.md and examples/vllm-kubernetes.yaml say what works: each `vllm serve` in them passes `headway vllm check`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli.main import main
from headway.vllm.server_flags import METHODS
from headway.vllm.settings import RequestSettings, Settings

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
MANIFEST = list(yaml.safe_load_all((ROOT / "examples" / "vllm-kubernetes.yaml").read_text(encoding="utf-8")))


def commands(text: str) -> list[list[str]]:
    """Of the bash blocks, as words; a continued line is one command."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


SERVE = [words for words in commands(GUIDE.replace(",\n  ", ", ")) if words[:2] == ["vllm", "serve"]]
HEADWAY = [words[1:] for words in commands(GUIDE.replace(",\n  ", ", ")) if words[0] == "headway"]


def test_the_guide_has_commands() -> None:
    assert len(SERVE) >= 2
    assert len(HEADWAY) >= 2


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0"])
@pytest.mark.parametrize("words", SERVE, ids=lambda words: words[2])
def test_the_guides_servers_would_start(words: list[str], version: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.replace("/var/log/vllm/", "") for word in words]   # a folder of the server, not of this machine
    assert main(["vllm", "check", "--assume", version, *words]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("words", HEADWAY, ids=lambda words: words[1])
def test_the_guides_own_commands_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assume = ["--assume", "0.32.0"] if words[1] == "check" else []
    assert main([*words[:2], *assume, *words[2:]]) == 0, capsys.readouterr().out


def test_the_guides_tables_are_complete() -> None:
    for name in [*METHODS, *(f"headway_{key}" for key in RequestSettings.__slots__), *Settings.__dataclass_fields__]:
        assert f"`{name}`" in GUIDE, name


def of_kind(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(document for document in MANIFEST if document["kind"] == kind)
    return found


def test_the_manifests_parts_fit_together() -> None:
    assert all({"apiVersion", "kind", "metadata", "spec"} <= document.keys() for document in MANIFEST)
    deployment, service, claim = of_kind("Deployment"), of_kind("Service"), of_kind("PersistentVolumeClaim")
    template = deployment["spec"]["template"]
    container = template["spec"]["containers"][0]
    labels, ports = template["metadata"]["labels"], {port["name"]: port["containerPort"] for port in container["ports"]}
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")} <= ports.keys()
    assert int(template["metadata"]["annotations"]["prometheus.io/port"]) in ports.values()
    assert f"--port={ports['http']}" in container["args"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    homes = [entry["value"] for entry in container["env"] if "value" in entry]
    assert all(home.startswith("/cache/") for home in homes)


def test_the_manifests_server_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    container = of_kind("Deployment")["spec"]["template"]["spec"]["containers"][0]
    code = main(["vllm", "check", "--json", "--assume", "0.32.0", *container["command"], *container["args"]])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    assert not [finding for finding in found["findings"] if finding["level"] == "warning"]
