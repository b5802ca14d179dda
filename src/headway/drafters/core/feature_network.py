"""What EAGLE heads and multi-token prediction modules have in common: a short decoder that continues the target's features.

Position i holds the pair (token i + 1, feature i): the token is known, the feature is made from the target's hidden states at
position i (`fuse`), or, while drafting, is the network's own output one position before. What differs from kind to kind is data: how
features are made, how the pair enters the layers, and what is read off behind them (`Wiring`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headway import native
from headway.drafters.core.chain import Prediction
from headway.drafters.core.checkpoint import Checkpoint
from headway.drafters.core.feature_native import NativePass
from headway.drafters.core.features import Hidden
from headway.drafters.core.wiring import Wiring
from headway.errors import ModelError
from headway.models.attention import KVCache
from headway.models.attention_native import NativePlan
from headway.models.attention_plan import AttentionPlan
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.experts import Experts
from headway.models.layers import MLP, GatedLinear, Layer, Linear, RMSNorm, Scores
from headway.models.rope import Rope, in_rotated_order, num_rotated, rotated_order
from headway.models.traits import ExpertTraits
from headway.native.ops import can_pack


class FeatureNetwork:
    """For inference only; weights in the target's dtype on its device.

    shape          dimensions of its decoder layers
    hidden_layers  the target's hidden states that `fuse` wants, by the convention of `Decoder.forward`
    target_ids     int64 [draft vocabulary]: the target's token for each of the draft vocabulary; None: they are the same
    """

    def __init__(
        self, shape: ModelConfig, hidden_layers: tuple[int, ...], embedding: Tensor, layers: list[Layer], lm_head: Linear,
        target_ids: Tensor | None, wiring: Wiring,
    ) -> None:
        self.shape = shape
        self.hidden_layers = hidden_layers
        self.embedding = embedding
        self.layers = layers
        self.lm_head = lm_head
        self.target_ids = target_ids
        self.wiring = wiring
        self.dtype, self.device = embedding.dtype, embedding.device
        self.rope = Rope.of(shape, self.device)
        self.native = NativePass.make(self)

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """The target's hidden states, one [n, target hidden] per entry of `hidden_layers` -> features [n, hidden]."""
        wiring = self.wiring
        parts = [norm(part) for norm, part in zip(wiring.hidden_norms, hidden, strict=True)] if wiring.hidden_norms else hidden
        x = torch.cat(tuple(parts), -1)
        x = x if wiring.wide_norm is None else wiring.wide_norm(x)
        return x if wiring.fuse is None else wiring.fuse(x)

    def fuse_parts(self, parts: Sequence[Hidden]) -> Tensor:
        """`fuse` of the hidden states of several sequences, one after the other."""
        return self.fuse([torch.cat(layers) for layers in zip(*parts, strict=True)] if len(parts) > 1 else parts[0])

    def several(self, cache: KVCache) -> bool:
        """Whether `steps` can run more than one pass."""
        return self.native is not None and cache.backend == "native"

    def steps(
        self, token_ids: Sequence[int], positions: Sequence[int], features: Tensor | Sequence[Hidden], plan: AttentionPlan,
        cache: KVCache, picked: Sequence[int], num: int = 1,
    ) -> list[Prediction]:
        """`forward`, then `predict` for the m rows of the pass that predict: in one call of the compiled kernels where they can.
        Instead of features it takes hidden states of the target in parts, for `fuse`.

        Where they can (`several`), they run `num` passes, each further one behind the likeliest tokens of the one before; all predictions
        then have the logits and the state of the last. The plan's rows are then chains of which the last token predicts, with room for
        num - 1 more tokens (`NativePlan`), and their `positions` follow those of the pass, [n + (num - 1) * m].
        """
        if self.native is not None and isinstance(plan, NativePlan):
            plan.begin(torch.tensor(positions), self.rope, self.dtype)
            return self.native(token_ids, features, plan, cache, picked, num)
        features = features if isinstance(features, Tensor) else self.fuse_parts(features)
        read = torch.tensor([token_ids, positions], device=self.device)
        x = self.forward(read[0], read[1], features, plan, cache)
        return [Prediction(*self.predict(x if len(picked) == len(x) else x[list(picked)]))]

    def _enter(self, embeds: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] both -> (input of the first layer's attention, residual [n, hidden])."""
        wiring = self.wiring
        if wiring.mask_first:
            embeds = embeds * (positions > 0).unsqueeze(-1)
        token = embeds if wiring.token_norm is None else wiring.token_norm(embeds)
        feature = features if wiring.feature_norm is None else wiring.feature_norm(features)
        pair = torch.cat([feature, token] if wiring.feature_first else [token, feature], -1)
        if wiring.project is None:
            return pair, feature if wiring.normed_residual else features
        x, norm = wiring.project(pair), self.layers[0].input_norm
        return x if wiring.direct or norm is None else norm(x), x

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output of the last layer [n, hidden] -> (logits [n, draft vocabulary], features for the next position [n, hidden])."""
        normed = x if self.wiring.final_norm is None else self.wiring.final_norm(x)
        return self.lm_head(normed), normed if self.wiring.norm_output else x

    def handed_on(self, x: Tensor) -> Tensor:
        """The features of `predict` alone."""
        return self.wiring.final_norm(x) if self.wiring.norm_output and self.wiring.final_norm is not None else x

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, features: Tensor, plan: AttentionPlan, cache: KVCache, *, fill: bool = False
    ) -> Tensor:
        """One pass; K/V of the rows is written to `cache`. Returns the last layer's output [n, hidden].

        token_ids, positions, features   [n], [n], [n, hidden]: row i is (token after its position, its position, its feature)
        fill    only the K/V is wanted: stops as soon as the last layer's is written and returns the last layer's input. For a network
                of one layer that is one matrix product per row and no attention at all.
        """
        if plan.order is not None:
            token_ids, positions, features = token_ids[plan.order], positions[plan.order], features[plan.order]
        plan.begin(positions, self.rope, self.dtype)
        x, residual = self._enter(F.embedding(token_ids, self.embedding), features, positions)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(x) if index == 0 else layer.project(residual)
            qkv, pages = qkv.view(len(x), -1, self.shape.head_dim), cache.layers[index]
            plan.write(qkv, layer, pages)
            if fill and index == len(self.layers) - 1:
                return residual
            residual = layer.add_attended(residual, plan.attend(qkv, layer, pages))
        return residual if plan.inverse is None else residual[plan.inverse]


class FeatureFile(ABC):
    """A published network, read as far as its configuration: what is needed before the memory is planned."""

    checkpoint: Checkpoint
    shape: ModelConfig
    hidden_layers: tuple[int, ...]
    num_modules = 1

    @property
    def num_elements(self) -> int:
        """Of its weights."""
        return self.checkpoint.num_elements()

    @abstractmethod
    def load(self, target: Decoder) -> FeatureNetwork:
        """Reads the weights. Raises ModelError."""

    def load_further(self, target: Decoder) -> list[FeatureNetwork]:
        """The modules behind the first: each continues the output of the one before it."""
        return []


class Builder:
    """Takes a checkpoint's tensors in the target's dtype, on its device. Products are kept as 8-bit integers where
    the compiled kernels multiply them: a draft need not be exact, and a step of the target has pushed the weights out of the caches."""

    def __init__(self, checkpoint: Checkpoint, shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.shape, self.dtype, self.device = checkpoint, shape, dtype, device

    def take(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(name, shape).to(device=self.device, dtype=self.dtype)

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        return RMSNorm(self.take(f"{name}.weight", self.shape.hidden_size if size is None else size), self.shape.rms_norm_eps)

    def linear(self, prefix: str, parts: dict[str, int], size_in: int, bias: bool = False) -> Linear:
        weight, offset = self.stacked(prefix, parts, size_in, bias)
        return Linear(weight, offset, int8=_as_int8(weight))

    def stacked(self, prefix: str, parts: dict[str, int], size_in: int, bias: bool = False) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the fused rows of `prefix.part`, in order."""
        names = {f"{prefix}.{part}".rstrip("."): size for part, size in parts.items()}
        weight = torch.cat([self.take(f"{name}.weight", size, size_in) for name, size in names.items()])
        return weight, torch.cat([self.take(f"{name}.bias", size) for name, size in names.items()]) if bias else None

    def layer(self, name: str, *, size_in: int | None = None, input_norm: bool = True, window: int | None = None) -> Layer:
        """A decoder layer in Hugging Face names; `size_in`: what its attention reads when that is not the hidden size."""
        shape = self.shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention = f"{name}.self_attn"
        qk_norm = f"{attention}.q_norm.weight" in self.checkpoint

        def has_bias(part: str) -> bool:
            return f"{name}.{part}.bias" in self.checkpoint

        def in_order(tensor: Tensor) -> Tensor:
            return in_rotated_order(tensor, order, shape.head_dim, shape.num_heads + shape.num_kv_heads)

        def head_norm(part: str) -> RMSNorm | None:
            return RMSNorm(in_order(self.take(f"{attention}.{part}.weight", shape.head_dim)), shape.rms_norm_eps) if qk_norm else None

        order = rotated_order(shape.head_dim, num_rotated(shape.rope, shape.head_dim), interleaved=False)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        qkv, offset = self.stacked(attention, parts, size_in or hidden, has_bias("self_attn.q_proj"))
        unit = torch.ones(hidden, dtype=self.dtype, device=self.device)
        return Layer(
            input_norm=self.norm(f"{name}.input_layernorm") if input_norm else RMSNorm(unit, shape.rms_norm_eps),
            qkv=Linear(in_order(qkv), None if offset is None else in_order(offset), int8=_as_int8(qkv)),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            o=self.linear(attention, {"o_proj": hidden}, q_size, has_bias("self_attn.o_proj")),
            post_norm=self.norm(f"{name}.post_attention_layernorm"),
            mlp=self.mlp(f"{name}.mlp", inner) if shape.features.experts is None else self.experts(name, shape.features.experts),
            scores=Scores(window),
        )

    def mlp(self, name: str, inner: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> MLP:
        gate, up, down = parts
        bias, hidden = f"{name}.{gate}.bias" in self.checkpoint, self.shape.hidden_size
        weight, offset = self.stacked(name, {gate: inner, up: inner}, hidden, bias)
        return MLP(GatedLinear(weight, offset, int8=_as_int8(weight)), self.linear(name, {down: hidden}, inner, bias))

    def experts(self, layer: str, traits: ExpertTraits) -> Experts:
        """A mixture of experts like the target's, which are published one by one."""
        block = f"{layer}.{traits.block}"
        return Experts(
            traits, self.take(f"{block}.{traits.router}.weight", traits.num, self.shape.hidden_size), None,
            [self.mlp(f"{block}.experts.{number}", traits.inner_size, traits.parts) for number in range(traits.num)],
            self.mlp(f"{block}.shared_experts", traits.shared_size) if traits.shared_size else None,
            None if traits.choice_bias is None else self.take(f"{block}.{traits.choice_bias}", traits.num),
        )

    def embedding(self, name: str, of_target: Tensor) -> Tensor:
        """The checkpoint's own embedding, or the target's where it has none or the same."""
        vocab, hidden = self.shape.vocab_size, self.shape.hidden_size
        if name not in self.checkpoint:
            if of_target.shape[1] != hidden:
                raise self.error(f"hidden size {hidden} is not the target's ({of_target.shape[1]}), so the weights need {name}")
            return of_target
        own = self.checkpoint.take(name, (vocab, hidden)).to(device=self.device, dtype=self.dtype)
        return of_target if torch.equal(own, of_target) else own

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.checkpoint.directory}: {message}")


def bytes_per_weight(dtype: torch.dtype, device: torch.device) -> int:
    """Of the products, which are nearly all of a network, where their shapes fit the kernels."""
    library = native.library() if device.type == "cpu" and dtype == torch.bfloat16 else None
    return 1 if library is not None and library.linear_panel else dtype.itemsize


def _as_int8(weight: Tensor) -> bool:
    """Whether the compiled kernels multiply it as 8-bit integers here."""
    library = native.library()
    return library is not None and can_pack(library, weight, int8=True)
