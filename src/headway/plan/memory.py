"""What every device holds, and how many tokens and requests fit beside it.

The account is vLLM's: of a device's memory a share (`utilization`) is used; weights, the peak of activations, recorded graphs and the
runtime come out of it, and the rest is K/V blocks. Every device has the same number of blocks, so the fullest one decides for all: a draft
on one device of four leaves the other three with memory that nobody uses.

Weights and K/V are exact. Activations, graphs and the runtime are estimates, within about 2 GiB of what vLLM prints (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.errors import ConfigError
from headway.plan.device import GIB, Device
from headway.plan.drafting import Drafting
from headway.plan.network import NetworkShape, Stage
from headway.plan.quantization import NAMED, Quantization

# vLLM 0.32 estimates 0.3 to 0.7 GiB for the graphs of an 8B model at its default sizes, before it knows.
GRAPHS_BYTES = 0.5 * GIB
# A CUDA context and workspaces: 0.05 to 0.25 GiB in the logs of tests/unit/test_plan_memory.py.
RUNTIME_BYTES = 0.25 * GIB
# Communication buffers of each process, once there is more than one.
COMMUNICATION_BYTES = 1.0 * GIB
KV_DTYPES = {"auto": None, "bfloat16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class Deployment:
    """How a server is to be started.

    tp, pp, draft_tp    devices that share a layer; pipeline stages; devices that share a layer of the draft network, on the last stage
    kv_dtype            of KV_DTYPES; "auto": the network's own type
    max_model_len       tokens of the longest request
    utilization         share of a device's memory that may be used
    memory_bytes        of a device, where it is not the table's: what is left beside other processes
    """

    device: Device
    tp: int = 1
    pp: int = 1
    draft_tp: int = 1
    kv_dtype: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    utilization: float = 0.9

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    def kv_bytes_per_value(self, network: NetworkShape) -> float:
        return KV_DTYPES[self.kv_dtype] or network.bytes_per_value


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one of `count` equal devices holds, in bytes; K/V per token of context."""

    name: str
    count: int
    usable: float
    weights: float
    draft_weights: float
    activations: float
    graphs: float
    runtime: float
    kv_per_token: float
    draft_kv_per_token: float

    @property
    def taken(self) -> float:
        """By everything but K/V."""
        return self.weights + self.draft_weights + self.activations + self.graphs + self.runtime

    @property
    def kv_room(self) -> float:
        return self.usable - self.taken


@dataclass(frozen=True, slots=True)
class Capacity:
    """num_tokens: K/V for so many; num_requests: of `request_len` tokens each. idle: bytes that the fullest device leaves others with.

    num_blocks is as for a network without windows: every layer keeps every token.
    """

    devices: tuple[DeviceMemory, ...]
    request_len: int
    num_blocks: int
    num_tokens: int
    num_requests: int

    @property
    def tightest(self) -> DeviceMemory:
        return min(self.devices, key=lambda device: device.kv_room / (device.kv_per_token + device.draft_kv_per_token))

    def idle(self, device: DeviceMemory, block_size: int) -> float:
        used = self.num_blocks * block_size * (device.kv_per_token + device.draft_kv_per_token)
        return max(0.0, device.kv_room - used)


