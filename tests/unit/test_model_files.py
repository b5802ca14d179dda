"""Damaged model files end in a sentence that names the file, never in a traceback."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.engine.tokenizer import Tokenizer
from headway.errors import HeadwayError, ModelError
from headway.models import gguf
from headway.models.config import ModelConfig
from headway.models.generation import sampling_defaults
from headway.models.loader import Weights
from tests.tiny import tiny_model_dir

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
WRONG = st.sampled_from([None, "x", "", [], ["x"], {}, {"a": 1}, True, -1, 0, 1.5, 2**70, 1e400, [[]]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", seed=1)


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "model", dirs_exist_ok=True)
    return tmp_path / "model"


def works(function: Callable[[], object], where: str) -> bool:
    """Whether it does; one of Headway's errors that says `where` is what else may come."""
    try:
        function()
    except HeadwayError as error:
        said = str(error)
    else:
        return True
    assert where in said
    return False


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", None), ("rope_theta", "x"), ("quantization_config", "x"), ("eos_token_id", "x"), ("eos_token_id", ["x"]),
        ("vocab_size", "x"), ("hidden_size", 0), ("num_attention_heads", -1), ("rms_norm_eps", None), ("tie_word_embeddings", "x"),
        ("rope_scaling", "x"), ("model_type", 5),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_file(model: Path, key: str, value: Any) -> None:
    change(model / "config.json", **{key: value})
    with pytest.raises(ModelError, match=rf"config\.json.*{key}|{key}.*config\.json") as raised:
        ModelConfig.from_directory(model)
    assert "\n" not in str(raised.value)


def test_generation_defaults_that_cannot_be(model: Path) -> None:
    for value in ("x", [1], {}, 1e400):
        with pytest.raises(ModelError, match="generation_config"):
            sampling_defaults("m", {"top_p": value})
    (model / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelError, match=r"generation_config\.json.*eos_token_id"):
        ModelConfig.from_directory(model)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "[" * 5000, "\xff"])
def test_a_weight_index_that_is_none(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"index\.json"), Weights(model):
        pass


@FUZZ
@given(data=st.data(), wrong=WRONG)
def test_any_value_of_the_configuration(model: Path, source: Path, data: st.DataObject, wrong: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    document = copy.deepcopy(config)
    document[data.draw(st.sampled_from(sorted(config)))] = wrong
    (model / "config.json").write_text(json.dumps(document))
    works(lambda: ModelConfig.from_directory(model), str(model))


@FUZZ
@given(data=st.data())
def test_any_tokenizer_file(model: Path, source: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    raw = bytearray((source / name).read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "type", "key"]))
    if kind == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        document = json.loads(raw)
        if kind == "key":
            document[data.draw(st.sampled_from(sorted(document)))] = data.draw(WRONG)
        raw = bytearray(json.dumps(document if kind == "key" else data.draw(WRONG)).encode())
    (model / name).write_bytes(raw)
    works(lambda: Tokenizer(model), str(model))
    shutil.copy(source / name, model / name)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A llama of one layer, with a vocabulary of words."""
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = GGUFWriter(path, "llama")
    tokens = ["t", "1", "t1", *(f"w{i}" for i in range(13))]
    for name, value in (("embedding_length", 8), ("feed_forward_length", 8), ("block_count", 1), ("context_length", 32),
                        ("attention.head_count", 2), ("attention.head_count_kv", 2)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_array("tokenizer.ggml.merges", ["t 1"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    for name, shape in {
        "token_embd.weight": (16, 8), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,), "blk.0.ffn_norm.weight": (8,),
        **{f"blk.0.{part}.weight": (8, 8) for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")},
    }.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def converted(folder: Path, raw: bytes) -> bool:
    path, out = folder / "damaged.gguf", folder / "out"
    path.write_bytes(raw)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return works(lambda: gguf.convert(path, out), "damaged.gguf")


def test_gguf_strings_that_are_not_utf8(tmp_path: Path, gguf_file: bytes) -> None:
    assert converted(tmp_path, gguf_file)
    assert not converted(tmp_path, gguf_file.replace(b"w7", b"\xff\xfe"))
    assert not converted(tmp_path, gguf_file.replace(b"gpt2", b"gp\xff2"))


@FUZZ
@given(data=st.data())
def test_any_gguf_header(tmp_path: Path, gguf_file: bytes, data: st.DataObject) -> None:
    raw = bytearray(gguf_file)
    header = gguf_file.index(b"blk.0.ffn_down.weight") + 64
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, min(len(raw), header) - 1))] ^= data.draw(st.integers(1, 255))
    converted(tmp_path, bytes(raw))
