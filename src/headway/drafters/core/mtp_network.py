"""Multi-token prediction modules that are published with, or beside, their targets.

One module: embedding and hidden state are normed and projected together, one decoder layer, a final norm, the output layer. It reads
the normed output of the module before it, the first one that of the target (arXiv:2412.19437, section 2.2). Draft j comes from module
j % (number of modules), as in vLLM and SGLang: a single one is chained over its own output. Layouts read, told apart by their names:

- Qwen's: `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.layers.N`, `mtp.norm` (norms and projection are shared);
- the speculators package's: `mtp_layers.N.{input_proj, token_layernorm, hidden_layernorm, final_layernorm}` beside the layer;
- MiMo's: the same names under `model.`, the hidden state first in the projection;
- DeepSeek-V3's: `model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm, shared_head.head}` beside layer N, counted on from the target's.

The layer itself must be a dense Llama-like one, or have a mixture of experts like the target's (GLM-4.5); what else there is, such as
latent attention, is named in the error.

What is handed on is normed in every layout, as in transformers (`MtpLayer`, `post_norm`) and SGLang. For DeepSeek's, vLLM did otherwise
until `deepseek_mtp.py` of 0.31.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headway.drafters.core.checkpoint import Checkpoint, decoder_shape
from headway.drafters.core.feature_network import Builder, FeatureFile, FeatureNetwork
from headway.drafters.core.wiring import Wiring
from headway.errors import ModelError
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.traits import Traits

logger = logging.getLogger("headway.mtp")


@dataclass(frozen=True)
class Layout:
    """Names of one published layout; `{i}` is the module's number in the file, names without it are shared by all modules."""

    name: str
    probe: str                       # a tensor that only this layout has
    layer: str
    project: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    hidden_first: bool = False       # in the projection's input
    mask_first: bool = False         # position 0 reads no token


