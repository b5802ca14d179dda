"""What sets one family of models apart from another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Norms(NamedTuple):
    """Names of a layer's norms, by where they stand; None: nothing is normed there."""

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True)
class ExpertTraits:
    """A mixture of experts in place of the MLP.

    layers       by layer, whether it has one; the others have an MLP
    inner_size   of each expert; shared_size: of the expert that all tokens go through, 0: there is none
    sigmoid      an expert's score is the sigmoid of the router's logit, else they are a softmax over all experts
    normalised   the weights of a token's experts sum to 1, before they are multiplied by `scale`
    choice_bias  name of what is added to scores to choose experts, not to weigh them; None: nothing
    num_groups, groups_kept    experts are chosen from the groups whose two best are best
    block, router, parts       names: of the block in its layer, of the router, of an expert's gate, up and down projection
    stacked      published as one tensor for all experts, gates and ups in turn, as gpt-oss does
    """

    num: int
    per_token: int
    inner_size: int
    layers: tuple[bool, ...]
    shared_size: int = 0
    sigmoid: bool = False
    normalised: bool = True
    scale: float = 1.0
    choice_bias: str | None = None
    num_groups: int = 1
    groups_kept: int = 1
    block: str = "mlp"
    router: str = "gate"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False

    def num_parameters(self, hidden: int) -> int:
        """Of one layer's."""
        biases = self.num * (2 * self.inner_size + hidden + 1) if self.stacked else 0
        return self.num * (hidden + 3 * self.inner_size * hidden) + 3 * self.shared_size * hidden + biases


@dataclass(frozen=True)
class Traits:
    """Where the families differ. A trait that is left out is Llama's.

    windows              by layer: it attends to that many last positions, its own included; None: to all
    qk_norm, qk_norm_wide    queries and keys are normed before the rotation: each head by itself, or all heads together
    norm_offset          is added to the weights of all norms
    attention_scale      of queries times keys; None: head_dim ** -0.5
    attention_softcap    scores s become softcap * tanh(s / softcap); 0: as they are. logit_softcap: logits likewise
    embedding_scale      embeddings are multiplied by it; residual_scale: what attention and MLP add; logit_scale: logits
    interleaved_rotation dimensions 2i and 2i + 1 of a head are turned together, where others turn i and i + half
    fused_qkv, fused_gate_up    the weights are published as one
    sinks                every head has a score that takes its share of the weight and has no value
    experts              None: every layer has an MLP
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_wide: bool = False
    windows: tuple[int | None, ...] = ()
    norms: Norms = field(default_factory=Norms)
    norm_offset: float = 0.0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    interleaved_rotation: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    sinks: bool = False
    experts: ExpertTraits | None = None
