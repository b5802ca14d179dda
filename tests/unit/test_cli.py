"""The command line: flags, precedence, provenance, exit codes. Nothing here loads a model."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.cli import flags, generate, main, sampling, settings
from headway.config import EngineConfig, SpeculativeConfig, option
from headway.drafters.core.automatic import spell_out
from headway.errors import ConfigError, ModelError
from headway.sampling_params import SamplingParams
from headway.server.options import ServerOptions

Read = Callable[..., argparse.Namespace]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Words of `headway config` -> the namespace its main would get."""

    def parse(*words: str) -> argparse.Namespace:
        found: list[argparse.Namespace] = []
        monkeypatch.setattr("headway.cli.config.main", lambda args: found.append(args) or 0)
        assert main.main(["config", *words]) == 0
        return found[0]

    return parse


def sources(args: argparse.Namespace) -> dict[str, str]:
    return {setting.name: setting.source for setting in settings.engine_config(args)[1]}


# -- flags from fields --------------------------------------------------------------------------------------------


def test_every_field_of_the_configs_is_a_flag(read: Read) -> None:
    args = read(
        "dir", "--dtype", "float32", "--device", "cpu", "--seed", "7", "--max-model-len", "100", "--max-num-seqs", "3",
        "--max-num-batched-tokens", "9", "--block-size", "8", "--kv-cache-memory-bytes", "1.5GiB", "--gpu-memory-utilization", "0.5",
        "--no-enable-prefix-caching", "--num-threads", "2", "--trace", "t.jsonl", "--spec", "off", "--host", "::1", "--port", "0",
        "--served-model-name", "m", "--api-key", "k", "--max-queue", "5", "--max-body-bytes", "1k", "--drain-timeout-s", "2.5",
    )
    config, _ = settings.engine_config(args)
    assert config == EngineConfig(
        model="dir", dtype="float32", device="cpu", seed=7, max_model_len=100, max_num_seqs=3, max_num_batched_tokens=9, block_size=8,
        kv_cache_memory_bytes=3 * 2**29, gpu_memory_utilization=0.5, enable_prefix_caching=False, num_threads=2, trace="t.jsonl",
        speculative=None,
    )
    expected = ServerOptions(
        host="::1", port=0, served_model_name="m", api_key=("k",), max_queue=5, max_body_bytes=1000, drain_timeout_s=2.5
    )
    assert settings.server_options(args) == expected


def test_several_api_keys_and_other_lists(read: Read) -> None:
    pages = ("--allowed-origins", '["https://x.example"]', "--allowed-hosts", "x.example *.y.example")
    options = settings.server_options(read("--api-key", "a", "--api-key", "b,c", *pages))
    assert options.api_key == ("a", "b", "c")
    assert (options.allowed_origins, options.allowed_hosts) == (("https://x.example",), ("x.example", "*.y.example"))


def test_api_keys_from_the_environment(read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", "a, b")
    args = read()
    assert settings.server_options(args).api_key == ("a", "b")
    assert settings.source_of(args, "api_key") == "env HEADWAY_API_KEY"
    (tmp_path / "run.json").write_text('{"api_key": ["d", "e"]}')
    for words, keys in (["--api-key", "c"], ("c",)), (["--config", str(tmp_path / "run.json")], ("d", "e")):
        assert settings.server_options(read(*words)).api_key == keys
    monkeypatch.setenv("HEADWAY_API_KEY", " ")
    with pytest.raises(ConfigError, match="HEADWAY_API_KEY is empty: unset it"):
        settings.server_options(read())


def test_the_help_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    assert "$HEADWAY_API_KEY" in capsys.readouterr().out


def test_defaults_are_the_dataclasses_own_and_speculation_is_on(read: Read) -> None:
    config, _ = settings.engine_config(read())
    assert config == EngineConfig(speculative=SpeculativeConfig.parse(spell_out("default", EngineConfig.model)[0]))


def test_fields_of_every_kind_become_flags() -> None:
    @dataclass(frozen=True)
    class Options:
        words: tuple[str, ...] = option((), "several")
        number: int | None = option(None, "maybe 100%")
        table: dict[str, int] | None = option(None, "JSON")
        level: str = option("low", "pick", choices=("low", "high"), alias="pitch")

    parser = flags.Parser()
    flags.add_fields(parser, Options)
    given = parser.parse_args(["--words", "a b", "--words", "c", "--number", "3", "--table", '{"x": 1}', "--pitch", "high"])
    assert vars(given) == {"words": ["a b", "c"], "number": 3, "table": {"x": 1}, "level": "high"}
    assert vars(parser.parse_args([])) == {}
    assert "100%" in parser.format_help()


@pytest.mark.parametrize(
    ("text", "value"), [("2000", 2000), ("2k", 2000), ("2K", 2048), ("1.5MiB", 3 * 2**19), ("2GiB", 2**31), ("1g", 10**9)]
)
def test_bytes(text: str, value: int) -> None:
    assert flags.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1X", "GiB", "1e9", "0x10"])
def test_bytes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="bytes"):
        flags.parse_bytes(text)