LAYOUTS = (
    Layout("Qwen", "mtp.fc.weight", "mtp.layers.{i}", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    Layout(
        "MiMo", "model.mtp_layers.0.input_proj.weight", "model.mtp_layers.{i}", "model.mtp_layers.{i}.input_proj",
        "model.mtp_layers.{i}.token_layernorm", "model.mtp_layers.{i}.hidden_layernorm", "model.mtp_layers.{i}.final_layernorm",
        hidden_first=True, mask_first=True,
    ),
    Layout(
        "speculators", "mtp_layers.0.input_proj.weight", "mtp_layers.{i}", "mtp_layers.{i}.input_proj",
        "mtp_layers.{i}.token_layernorm", "mtp_layers.{i}.hidden_layernorm", "mtp_layers.{i}.final_layernorm",
    ),
    Layout(
        "DeepSeek", "model.layers.{i}.eh_proj.weight", "model.layers.{i}", "model.layers.{i}.eh_proj", "model.layers.{i}.enorm",
        "model.layers.{i}.hnorm", "model.layers.{i}.shared_head.norm", mask_first=True,
    ),
)

MIXTURE = "a mixture of experts"
UNSUPPORTED = {
    "mlp.experts": MIXTURE,
    "mlp.gate.weight": MIXTURE,
    "self_attn.kv_a_proj": "latent attention",
    "linear_attn": "linear attention",
}


class MTPFile(FeatureFile):
    """A checkpoint that holds a module, alone or with the whole target. Raises ModelError naming what does not fit."""

    hidden_layers = (-1,)

    def __init__(self, directory: Path, target: ModelConfig) -> None:
        self.checkpoint = checkpoint = Checkpoint(directory)
        checkpoint.check_type("mtp", "mtp reads: mtp, and modules that come with their target")
        whole = checkpoint.config
        config: Mapping[str, Any] = whole.get("transformer_layer_config") or whole.get("text_config") or whole
        for layout in LAYOUTS:
            self.first = target.num_layers if layout.name == "DeepSeek" else 0
            if layout.probe.format(i=self.first) in checkpoint:
                self.layout = layout
                break
        else:
            wanted = ", ".join(layout.probe.format(i=target.num_layers) for layout in LAYOUTS)
            raise ModelError(f"{directory} has no multi-token prediction module this reader knows; looked for {wanted}")
        self.num_modules = self._count(whole, config)
        self.shape = decoder_shape(checkpoint, config, target, 1)
        if self.shape.hidden_size != target.hidden_size:
            sizes = f"made for a target of hidden size {self.shape.hidden_size}, the target's is {target.hidden_size}"
            raise ModelError(f"{directory}: {sizes}")
        experts = target.features.experts
        if experts is not None and not experts.stacked and self._has(f"{experts.block}.experts.0."):
            self.shape = replace(self.shape, features=Traits(experts=experts))
        for part, what in UNSUPPORTED.items():
            if self._has(part) and not (what == MIXTURE and self.shape.features.experts):
                raise ModelError(
                    f"{directory}: the module's layer has {what}, which is not supported. Supported: dense Llama-like layers, and mixtures "
                    "of experts like the target's"
                )

    def _has(self, part: str) -> bool:
        """Whether a module's layer has a tensor whose name begins so."""
        starts = tuple(f"{self.layout.layer.format(i=i)}.{part}" for i in self._numbers)
        return any(name.startswith(starts) for name in self.checkpoint.names)

    def _count(self, *configs: Mapping[str, Any]) -> int:
        """How many modules there are. The weights decide; a configuration that names more than there are is an error."""
        names = self.checkpoint.names
        layers = (f"{self.layout.layer.format(i=i)}." for i in itertools.count(self.first))
        there = sum(1 for _ in itertools.takewhile(lambda layer: any(name.startswith(layer) for name in names), layers))
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        named = next((self.checkpoint.number(key, config) for config in configs for key in keys if config.get(key)), there)
        if named > there:
            raise ModelError(f"{self.checkpoint.directory}: config.json names {named} modules, the weights have {there}")
        if named < there:
            logger.warning("%s: config.json names %d modules, the weights have %d: all are used", self.checkpoint.directory, named, there)
        return there

    @property
    def _numbers(self) -> range:
        return range(self.first, self.first + self.num_modules)

    @property
    def num_elements(self) -> int:
        """Of the modules; the directory may hold the whole target beside them."""
        layout = self.layout
        patterns = (layout.layer, layout.project, layout.token_norm, layout.hidden_norm, layout.final_norm)
        modules = [tuple({f"{pattern.format(i=i)}." for pattern in patterns}) for i in self._numbers]
        return sum(self.checkpoint.num_elements(parts) for parts in modules)

    def load(self, target: Decoder) -> FeatureNetwork:
        """The first module."""
        return self._module(target, self.first)

    def load_further(self, target: Decoder) -> list[FeatureNetwork]:
        return [self._module(target, number) for number in self._numbers[1:]]

    @torch.inference_mode()
    def _module(self, target: Decoder, number: int) -> FeatureNetwork:
        shape, layout = self.shape, self.layout
        build = Builder(self.checkpoint, shape, target.dtype, target.device)

        def name(pattern: str) -> str:
            return pattern.format(i=number)

        layer, head = build.layer(name(layout.layer)), name("model.layers.{i}.shared_head.head.weight")
        own_head = layout.name == "DeepSeek" and head in self.checkpoint
        lm_head = build.linear(head.removesuffix(".weight"), {"": shape.vocab_size}, shape.hidden_size) if own_head else target.lm_head
        wiring = Wiring(
            token_norm=build.norm(name(layout.token_norm)), feature_norm=build.norm(name(layout.hidden_norm)),
            project=build.linear(name(layout.project), {"": shape.hidden_size}, 2 * shape.hidden_size),
            final_norm=build.norm(name(layout.final_norm)), feature_first=layout.hidden_first, mask_first=layout.mask_first,
            norm_output=True,
        )
        return FeatureNetwork(shape, self.hidden_layers, target.embedding, [layer], lm_head, None, wiring)
