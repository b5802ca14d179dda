"""What a network holds, by its shape alone: the parameters of each layer and the K/V of a token, on one device of several.

Tensor parallelism divides a `Part` among devices up to a limit: K/V heads are copied where there are more devices than heads, norms,
routers and the down-projections of latent attention are on every device, vocabularies are padded to a multiple of 64 rows first. These
are the rules of vLLM's parallel layers; TensorRT-LLM and SGLang follow the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.plan.quantization import Quantization

VOCABULARY_PADDING = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that are stored alike.

    max_split           devices that they can be divided among; None: any number
    is_linear           the weight of a matrix product, which a quantisation stores in fewer bits
    is_attention        of the projections around attention, which some checkpoints keep in 16 bits
    num_experts         so many equal experts they belong to, of which a token uses `experts_per_token`; 0: every token uses all
    """

    num_parameters: int
    max_split: int | None = None
    is_linear: bool = True
    is_attention: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    def on_device(self, tp: int) -> float:
        """Parameters on one of `tp` devices."""
        return self.num_parameters / min(tp, self.max_split or tp)

    def used(self, num_tokens: float) -> float:
        """The expected share of them that a batch of so many tokens reads, where tokens choose experts evenly."""
        if not self.num_experts:
            return 1.0
        return 1.0 - float((1.0 - self.experts_per_token / self.num_experts) ** num_tokens)

    @property
    def used_by_token(self) -> float:
        return self.experts_per_token / self.num_experts if self.num_experts else 1.0


@dataclass(frozen=True, slots=True)
class KVShape:
    """The K/V of one layer: `width` values per head and token, keys and values together. window: tokens that are attended; None: all.

    attention_width     multiply-adds of one query token with one token of context, over all query heads
    """

    num_heads: int
    width: int
    attention_width: int
    window: int | None = None

    def values_per_token(self, tp: int) -> int:
        """On one of `tp` devices: each has one head at least."""
        return max(1, self.num_heads // tp) * self.width

    def num_tokens(self, num_context: float) -> float:
        """Tokens of a context of this length whose K/V is kept."""
        return num_context if self.window is None else min(num_context, float(self.window))


@dataclass(frozen=True, slots=True)
class LayerShape:
    parts: tuple[Part, ...]
    kv: KVShape
    mlp_width: int              # values per token between the two halves of the widest MLP, gate included


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """A target or a draft network.

    layers              in order
    embedding, head     the tables at both ends; head None: it is the embedding; either may be shared with the target (`shares`)
    beside              what stands before and after the layers: the last norm, a drafter's projections
    shares              tables that this network uses but another one holds: read in a pass, not stored
    num_heads           of queries; tensor parallelism must divide it
    quantization        of the linear parts, as config.json says
    mtp                 layers for multi-token prediction that come with the network and are loaded only to draft; each has its projection
    """

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    max_position: int
    bytes_per_value: float
    layers: tuple[LayerShape, ...]
    embedding: Part | None
    head: Part | None
    beside: tuple[Part, ...] = ()
    shares: tuple[Part, ...] = ()
    quantization: Quantization | None = None
    mtp: tuple[LayerShape, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Without `mtp` and `shares`."""
        ends = [part for part in (self.embedding, self.head) if part is not None]
        return sum(part.num_parameters for part in (*ends, *self.beside)) + sum(
            part.num_parameters for layer in self.layers for part in layer.parts
        )

    @property
    def num_active_parameters(self) -> float:
        """Of those, what one token multiplies: its experts only, and no table that is looked up."""
        parts = [*self.beside, *(part for layer in self.layers for part in layer.parts)]
        return sum(part.num_parameters * part.used_by_token for part in parts) + sum(p.num_parameters for p in self._output)

    @property
    def _output(self) -> tuple[Part, ...]:
        """The table that logits are computed with."""
        found = self.head or (self.shares[-1] if self.shares else self.embedding)
        return () if found is None else (found,)

    def check_split(self, tp: int, what: str) -> None:
        """Raises ConfigError when `tp` devices cannot share its heads."""
        if self.num_heads % tp:
            possible = [size for size in range(1, self.num_heads + 1) if self.num_heads % size == 0 and size <= 64]
            raise ConfigError(
                f"{what} {tp} does not divide the {self.num_heads} attention heads of {self.name}; "
                f"possible: {', '.join(map(str, possible))}"
            )
        kv_heads = self.layers[0].kv.num_heads if self.layers else 1
        if kv_heads % tp and tp % kv_heads:
            raise ConfigError(f"{what} {tp} and the {kv_heads} K/V heads of {self.name} do not divide each other")

    def stage(self, index: int, num_stages: int) -> Stage:
        """The share of one pipeline stage: an equal number of layers; a remainder goes to the stages before the last (vLLM's rule)."""
        sizes = [len(self.layers) // num_stages] * num_stages
        for extra in range(len(self.layers) % num_stages):
            sizes[-2 - extra] += 1
        first, last = index == 0, index == num_stages - 1
        start = sum(sizes[:index])
        tables = [part for part in ((self.embedding if first else None), (self.head if last else None)) if part is not None]
        if last and not first and self.head is None and self.embedding is not None:
            tables.append(self.embedding)   # a tied table is needed at both ends
        parts = [*tables, *(self.beside if last else ())]
        return Stage(self, self.layers[start : start + sizes[index]], tuple(parts), self._output if last else ())


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of a network on one rank of its pipeline, and the tables beside them; output: what logits are made with."""

    network: NetworkShape
    layers: tuple[LayerShape, ...]
    parts: tuple[Part, ...]
    output: tuple[Part, ...]

    def weight_bytes(self, tp: int, quantization: Quantization | None) -> float:
        """Stored on one of `tp` devices."""
        return sum(self._bytes(part, tp, quantization) for part in self._stored)

    def bytes_read(self, tp: int, quantization: Quantization | None, num_tokens: float) -> float:
        """Of the weights, by one pass over so many tokens, on one of `tp` devices. A table that is looked up is not read."""
        inner = [part for layer in self.layers for part in layer.parts] + [part for part in self.parts if part not in self._tables]
        return sum(self._bytes(part, tp, quantization) * part.used(num_tokens) for part in (*inner, *self.output))

    def multiply_adds(self, tp: int, num_tokens: float, num_sampled: float) -> float:
        """Of one pass, attention aside; logits are computed for the sampled positions only."""
        inner = [part for layer in self.layers for part in layer.parts] + [part for part in self.parts if part not in self._tables]
        products = sum(part.on_device(tp) * part.used_by_token for part in inner) * num_tokens
        return products + sum(part.on_device(tp) for part in self.output) * num_sampled

    def kv_values_per_token(self, tp: int) -> int:
        """K/V values of a token that every layer keeps."""
        return sum(layer.kv.values_per_token(tp) for layer in self.layers)

    @property
    def _tables(self) -> tuple[Part | None, ...]:
        return (self.network.embedding, self.network.head)

    @property
    def _stored(self) -> Sequence[Part]:
        return [*(part for layer in self.layers for part in layer.parts), *self.parts]

    def _bytes(self, part: Part, tp: int, quantization: Quantization | None) -> float:
        whole = self.network.bytes_per_value
        each = quantization.bytes_per_value(part, whole) if quantization is not None and part.is_linear else whole
        return part.on_device(tp) * each


def table(num_rows: int, hidden_size: int) -> Part:
    """An embedding or an output layer."""
    return Part(num_rows * hidden_size, is_linear=False)