def measure(
    target: NetworkShape, drafting: Drafting | None, quantization: Quantization | None, deployment: Deployment, k: int, length: int
) -> Capacity:
    """What fits for requests of `length` tokens, `k` of them drafted at a time. Raises ConfigError for devices that cannot share the heads.

    num_blocks is 0 where nothing fits.
    """
    target.check_split(deployment.tp, "--tp")
    draft = drafting.network if drafting else None
    if deployment.pp > len(target.layers):
        raise ConfigError(f"--pp {deployment.pp} is more than the {len(target.layers)} layers of {target.name}")
    if draft is not None:
        check_draft_split(draft, deployment)
    held, block = length + k, deployment.block_size
    devices, num_blocks, num_kept = [], [], []
    for index in range(deployment.pp):
        stage = target.stage(index, deployment.pp)
        for device in _devices(index, stage, draft, quantization, deployment, k):
            devices.append(device)
            num_blocks.append(int(device.kv_room // (block * (device.kv_per_token + device.draft_kv_per_token))))
            num_kept.append(device.kv_room / _kv_of_request(stage, device, deployment, held))
    blocks, requests = max(0, min(num_blocks)), max(0.0, min(num_kept))
    if any(layer.kv.window is not None for layer in target.layers):
        return Capacity(tuple(devices), length, blocks, int(requests * held), int(requests))
    return Capacity(tuple(devices), length, blocks, blocks * block, blocks // -(-held // block))


def check_draft_split(draft: NetworkShape, deployment: Deployment) -> None:
    """Raises ConfigError when the draft network cannot be divided as asked."""
    if deployment.tp % deployment.draft_tp:
        raise ConfigError(f"--draft-tp {deployment.draft_tp} must divide --tp {deployment.tp}")
    draft.check_split(deployment.draft_tp, "--draft-tp")


def _devices(
    index: int, stage: Stage, draft: NetworkShape | None, quantization: Quantization | None, deployment: Deployment, k: int
) -> Iterator[DeviceMemory]:
    """One entry per kind of device of the `index`-th stage: on the last one those with the draft first."""
    network, tp = stage.network, deployment.tp
    plain = DeviceMemory(
        name=_name(index * tp, tp),
        count=tp,
        usable=deployment.device.memory_bytes * deployment.utilization,
        weights=stage.weight_bytes(tp, quantization),
        draft_weights=0.0,
        activations=activation_bytes(stage, deployment, k),
        graphs=0.0 if deployment.device.is_cpu else GRAPHS_BYTES,
        runtime=RUNTIME_BYTES + (COMMUNICATION_BYTES if deployment.num_devices > 1 else 0.0),
        kv_per_token=stage.kv_values_per_token(tp) * deployment.kv_bytes_per_value(network),
        draft_kv_per_token=0.0,
    )
    if draft is None or index != deployment.pp - 1:
        yield plain
        return
    own, num_with = draft.stage(0, 1), deployment.draft_tp
    yield replace(
        plain, name=_name(index * tp, num_with), count=num_with, draft_weights=own.weight_bytes(num_with, draft.quantization),
        draft_kv_per_token=own.kv_values_per_token(num_with) * deployment.kv_bytes_per_value(draft),
    )  # fmt: skip
    if num_with < tp:
        yield replace(plain, name=_name(index * tp + num_with, tp - num_with), count=tp - num_with)


def _name(first: int, count: int) -> str:
    return f"device {first}" if count == 1 else f"devices {first} to {first + count - 1}"


def activation_bytes(stage: Stage, deployment: Deployment, k: int) -> float:
    """The peak of one pass: the residual stream and the widest MLP of all its tokens, and all requests' logits in 16 and 32 bits."""
    network = stage.network
    widest = max(layer.mlp_width for layer in stage.layers) / deployment.tp
    per_token = (4 * network.hidden_size + widest) * network.bytes_per_value
    logits = deployment.max_num_seqs * (1 + k) * network.vocab_size * (network.bytes_per_value + 4.0) if stage.output else 0.0
    return deployment.max_num_batched_tokens * per_token + logits


def _kv_of_request(stage: Stage, device: DeviceMemory, deployment: Deployment, length: int) -> float:
    """Bytes on the device. A layer with a window keeps what it attends to and what a step adds, and a block more (vLLM's admission)."""
    block = deployment.block_size
    whole = -(-length // block) * block

    def within(window: int) -> int:
        return (-(-min(length, window - 1 + deployment.max_num_batched_tokens) // block) + 1) * block

    kept = [whole if (window := layer.kv.window) is None else within(window) for layer in stage.layers]
    values = sum(layer.kv.values_per_token(deployment.tp) * tokens for layer, tokens in zip(stage.layers, kept, strict=True))
    return values * deployment.kv_bytes_per_value(stage.network) + whole * device.draft_kv_per_token


def smallest_changes(
    target: NetworkShape, drafting: Drafting | None, quantization: Quantization | None, deployment: Deployment, k: int, length: int
) -> list[str]:
    """Flags of which each alone makes one request fit, the least of each kind."""

    def fits(changed: Deployment, stored: Quantization | None) -> bool:
        try:
            return measure(target, drafting, stored, changed, k, length).num_requests >= 1
        except ConfigError:
            return False

    found = []
    if deployment.kv_dtype != "fp8" and fits(replace(deployment, kv_dtype="fp8"), quantization):
        found.append("--kv-dtype fp8")
    for tp in (2 * deployment.tp, 4 * deployment.tp, 8 * deployment.tp):
        draft_tp = tp if deployment.draft_tp == deployment.tp else deployment.draft_tp
        if fits(replace(deployment, tp=tp, draft_tp=draft_tp), quantization):
            found.append(f"--tp {tp}")
            break
    for name in ("fp8", "awq"):
        better = quantization is None or NAMED[name].bits < quantization.bits
        if better and fits(deployment, NAMED[name]):
            found.append(f"--quantization {name}")
            break
    return found
