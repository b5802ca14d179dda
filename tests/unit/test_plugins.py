"""Finding drafters and policies: files, entry points, module:Class; and what is not one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from headway import plugins
from headway.config import SpeculativeConfig
from headway.control.policies.static import Static
from headway.control.policy import Policy
from headway.drafters.drafter import Drafter
from headway.drafters.ngram import Ngram
from headway.errors import ConfigError

MODULE = """
from dataclasses import dataclass
from typing import Literal, Optional
from headway.control.policy import Policy
from headway.drafters.drafter import Drafter
from headway.drafters.ngram import Ngram

class Mine(Ngram):
    pass

class Picky(Policy):
    @dataclass(frozen=True)
    class Options:
        needed: int
        mode: Literal["fast", "slow"] = "fast"
        share: Optional[float] = None
    def __init__(self, options):
        self.options = options
    def plan(self, view):
        return {}

class Unfinished(Drafter):
    pass

class Odd(Policy):
    Options = "nothing"
    def plan(self, view):
        return {}

class Policy2:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "third_party.py").write_text(MODULE)
    (tmp_path / "broken_party.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("third_party", None)


def install(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in names.items()]

    monkeypatch.setattr(plugins, "entry_points", entry_points)


def test_built_in_names() -> None:
    assert {"ngram", "suffix"} <= set(plugins.names("drafter"))
    assert {"static", "batch_table", "disable_by_batch_size"} <= set(plugins.names("policy"))
    for kind in ("drafter", "policy"):
        names = plugins.names(kind)
        assert names == sorted(names)
        assert not {"drafter", "policy", "__init__"} & set(names)
        assert not any(name.startswith("_") for name in names)


@pytest.mark.parametrize("kind", ["drafter", "policy"])
def test_every_built_in_loads_under_its_file_name(kind: str) -> None:
    for name in plugins.names(kind):
        cls = plugins.load(kind, name)
        assert issubclass(cls, Drafter if kind == "drafter" else Policy)
        assert cls.name == name


def test_module_and_class() -> None:
    cls = plugins.load("drafter", "third_party:Mine")
    assert issubclass(cls, Ngram)
    assert cls.name == "third_party:Mine"     # its own, though the class it extends has a name
    assert plugins.load("drafter", "ngram").name == "ngram"


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mine="third_party:Mine")
    assert "mine" in plugins.names("drafter")
    cls = plugins.load("drafter", "mine")
    assert (cls.__name__, cls.name) == ("Mine", "mine")


def test_an_entry_point_cannot_take_the_name_of_a_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ngram="third_party:Mine", static="third_party:Picky")
    assert plugins.load("drafter", "ngram") is Ngram
    assert plugins.load("policy", "static") is Static
    assert plugins.names("drafter").count("ngram") == 1


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("drafter", "ngrams", r"unknown drafter 'ngrams'. Did you mean 'ngram'\? Accepted: .*suffix, or \"package.module:Class\""),
        ("policy", "zzz", "unknown policy 'zzz'. Accepted: bandit, batch_table"),
        ("drafter", "drafter", "unknown drafter 'drafter'"),
        ("drafter", "_ngram_index", "unknown drafter '_ngram_index'"),
        ("drafter", "", "unknown drafter ''"),
        ("drafter", "static", "unknown drafter 'static'"),
        ("drafter", "../ngram", "unknown drafter"),
        ("drafter", ":Mine", "cannot load drafter ':Mine'"),
        ("drafter", "third_party:", "cannot load drafter 'third_party:'"),
        ("drafter", ".relative:Mine", "cannot load drafter '.relative:Mine'"),
        ("drafter", "no_such_module:Mine", r"ModuleNotFoundError: No module named 'no_such_module'. Is the folder .* PYTHONPATH\?"),
        ("drafter", "third_party:Mine:depth=2", r'options go beside it, \{"method": NAME, OPTION: VALUE\}'),
        ("policy", "static:depth=2", r'options go beside it, \{"name": NAME, OPTION: VALUE\}'),
        ("drafter", "third_party:Absent", "cannot load drafter .*has no attribute 'Absent'"),
        ("drafter", "broken_party:Mine", "cannot load drafter .*RuntimeError: no licence"),
        ("drafter", "third_party:number", "is not a Drafter: 3"),
        ("drafter", "third_party:Picky", "is not a Drafter"),
        ("policy", "third_party:Mine", "is not a Policy"),
        ("policy", "third_party:Policy2", "is not a Policy"),
        ("drafter", "third_party:Unfinished", "'third_party:Unfinished' does not define propose"),
        ("drafter", "headway.drafters.drafter:Drafter", "does not define propose"),
        ("policy", "third_party:Odd", "Options must be a dataclass, got 'nothing'"),
    ],
)
def test_what_cannot_be_loaded(kind: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plugins.load(kind, name)


def test_an_entry_point_that_fails_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, theirs="broken_party:Mine")
    with pytest.raises(ConfigError, match="cannot load drafter 'theirs': RuntimeError: no licence"):
        plugins.load("drafter", "theirs")


def test_options_of_a_third_party_policy() -> None:
    def parse(**options: Any) -> Any:
        config = SpeculativeConfig.parse({"policy": {"name": "third_party:Picky", **options}})
        assert config is not None
        return config.build_policy().options

    options = parse(needed=3, mode="slow", share=1)
    assert (options.needed, options.mode, options.share) == (3, "slow", 1.0)
    with pytest.raises(ConfigError, match="policy 'third_party:Picky' needs needed"):
        parse()
    with pytest.raises(ConfigError, match="mode must be 'fast' or 'slow', got 'x'"):
        parse(needed=1, mode="x")
    with pytest.raises(ConfigError, match="share must be a number or null, got 'x'"):
        parse(needed=1, share="x")
    with pytest.raises(ConfigError, match=r"'need'. Did you mean 'needed'\? Accepted: mode, name, needed, share"):
        parse(need=1)