# -- speculation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["-sc", "off"], "off"),
        (["--spec", "default"], "default"),
        (["--speculative-config", "ngram"], {"method": "ngram"}),
        (["-sc", '{"method": "ngram", "num_speculative_tokens": 2}'], {"method": "ngram", "num_speculative_tokens": 2}),
        (["--spec-method", "ngram", "--spec-tokens", "3"], {"method": "ngram", "num_speculative_tokens": 3}),
        (["--spec-tokens", "3"], {"num_speculative_tokens": 3}),
        (["--spec-policy", "static"], {"policy": "static"}),
        (["--spec-policy", "disable_by_batch_size:disable_by_batch_size=5"], {"disable_by_batch_size": 5}),
        (
            ["--spec-policy", "batch_table:num_speculative_tokens_per_batch_size=[[1, 8, 4], [9, 64, 0]]"],
            {"num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 0]]},
        ),
        (["--spec-policy", "headway.control.policies.static:Static"], {"policy": "headway.control.policies.static:Static"}),
    ],
)
def test_both_spellings_of_speculation(read: Read, words: list[str], given: Any) -> None:
    assert settings.engine_config(read(*words))[0].speculative == SpeculativeConfig.parse(spell_out(given, EngineConfig.model)[0])


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("name", {"name": "name"}),
        ("name:a=1,b=text,c=[1,2],d=true", {"name": "name", "a": 1, "b": "text", "c": [1, 2], "d": True}),
        ("my.module:Class:a=0.5", {"name": "my.module:Class", "a": 0.5}),
        ("my.module:Class", {"name": "my.module:Class"}),
    ],
)
def test_policy_text(text: str, options: dict[str, Any]) -> None:
    assert settings.policy_from_text(text) == options


def test_policy_text_with_a_stray_word() -> None:
    with pytest.raises(ConfigError, match="'b' is not KEY=VALUE"):
        settings.policy_from_text("name:a=1,b")


def test_the_two_spellings_exclude_each_other(read: Read) -> None:
    with pytest.raises(ConfigError, match="--spec-tokens cannot be combined with --speculative-config"):
        settings.engine_config(read("-sc", "off", "--spec-tokens", "3"))


def test_model_twice(read: Read) -> None:
    with pytest.raises(ConfigError, match="twice"):
        settings.engine_config(read("one", "--model", "two"))


# -- where values come from ---------------------------------------------------------------------------------------


def test_provenance(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({
        "model": "dir", "dtype": "float32", "max-num-seqs": 3, "enable_prefix_caching": False, "num_threads": None,
        "speculative_config": {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
    }))
    args = read("--config", str(file), "--dtype", "bfloat16")
    config, _ = settings.engine_config(args)
    assert (config.model, config.dtype, config.max_num_seqs, config.enable_prefix_caching) == ("dir", "bfloat16", 3, False)
    found = sources(args)
    from_file = f"file {file}"
    expected = {
        "model": from_file,
        "dtype": "flag --dtype",
        "max_num_seqs": from_file,
        "enable_prefix_caching": from_file,
        "num_threads": "default",
        "speculative.method": from_file,
        "speculative.num_speculative_tokens": "method ngram",
        "speculative.policy": "implied by num_speculative_tokens_per_batch_size",
        "speculative.num_speculative_tokens_per_batch_size": from_file,
        "speculative.prompt_lookup_max": "method ngram",
        "speculative.rejection_sample_method": "default",
    }
    assert {name: found[name] for name in expected} == expected


def test_provenance_of_the_shortcuts(read: Read) -> None:
    args = read("dir", "--spec-tokens", "3", "--spec-policy", "disable_by_batch_size:disable_by_batch_size=5")
    found = sources(args)
    assert found["model"] == "flag MODEL"
    assert found["speculative.method"] == "default"
    assert found["speculative.num_speculative_tokens"] == "flag --spec-tokens"
    assert found["speculative.policy"] == found["speculative.disable_by_batch_size"] == "flag --spec-policy"


def test_a_commands_own_defaults_are_below_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"max_tokens": 7, "top_p": 0.5, "stop": ["a", "b"]}')
    found: list[argparse.Namespace] = []
    monkeypatch.setattr("headway.cli.generate.main", lambda args: found.append(args) or 0)
    main.main(["generate", "-p", "x"])
    main.main(["generate", "-p", "x", "--config", str(file)])
    main.main(["generate", "-p", "x", "--config", str(file), "--max-tokens", "8", "--seed", "3"])
    read = [sampling.sampling_params(args, generate.DEFAULTS) for args in found]
    assert read == [
        SamplingParams(max_tokens=256, temperature=0.0),
        SamplingParams(max_tokens=7, temperature=0.0, top_p=0.5, stop=["a", "b"]),
        SamplingParams(max_tokens=8, temperature=0.0, top_p=0.5, stop=["a", "b"], seed=3),
    ]


@pytest.mark.parametrize("words", [["--spec-tokens", "3"], ["-sc", "off"]])
def test_a_speculation_flag_hides_the_files_speculation(read: Read, tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"spec_method": "ngram", "spec-policy": "static"}')
    assert settings.engine_config(read("--config", str(file), *words))[0] == settings.engine_config(read(*words))[0]


