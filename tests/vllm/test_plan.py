"""What `headway plan --emit-dir` writes is what vLLM's own parser takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from headway.cli.main import main
from tests.heads import eagle3_dir
from tests.tiny import tiny_model_dir

LOAD = ["--gpu", "H100", "--tp", "1", "--concurrency", "16", "--input-len", "64", "--output-len", "64", "--acceptance", "0.7", "--kv-dtype"]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("method", ["ngram", "eagle3", "draft_model"])
def test_vllm_parses_the_server_s_settings(method: str, kv_dtype: str, tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path / "target", "llama")
    draft = {"ngram": [], "eagle3": ["--draft", str(eagle3_dir(tmp_path / "h", target))], "draft_model": ["--draft", str(target)]}[method]
    out = tmp_path / "out"
    assert main(["plan", str(target), "--method", method, *draft, *LOAD, kv_dtype, "--emit-dir", str(out)]) == 0
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(parser.load_config_file(str(out / "vllm.yaml")))
    given = yaml.safe_load((out / "vllm.yaml").read_text())
    engine = EngineArgs.from_cli_args(args)
    assert engine.speculative_config == given["speculative-config"]
    assert (engine.max_num_seqs, engine.max_model_len, engine.kv_cache_dtype) == (16, 128, kv_dtype)
    if kv_dtype == "auto":   # this machine's kernels have no fp8 cache: only the settings are checked
        config = engine.create_engine_config()
        assert config.speculative_config is not None
        assert config.speculative_config.method == method
