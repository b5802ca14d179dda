"""What a drafter adds to its target: a network with weights, K/V and passes of its own, or nothing but lookups.

    draft_model         any network; one pass per draft token
    eagle, eagle3, mtp  a layer on the target's hidden states; one pass per draft token
    medusa              heads on the target's last hidden state, one per draft token, in one pass
    ngram, suffix       looks the text up; nothing on the device
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.errors import ConfigError, ModelError, unknown_key
from headway.json_object import JsonObject
from headway.plan.families import attention_parts, heads, mlp_part
from headway.plan.network import KVShape, LayerShape, NetworkShape, Part, table

METHODS = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "ngram", "suffix")
LOOKUPS = ("ngram", "suffix")
# Heads published for Llama 3 and Qwen 3 predict the 32,000 most frequent tokens; what is assumed where no head is named.
EAGLE3_VOCABULARY = 32_000
NUM_FEATURES = 3        # hidden states of the target that EAGLE-3 reads where its configuration does not list them


@dataclass(frozen=True, slots=True)
class Drafting:
    """network: None for lookups. num_passes_for: passes of the network for k draft tokens. model: as the user named it."""

    method: str
    network: NetworkShape | None = None
    model: str | None = None

    def num_passes(self, k: int) -> int:
        if self.network is None or k == 0:
            return 0
        return 1 if self.method == "medusa" else k


def method_of(raw: JsonObject) -> str:
    """What kind of drafter a config.json is of, by its own words."""
    words = " ".join([raw.text("speculators_model_type", ""), *raw.list_of(str, "architectures", [])]).lower()
    found = next((kind for kind in ("eagle3", "eagle", "medusa") if kind in words), None)
    return found or ("medusa" if raw.has("medusa_num_heads") else "draft_model")


def build(method: str, target: NetworkShape, raw: JsonObject | None, model: str | None, draft: NetworkShape | None, k: int) -> Drafting:
    """The drafter of this method for this target.

    raw, draft  the config.json of its network and, for draft_model, the network; None: a head of the target's own shape is assumed
    Raises ConfigError for a method that cannot draft here.
    """
    if method not in METHODS:
        raise ConfigError(unknown_key("method", method, METHODS))
    if method in LOOKUPS:
        if model is not None:
            raise ConfigError(f"{method} drafts without a network: leave --draft out")
        return Drafting(method)
    if method == "draft_model":
        if draft is None:
            raise ConfigError("draft_model needs a network: --draft names it")
        if abs(draft.vocab_size - target.vocab_size) > _padding(target):
            sizes = f"the draft's vocabulary has {draft.vocab_size} tokens, the target's {target.vocab_size}"
            raise ConfigError(f"{sizes}: they must be the same")
        return Drafting(method, draft, model)
    if method == "mtp":
        return Drafting(method, _mtp(target), model)
    if method == "medusa":
        return Drafting(method, _medusa(target, raw, k), model)
    return Drafting(method, _eagle(target, raw, method), model)


def _padding(target: NetworkShape) -> int:
    """Output layers of one family are padded to different round sizes."""
    return target.vocab_size // 100


def _shared(target: NetworkShape) -> tuple[Part, ...]:
    """The target's own tables; the last is the one that logits are made with."""
    return tuple(part for part in (target.embedding, target.head) if part is not None)


def _mtp(target: NetworkShape) -> NetworkShape:
    if not target.mtp:
        raise ConfigError(f"{target.name} has no layers for multi-token prediction (num_nextn_predict_layers)")
    name = f"{target.name}'s MTP layer"
    return replace(target, name=name, layers=target.mtp, embedding=None, head=None, beside=(), shares=_shared(target), mtp=(), notes=())


