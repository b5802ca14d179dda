"""config.json -> the shape of the network: which matrices the layers of each `model_type` have.

Only the configuration is read, no weights and no code of a model's repository; transformers is not needed. The counts are those of
transformers' own modules, parameter for parameter (tests/unit/test_plan_network.py compares them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import ModelError, unknown_key
from headway.json_object import JsonObject
from headway.plan.network import KVShape, LayerShape, NetworkShape, Part, table
from headway.plan.quantization import of_config

MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a `model_type` apart from Llama.

    qkv_bias, o_bias    whether the projections have a bias; None: `attention_bias` of the configuration says so, else default_bias
    qk_norm             "head": one norm per head for queries and one for keys; "all": one over all of them; "": none
    num_norms           of a layer, beside those of queries and keys
    sinks               one learned logit per head
    """

    tied: bool = False
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    default_bias: bool = False
    qk_norm: str = ""
    num_norms: int = 2
    sinks: bool = False
    head_dim: int | None = None
    windows: Callable[[JsonObject, int], list[int | None]] | None = None
    experts: Callable[[JsonObject, int], list[ExpertShape | None]] | None = None


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts of a layer, and what every token passes beside them. width: values between the halves of one expert's MLP."""

    num: int
    per_token: int
    width: int
    shared_width: int = 0
    gated_shared: bool = False      # the shared expert's output is weighed by a gate of its own
    bias: bool = False


# -- windows and experts, by how configurations spell them --------------------------------------------------------------


def _window_everywhere(raw: JsonObject, num_layers: int) -> list[int | None]:
    window = raw.integer("sliding_window", 1, least=1) if raw.has("sliding_window") else None
    return [window] * num_layers


def _windows_by_type(every: int) -> Callable[[JsonObject, int], list[int | None]]:
    """`layer_types`, or a window on all but each `every`-th layer where an older configuration does not list them."""

    def windows(raw: JsonObject, num_layers: int) -> list[int | None]:
        if not raw.has("sliding_window"):
            return [None] * num_layers
        window = raw.integer("sliding_window", least=1)
        pattern = raw.integer("sliding_window_pattern", every, least=1)
        default = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]
        return [window if kind == "sliding_attention" else None for kind in raw.list_of(str, "layer_types", default)]

    return windows