def test_the_model_on_the_command_line_hides_the_files(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"model": "other"}')
    assert settings.engine_config(read("dir", "--config", str(file)))[0].model == "dir"


# -- bad input: one line on stderr, exit code 2, no traceback ----------------------------------------------------------


def failing(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = main.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    captured = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in captured.err
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["no-such-command"], "serve"),
        (["config", "--no-such-flag"], "unknown argument '--no-such-flag'"),
        (["config", "--max-num-seq", "3"], "Did you mean --max-num-seqs?"),
        (["config", "--max-num-seqs", "three"], "--max-num-seqs"),
        (["config", "--max-num-seqs", "0"], "max_num_seqs must be >= 1"),
        (["config", "--dtype", "int4"], "'float32'"),
        (["config", "--kv-cache-memory-bytes", "much"], "2GiB"),
        (["config", "--spec-method", "ngrm"], "Did you mean 'ngram'?"),
        (["config", "--spec-tokens", "0"], "'0' is not a whole number >= 1"),
        (["config", "-sc", "{"], "not valid JSON"),
        (["config", "-sc", '{"method": "ngram", "lookup": 1}'], "Accepted: "),
        (["config", "-sc", '{"method": [3]}'], "a drafter's name"),
        (["config", "--spec-policy", "static:a=1"], "option of policy 'static'"),
        (["config", "--config", "/no/such/file"], "No such file"),
        (["serve", "--port", "70000"], "port must be in"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature must be >= 0"),
        (["generate", "-p", "x", "--logit-bias", "[1]"], "logit_bias must be a JSON object"),
        (["generate", "-p", "x", "--top-p", "nan"], "top_p must be"),
        (["chat", "--max-tokens", "0"], "max_tokens must be >= 1"),
        (["list", "engines"], "policies"),
        (["pull", "no-such-model"], "smollm2-135m"),
        (["generate", "no-such-model", "-p", "x"], "smollm2-135m"),
        (["bench"], "KIND"),
        (["bench", "throughput", "--num-prompts", "0"], "num_prompts must be >= 1"),
        (["bench", "throughput", "--output", "/no/such/dir/x.json"], "there is no directory"),
        (["bench", "serve", "--base-url", "localhost"], "must look like http://"),
        (["bench", "serve", "--request-rate", "1", "--concurrency", "2"], "exclude each other"),
        (["bench", "compare"], "--base-url-a"),
        (["bench", "compare", "--a", "--spec off", "--base-url-b", "http://x"], "--base-url-a"),
        (["bench", "compare", "--a", "--spec 'off", "--b", ""], "--a: No closing quotation"),
        (["bench", "compare", "--a", "--spc off", "--b", ""], "Did you mean --spec?"),
        (["bench", "compare", "--trace", "t", "--a", "", "--b", ""], "both configurations would write the trace t"),
    ],
    ids=" ".join,
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in failing(words, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ('{"dtyp": 1}', "Did you mean 'dtype'?"),
        ('{"dtype": 1}', "--dtype"),
        ('{"enable_prefix_caching": 1}', "true or false"),
        ('{"config": "x"}', "Accepted"),
        ('{"json": true}', "Accepted"),
        ('{"speculative_config": {"method": "no"}}', "unknown drafter 'no'"),
    ],
)
def test_bad_config_file(tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    assert message in failing(["config", "--config", str(file)], capsys)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(ModelError("the reason"), 2, "headway config: error: the reason\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("headway.cli.config.main", fail)
    assert main.main(["config"]) == code
    assert capsys.readouterr().err == said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from headway.version import __version__

    with pytest.raises(SystemExit, match="0"):
        main.main(["--version"])
    assert capsys.readouterr().out == f"headway {__version__}\n"


# -- list -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("drafters", "ngram"), ("policies", "batch_table"), ("models", "smollm2-135m")])
def test_list(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list", kind, "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries[name]["summary"]
    assert main.main(["list", kind]) == 0
    text = capsys.readouterr().out
    for entry in entries.values():
        assert entry["summary"] in text
        assert all(option["name"] in text and option["help"] for option in entry["options"])


def test_list_shows_the_options_a_drafter_declares(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["list", "drafters", "--json"])
    [ngram] = [entry for entry in json.loads(capsys.readouterr().out) if entry["name"] == "ngram"]
    assert [option["name"] for option in ngram["options"]] == ["prompt_lookup_max", "prompt_lookup_min"]


def test_examples_in_the_epilogs_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every example line of every command, up to its main."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text('{"dtype": "float32"}')
    seen = 0
    for command in main.COMMANDS:
        module = importlib.import_module(f"headway.cli.{command}")
        monkeypatch.setattr(module, "main", lambda args: 0)
        for line in module.EPILOG.splitlines():
            if match := re.search(r"^  (?:.*\| )?(headway .*)$", line):
                seen += 1
                assert main.main(shlex.split(match[1])[1:]) == 0
    assert seen >= 10