def _medusa(target: NetworkShape, raw: JsonObject | None, k: int) -> NetworkShape:
    """Per head one residual layer and an output layer of its own."""
    hidden, num_layers, num_heads, vocab = target.hidden_size, 1, k, target.vocab_size
    if raw is not None:
        num_heads = raw.integer("medusa_num_heads", raw.integer("num_heads", k, least=1), least=1)
        num_layers = raw.integer("medusa_num_layers", raw.integer("num_hidden_layers", 1, least=0), least=0)
        vocab = raw.integer("truncated_vocab_size", vocab, least=1)
    residual = Part(num_heads * num_layers * hidden * (hidden + 1), max_split=1)
    return replace(
        target, name="Medusa heads", layers=(), embedding=None, head=table(num_heads * vocab, hidden), beside=(residual,), mtp=(),
        quantization=None, notes=(),
    )  # fmt: skip


def _eagle(target: NetworkShape, raw: JsonObject | None, method: str) -> NetworkShape:
    """A fusion of the target's hidden states with the embedding, one Llama layer, and for EAGLE-3 an output layer of fewer tokens."""
    if raw is None:
        return _assumed_eagle(target, method)
    shape = raw.child("transformer_layer_config") if raw.has("transformer_layer_config") else raw
    hidden, width = shape.integer("hidden_size", least=1), shape.integer("intermediate_size", least=1)
    attends = heads(shape)
    num_layers = shape.integer("num_hidden_layers", 1, least=1)
    their_hidden = raw.integer("target_hidden_size", target.hidden_size, least=1)
    if their_hidden != target.hidden_size:
        raise ModelError(f"{raw.where}: the head is for a target of hidden size {their_hidden}, {target.name} has {target.hidden_size}")
    vocab = raw.integer("draft_vocab_size", target.vocab_size, least=1)
    key = "eagle_aux_hidden_state_layer_ids"
    num_features = len(raw.list_of(int, key, raw.child("eagle_config").list_of(int, key, []))) or NUM_FEATURES
    normed = num_features if raw.flag("fc_norm", False) else 0
    return _eagle_network(target, method, hidden, width, attends, num_layers, vocab, num_features, normed)


def _assumed_eagle(target: NetworkShape, method: str) -> NetworkShape:
    """Heads are published with the target's own width: a Llama layer, and heads of 128 values in groups of four."""
    hidden = target.hidden_size
    num_heads = max(1, hidden // 128)
    attends = (num_heads, max(1, num_heads // 4), hidden // num_heads)
    width = int(3.5 * hidden)
    found = _eagle_network(target, method, hidden, width, attends, 1, min(EAGLE3_VOCABULARY, target.vocab_size), NUM_FEATURES, 0)
    return replace(found, notes=(f"no head is named: {method} with one layer, {hidden} wide, is assumed (--draft names one)",))


def _eagle_network(
    target: NetworkShape, method: str, hidden: int, width: int, attends: tuple[int, int, int], num_layers: int, vocab: int,
    num_features: int, normed: int,
) -> NetworkShape:
    """EAGLE's first layer has no norm in front of attention, EAGLE-3's has two, for embedding and features; the fusion of the one has a
    bias, behind the layers of the other stands a norm."""
    num_heads, num_kv_heads, head_dim = attends
    third = method == "eagle3"
    inputs = 2 * hidden if third else hidden
    features = num_features * target.hidden_size if third else target.hidden_size + hidden
    num_norms = [(3 if third else 1) if i == 0 else 2 for i in range(num_layers)]
    kv = KVShape(num_kv_heads, 2 * head_dim, 2 * num_heads * head_dim)
    layers = tuple(
        LayerShape(
            (*attention_parts(inputs if i == 0 else hidden, hidden, num_heads, num_kv_heads, head_dim), mlp_part(hidden, width),
             Part(norms * hidden, max_split=1, is_linear=False)), kv, 3 * width,
        )
        for i, norms in enumerate(num_norms)
    )  # fmt: skip
    fusion = [Part(features * hidden, max_split=1), Part(hidden + normed * target.hidden_size, max_split=1, is_linear=False)]
    head = table(vocab, hidden) if third else None
    shares = _shared(target)[:1] if third else _shared(target)
    return NetworkShape(
        name=f"{method} head", model_type=method, hidden_size=hidden, vocab_size=vocab, num_heads=num_heads,
        max_position=target.max_position, bytes_per_value=target.bytes_per_value, layers=layers, embedding=None, head=head,
        beside=tuple(fusion), shares=shares,
    )  # fmt: skip
