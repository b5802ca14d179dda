"""Building the compiled kernels: what happens without a compiler, and what tells a library from another build's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headway.native import interface

ROOT = Path(__file__).parents[2]


def test_a_build_without_a_compiler_is_a_warning(tmp_path: Path) -> None:
    if not (ROOT / "setup.py").exists():
        pytest.skip("not a checkout")
    out = tmp_path / "out"
    command = [sys.executable, "setup.py", "build_ext", "--build-temp", str(tmp_path / "temp"), "--build-lib", str(out)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CC": "no-such-compiler"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no-such-compiler" in done.stdout + done.stderr
    assert not list(out.rglob("*.so"))


def test_the_checksum_follows_names_and_contents_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in Path(interface.__file__).parent.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(interface, "__file__", str(tmp_path / "interface.py"))
    assert interface.checksum() == interface_of_the_checkout()
    changed = tmp_path / "kernels.h"
    changed.write_text(changed.read_text() + "// another\n")
    other = interface.checksum()
    assert other != interface_of_the_checkout()
    changed.rename(tmp_path / "renamed.h")
    assert interface.checksum() not in (other, interface_of_the_checkout())


def interface_of_the_checkout() -> int:
    from headway import native

    return native.INTERFACE
