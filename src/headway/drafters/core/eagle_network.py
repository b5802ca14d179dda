"""EAGLE-1 and EAGLE-3 heads, from the checkpoints that are published.

Layouts read, told apart by their names:

- speculators (config.json with `speculators_model_type: eagle3`): `fc`, `layers.N`, `norm`, `lm_head`, `d2t`, `t2d`, and where the
  configuration says so `input_norm` (`norm_before_fc`) or `fc_norm.N`;
- the EAGLE repository's EAGLE-3: the same with `midlayer` for `layers.0`;
- the EAGLE repository's EAGLE-1: `fc` (2 * hidden -> hidden, often with a bias) and `layers.N`, no norms before or after; reads the
  target's last hidden state and ends in the target's own output layer.

EAGLE-1: arXiv:2401.15077. EAGLE-3: arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.drafters.core.checkpoint import Checkpoint, decoder_shape
from headway.drafters.core.feature_network import Builder, FeatureFile, FeatureNetwork
from headway.drafters.core.wiring import Wiring
from headway.errors import ModelError
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.layers import Linear


class EagleFile(FeatureFile):
    """A checkpoint, read as far as its configuration. Raises ModelError naming what is missing, misshapen, or made for another target."""

    def __init__(self, directory: Path, target: ModelConfig) -> None:
        self.checkpoint = Checkpoint(directory, prefixes=("model.",))
        config = self.checkpoint.config
        self.checkpoint.check_type("eagle3", "eagle reads: eagle3, and the EAGLE repository's layouts")
        of_version_3 = ("midlayer.self_attn.q_proj.weight", "d2t")
        self.version_3 = config.get("speculators_model_type") is not None or any(name in self.checkpoint for name in of_version_3)
        layers = config.get("transformer_layer_config", config) if self.version_3 else config
        if not isinstance(layers, Mapping):
            raise ModelError(f"{directory / 'config.json'}: transformer_layer_config must be an object")
        self.layer_config = layers
        self.shape = decoder_shape(self.checkpoint, layers, target, self.checkpoint.number("num_hidden_layers", layers, 1))
        made_for = (config.get("target_hidden_size") if self.version_3 else None) or self.shape.hidden_size
        if made_for != target.hidden_size:
            raise ModelError(f"{directory}: made for a target of hidden size {made_for}, the target's is {target.hidden_size}")
        self.hidden_layers = _hidden_layers(self.checkpoint, config, target.num_layers) if self.version_3 else (-1,)

    @torch.inference_mode()
    def load(self, target: Decoder) -> FeatureNetwork:
        network = _eagle3(self, target) if self.version_3 else _eagle1(self, target)
        unused = ("lm_head.weight", "t2d", "hidden_norm.weight", "verifier_norm.weight", "verifier_lm_head.weight")
        self.checkpoint.finish(ignored=unused)
        return network


def load_eagle(directory: Path, target: Decoder) -> FeatureNetwork:
    return EagleFile(directory, target.config).load(target)


def _eagle3(file: EagleFile, target: Decoder) -> FeatureNetwork:
    """Reads low, middle and high hidden states; its first layer attends over [embedding, feature]."""
    checkpoint, shape, layer_ids = file.checkpoint, file.shape, file.hidden_layers
    config, layer_config, num_layers = checkpoint.config, file.layer_config, shape.num_layers
    hidden, target_hidden = shape.hidden_size, target.config.hidden_size
    build = Builder(checkpoint, shape, target.dtype, target.device)
    first = "midlayer" if "midlayer.self_attn.q_proj.weight" in checkpoint else "layers.0"
    layers = [build.layer(first, size_in=2 * hidden, window=_window(layer_config, 0))]
    layers += [build.layer(f"layers.{index}", window=_window(layer_config, index)) for index in range(1, num_layers)]
    hidden_norm = build.norm(f"{first}.hidden_norm")
    both = len(layer_ids) * target_hidden
    target_ids = _target_ids(checkpoint, config, shape.vocab_size)
    vocab = shape.vocab_size if target_ids is None else len(target_ids)
    norms = [build.norm(f"fc_norm.{i}", target_hidden) for i in range(len(layer_ids))] if config.get("fc_norm") else []
    wiring = Wiring(
        hidden_norms=tuple(norms), wide_norm=build.norm("input_norm", both) if config.get("norm_before_fc") else None,
        fuse=build.linear("fc", {"": hidden}, both),
        token_norm=layers[0].input_norm, feature_norm=hidden_norm, final_norm=build.norm("norm"),
        normed_residual=bool(config.get("norm_before_residual", False)),
        norm_output=bool(config.get("norm_output", False)),   # EAGLE 3.1
    )
    return FeatureNetwork(
        shape, layer_ids, build.embedding("embed_tokens.weight", target.embedding), layers, _lm_head(build, target, vocab),
        None if target_ids is None else target_ids.to(target.device), wiring,
    )


def _eagle1(file: EagleFile, target: Decoder) -> FeatureNetwork:
    """Continues the target's last hidden state itself, so the target's output layer reads it."""
    checkpoint, shape = file.checkpoint, file.shape
    hidden = shape.hidden_size
    build = Builder(checkpoint, shape, target.dtype, target.device)
    layers = [build.layer(f"layers.{i}", input_norm=i > 0) for i in range(shape.num_layers)]
    fc = build.linear("fc", {"": hidden}, 2 * hidden, bias="fc.bias" in checkpoint)
    embedding = build.embedding("embed_tokens.weight", target.embedding)
    return FeatureNetwork(shape, (-1,), embedding, layers, target.lm_head, None, Wiring(project=fc, direct=True))


def _lm_head(build: Builder, target: Decoder, vocab: int) -> Linear:
    hidden = build.shape.hidden_size
    if "lm_head.weight" in build.checkpoint:
        return build.linear("lm_head", {"": vocab}, hidden)
    if vocab != target.config.vocab_size or hidden != target.config.hidden_size:
        raise build.error(f"the weights lack lm_head.weight, and the target's output layer does not fit ([{vocab}, {hidden}] is needed)")
    return target.lm_head


def _hidden_layers(checkpoint: Checkpoint, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Published ids count what has been computed: id i is the output of layer i - 1, so `num_layers` is the last layer's."""
    nested = config.get("eagle_config")
    given = config.get("eagle_aux_hidden_state_layer_ids") or (nested or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = [2, num_layers // 2, num_layers - 3] if given is None else given
    where = checkpoint.directory / "config.json"
    if given is None and num_layers < 6:
        raise ModelError(f"{where}: eagle_aux_hidden_state_layer_ids must be given for a target of {num_layers} layers")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 1 <= i <= num_layers for i in ids):
        raise ModelError(f"{where}: eagle_aux_hidden_state_layer_ids must be a list of layers 1..{num_layers} of the target, got {ids!r}")
    return tuple(i - 1 for i in sorted(set(ids)))


def _target_ids(checkpoint: Checkpoint, config: Mapping[str, Any], vocab: int) -> Tensor | None:
    """d2t holds offsets: draft token i is the target's token i + d2t[i]."""
    size = checkpoint.number("draft_vocab_size", config, checkpoint.shape("d2t")[0] if "d2t" in checkpoint else vocab)
    if size > vocab:
        raise ModelError(f"{checkpoint.directory}: the draft vocabulary has {size} tokens, the target's {vocab}")
    if "d2t" not in checkpoint:
        if size != vocab:
            raise ModelError(f"{checkpoint.directory}: the weights lack d2t, which maps {size} draft tokens to the target's {vocab}")
        return None
    ids = checkpoint.take("d2t", (size,), "int").to(torch.int64) + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != size:
        raise ModelError(f"{checkpoint.directory}: d2t does not map to distinct tokens of the target's vocabulary of {vocab}")
    if "t2d" in checkpoint:
        known = checkpoint.take("t2d", (vocab,), "bool")
        if int(known.sum()) != size or not bool(known[ids].all()):
            raise ModelError(f"{checkpoint.directory}: t2d and d2t do not describe the same draft vocabulary")
    return None if size == vocab and bool((ids == torch.arange(size)).all()) else ids


def _window(config: Mapping[str, Any], index: int) -> int | None:
    kinds = config.get("layer_types") or []
    sliding = index < len(kinds) and kinds[index] == "sliding_attention"
    return config.get("sliding_window") if sliding else None