def _windows_of_qwen(raw: JsonObject, num_layers: int) -> list[int | None]:
    if not raw.flag("use_sliding_window", False) or not raw.has("sliding_window"):
        return [None] * num_layers
    window, first = raw.integer("sliding_window", least=1), raw.integer("max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in raw.list_of(str, "layer_types", default)]


def _mixtral(raw: JsonObject, num_layers: int) -> list[ExpertShape | None]:
    found = ExpertShape(raw.integer("num_local_experts", 8, least=1), raw.integer("num_experts_per_tok", 2, least=1),
                    raw.integer("intermediate_size", least=1))
    return [found] * num_layers


def _gpt_oss(raw: JsonObject, num_layers: int) -> list[ExpertShape | None]:
    found = ExpertShape(raw.integer("num_local_experts", 128, least=1), raw.integer("num_experts_per_tok", 4, least=1),
                    raw.integer("intermediate_size", least=1), bias=True)
    return [found] * num_layers


def _olmoe(raw: JsonObject, num_layers: int) -> list[ExpertShape | None]:
    found = ExpertShape(raw.integer("num_experts", 64, least=1), raw.integer("num_experts_per_tok", 8, least=1),
                    raw.integer("intermediate_size", least=1))
    return [found] * num_layers


def _qwen_moe(raw: JsonObject, num_layers: int) -> list[ExpertShape | None]:
    shared = raw.integer("shared_expert_intermediate_size", 0)
    found = ExpertShape(raw.integer("num_experts", least=0), raw.integer("num_experts_per_tok", least=1),
                    raw.integer("moe_intermediate_size", least=1), shared, shared > 0)
    dense, step = set(raw.list_of(int, "mlp_only_layers", [])), raw.integer("decoder_sparse_step", 1, least=1)
    return [found if found.num and i not in dense and (i + 1) % step == 0 else None for i in range(num_layers)]


def _deepseek(raw: JsonObject, num_layers: int) -> list[ExpertShape | None]:
    if not raw.has("n_routed_experts"):
        return [None] * num_layers
    width = raw.integer("moe_intermediate_size", least=1)
    found = ExpertShape(raw.integer("n_routed_experts", least=1), raw.integer("num_experts_per_tok", least=1), width,
                    raw.integer("n_shared_experts", 0) * width)
    first, step = raw.integer("first_k_dense_replace", 0), raw.integer("moe_layer_freq", 1, least=1)
    return [found if i >= first and i % step == 0 else None for i in range(num_layers)]


_QWEN2 = Family(qkv_bias=True, windows=_windows_of_qwen)
_QWEN3 = Family(qkv_bias=None, o_bias=None, qk_norm="head", windows=_windows_of_qwen)
_DEEPSEEK = Family(qkv_bias=None, o_bias=None, experts=_deepseek)
_GEMMA2 = Family(tied=True, qkv_bias=None, o_bias=None, num_norms=4, head_dim=256, windows=_windows_by_type(2))
_GEMMA3 = Family(tied=True, qkv_bias=None, o_bias=None, qk_norm="head", num_norms=4, head_dim=256, windows=_windows_by_type(6))
FAMILIES = {
    "llama": Family(qkv_bias=None, o_bias=None),
    "mistral": Family(windows=_window_everywhere),
    "mixtral": Family(windows=_window_everywhere, experts=_mixtral),
    "qwen2": _QWEN2,
    "mimo": _QWEN2,
    "qwen2_moe": Family(qkv_bias=True, windows=_windows_of_qwen, experts=_qwen_moe),
    "qwen3": _QWEN3,
    "qwen3_moe": Family(qkv_bias=None, o_bias=None, qk_norm="head", windows=_windows_of_qwen, experts=_qwen_moe),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi3": Family(windows=_window_everywhere),
    "olmo2": Family(qkv_bias=None, o_bias=None, qk_norm="all"),
    "olmoe": Family(qkv_bias=None, o_bias=None, qk_norm="all", experts=_olmoe),
    "granite": Family(qkv_bias=None, o_bias=None),
    "smollm3": Family(tied=True, qkv_bias=None, o_bias=None),
    "glm4": Family(qkv_bias=None, default_bias=True, num_norms=4, head_dim=128),
    "glm4_moe": Family(qkv_bias=None, experts=_deepseek),
    "gpt_oss": Family(qkv_bias=True, o_bias=True, sinks=True, head_dim=64, windows=_windows_by_type(2), experts=_gpt_oss),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def read(raw: JsonObject, name: str, dtype: str = "auto") -> NetworkShape:
    """The network that a config.json describes. dtype: "auto" is what it says, 16 bits where it says float32 (servers' default).

    Raises ModelError for a `model_type` that is not known, and for a key that is missing or cannot be.
    """
    outer, model_type = raw, raw.text("model_type", "")
    if model_type not in FAMILIES:
        raise ModelError(f"{raw.where}: " + unknown_key("model_type", model_type, FAMILIES))
    notes: tuple[str, ...] = ()
    if raw.has("text_config"):
        notes = (f"{name} has more than text to it: only the text network is counted",)
        raw = raw.child("text_config")
    family = FAMILIES[model_type]
    hidden, num_layers = raw.integer("hidden_size", least=1, most=MOST), raw.integer("num_hidden_layers", least=1, most=10_000)
    vocab = raw.integer("vocab_size", least=1, most=MOST)
    windows = family.windows(raw, num_layers) if family.windows else [None] * num_layers
    experts = family.experts(raw, num_layers) if family.experts else [None] * num_layers
    if len(windows) != num_layers:
        raise raw.wrong("layer_types", f"a list of {num_layers} entries, one per layer")
    attention = _latent_attention if raw.has("kv_lora_rank") else _attention
    layers = tuple(_layer(raw, family, attention, *each) for each in zip(windows, experts, strict=True))
    tied = raw.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", family.tied))
    num_mtp = raw.integer("num_nextn_predict_layers", 0, most=64)
    mtp = tuple(_mtp_layer(layers[-1], hidden) for _ in range(num_mtp))
    return NetworkShape(
        name=name, model_type=model_type, hidden_size=hidden, vocab_size=vocab,
        num_heads=raw.integer("num_attention_heads", least=1), max_position=raw.integer("max_position_embeddings", 1 << 20, least=1),
        bytes_per_value=_bytes_per_value(raw, outer, dtype), layers=layers, embedding=table(vocab, hidden),
        head=None if tied else table(vocab, hidden), beside=(_norm(hidden),), quantization=of_config(outer), mtp=mtp, notes=notes,
    )  # fmt: skip


def _bytes_per_value(raw: JsonObject, outer: JsonObject, dtype: str) -> float:
    if dtype != "auto":
        return BYTES[dtype]
    said = next((each.text(key, "") for each in (raw, outer) for key in ("dtype", "torch_dtype") if each.has(key)), "bfloat16")
    return 2.0 if said == "float32" else BYTES.get(said, 2.0)


def _layer(raw: JsonObject, family: Family, attention: _Attention, window: int | None, experts: ExpertShape | None) -> LayerShape:
    hidden = raw.integer("hidden_size", least=1)
    parts, kv = attention(raw, family, window)
    norms = [_norm(hidden * family.num_norms)]
    if experts is None:
        width = raw.integer("intermediate_size", least=1, most=MOST)
        mlp, mlp_width = _mlp(hidden, width, raw.flag("mlp_bias", False)), 3 * width
    else:
        mlp, mlp_width = _expert_parts(hidden, experts), 3 * (experts.width * experts.per_token + experts.shared_width)
    return LayerShape((*parts, *mlp, *norms), kv, mlp_width)


_Attention = Callable[[JsonObject, Family, "int | None"], "tuple[list[Part], KVShape]"]


def heads(raw: JsonObject, default_head_dim: int | None = None) -> tuple[int, int, int]:
    """(query heads, K/V heads, size of a head). Raises the object's error when they do not go together."""
    num_heads = raw.integer("num_attention_heads", least=1, most=MOST)
    num_kv_heads = raw.integer("num_key_value_heads", num_heads, least=1, most=MOST)
    if num_heads % num_kv_heads:
        raise raw.wrong("num_key_value_heads", f"a divisor of the {num_heads} attention heads")
    hidden = raw.integer("hidden_size", least=1, most=MOST)
    head_dim = raw.integer("head_dim", default_head_dim or max(1, hidden // num_heads), least=1, most=MOST)
    return num_heads, num_kv_heads, head_dim


def _attention(raw: JsonObject, family: Family, window: int | None) -> tuple[list[Part], KVShape]:
    hidden = raw.integer("hidden_size", least=1)
    num_heads, num_kv_heads, head_dim = heads(raw, family.head_dim)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    said = raw.flag("attention_bias", family.default_bias)
    qkv_bias, o_bias = (said if given is None else given for given in (family.qkv_bias, family.o_bias))
    parts = attention_parts(hidden, hidden, num_heads, num_kv_heads, head_dim, qkv_bias, o_bias)
    if family.qk_norm == "head" or raw.flag("use_qk_norm", False):
        parts.append(_norm(2 * head_dim))
    elif family.qk_norm == "all":
        parts.append(_norm(q_size + kv_size))
    if family.sinks:
        parts.append(_norm(num_heads))
    return parts, KVShape(num_kv_heads, 2 * head_dim, 2 * q_size, window)


def attention_parts(
    inputs: int, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, qkv_bias: bool = False, o_bias: bool = False
) -> list[Part]:
    """Queries, keys and values from `inputs` values per token, and the projection back to `hidden`."""
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    return [
        Part(q_size * (inputs + qkv_bias), is_attention=True),
        Part(2 * kv_size * (inputs + qkv_bias), max_split=num_kv_heads, is_attention=True),
        Part(q_size * hidden, is_attention=True),
        *([_norm(hidden)] if o_bias else ()),
    ]


def _latent_attention(raw: JsonObject, family: Family, window: int | None) -> tuple[list[Part], KVShape]:
    """DeepSeek's MLA: one compressed vector and one rotated key per token serve all heads, so every device keeps all of it."""
    hidden, num_heads = raw.integer("hidden_size", least=1), raw.integer("num_attention_heads", least=1)
    rank, rope = raw.integer("kv_lora_rank", least=1), raw.integer("qk_rope_head_dim", least=1)
    nope, value = raw.integer("qk_nope_head_dim", least=1), raw.integer("v_head_dim", least=1)
    bias = raw.flag("attention_bias", False)
    q_size, q_rank = num_heads * (nope + rope), raw.integer("q_lora_rank", 0)
    queries = [Part(q_rank * (hidden + bias), max_split=1), _norm(q_rank), Part(q_rank * q_size)] if q_rank else [Part(hidden * q_size)]
    parts = [
        *queries, Part((rank + rope) * (hidden + bias), max_split=1), _norm(rank), Part(rank * num_heads * (nope + value)),
        Part(num_heads * value * hidden), *([_norm(hidden)] if bias else ()),
    ]
    return parts, KVShape(1, rank + rope, num_heads * (2 * rank + rope), window)


def _mlp(hidden: int, width: int, bias: bool) -> list[Part]:
    return [Part(3 * hidden * width + 2 * width * bias), *([_norm(hidden)] if bias else ())]


def mlp_part(hidden: int, width: int) -> Part:
    """A gated MLP without biases."""
    return Part(3 * hidden * width)


def _expert_parts(hidden: int, experts: ExpertShape) -> list[Part]:
    each = 3 * hidden * experts.width + (2 * experts.width + hidden) * experts.bias
    parts = [
        Part(experts.num * each, num_experts=experts.num, experts_per_token=experts.per_token),
        _norm(experts.num * (hidden + experts.bias)),   # the router: as little as a norm, and like one on every device
    ]
    if experts.shared_width:
        parts.append(mlp_part(hidden, experts.shared_width))
    if experts.gated_shared:
        parts.append(_norm(hidden))
    return parts


def _mtp_layer(like: LayerShape, hidden: int) -> LayerShape:
    """A layer like the last one behind a projection of [embedding, hidden state], with norms for both and one behind (DeepSeek-V3)."""
    return LayerShape((*like.parts, Part(2 * hidden * hidden, max_split=1), _norm(3 * hidden)), like.kv, like.mlp_width)


def _norm(size: int) -> Part:
    """Vectors that every device has, in the network's own type."""
    return Part(size, max_split=1, is_linear=False)
