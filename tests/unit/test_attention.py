"""Paged attention: any split of a sequence into rows, in any company, over any blocks, equals one pass over the whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import native
from headway.models import attention_cuda, attention_native, attention_tiles
from headway.models.attention import KVCache
from headway.models.attention_plan import Tree
from headway.models.attention_tiles import make_plan
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def model(directory: Path) -> Decoder:
    return load_model(str(directory), dtype="float32", device="cpu")


@pytest.fixture(autouse=True, params=["tiles", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who attends; block sizes that the kernels do not take fall back to tiles."""
    if request.param == "tiles":
        monkeypatch.setattr(attention_native, "fits", lambda *_: False)
    elif native.library() is None:
        pytest.skip(f"no compiled kernels: {native.choose().reason}")
    return str(request.param)


class Paged:
    """Sequences fed to a model row by row, over blocks in random order from a cache that holds NaN."""

    def __init__(self, model: Decoder, token_ids: list[list[int]], block_size: int, seed: int = 0, fill: float = float("nan")) -> None:
        self.model, self.token_ids, self.block_size = model, token_ids, block_size
        per_sequence = [-(-len(ids) // block_size) for ids in token_ids]
        blocks = list(range(sum(per_sequence) + 3))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(count)] for count in per_sequence]
        self.cache = KVCache(model.config, sum(per_sequence) + 3, block_size, model.dtype, model.device)
        for layer in self.cache.layers:
            layer.fill_(fill)
        self.done = [0] * len(token_ids)
        self.logits: list[list[torch.Tensor]] = [[] for _ in token_ids]

    def step(self, lengths: dict[int, int]) -> None:
        """lengths: sequence -> tokens of it in this pass, in the order of the rows."""
        rows, ids, positions = [], [], []
        for sequence, length in lengths.items():
            start = self.done[sequence]
            rows.append((self.tables[sequence], start, length))
            ids += self.token_ids[sequence][start:start + length]
            positions += range(start, start + length)
        plan = self.cache.plan(rows)
        hidden, _ = self.model.forward(torch.tensor(ids), torch.tensor(positions), plan, self.cache)
        for (sequence, length), part in zip(lengths.items(), hidden.split(list(lengths.values())), strict=True):
            self.done[sequence] += length
            self.logits[sequence].append(self.model.logits(part))

    def all_logits(self) -> list[torch.Tensor]:
        return [torch.cat(parts) for parts in self.logits]


def random_sequences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in lengths]


def one_pass(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    paged = Paged(model, [token_ids], 64)
    paged.step({0: len(token_ids)})
    return paged.all_logits()[0]


def assert_equal(paged: Paged, tolerance: float = 1e-4) -> None:
    for ids, logits in zip(paged.token_ids, paged.all_logits(), strict=True):
        assert (logits - one_pass(paged.model, ids)).abs().max() < tolerance


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_chunks_equal_one_pass(model: Decoder, block_size: int) -> None:
    paged = Paged(model, random_sequences([150]), block_size)
    for length in (1, 5, 64, 17, 3, 60):
        paged.step({0: length})
    assert_equal(paged)


@pytest.mark.parametrize("seed", range(8))
def test_mixed_rows_equal_one_pass(model: Decoder, seed: int) -> None:
    """Prefill chunks, plain decodes and verifications of many sequences, in random order, in the same passes."""
    chance = random.Random(seed)
    lengths = [chance.choice((3, 20, 90, 300)) for _ in range(9)]
    paged = Paged(model, random_sequences(lengths, seed), chance.choice((8, 16, 32)), seed)
    while any(paged.done[i] < length for i, length in enumerate(lengths)):
        running = [i for i, length in enumerate(lengths) if paged.done[i] < length and chance.random() < 0.8]
        chance.shuffle(running)
        step = {i: min(lengths[i] - paged.done[i], chance.choice((1, 1, 2, 5, 9, 40, 200))) for i in running}
        if step:
            paged.step(step)
    assert_equal(paged)


def test_a_long_prefill_over_a_long_context(model: Decoder) -> None:
    paged = Paged(model, random_sequences([1000]), 16)
    for length in (300, 513, 187):
        paged.step({0: length})
    assert_equal(paged)


def test_prompts_of_about_a_chunk_together(model: Decoder) -> None:
    """One just above the chunk size, one just below: padding would be cheap, but chunks are taken of one row at a time."""
    paged = Paged(model, random_sequences([130, 120, 127, 5]), 16)
    paged.step({0: 130, 1: 120, 2: 127, 3: 5})
    assert_equal(paged)


@pytest.mark.parametrize("window", [3, 24, 200])
def test_a_window_is_honoured_in_every_kind_of_row(tmp_path: Path, window: int) -> None:
    model = load_model(str(tiny_model_dir(tmp_path, "mistral", sliding_window=window)), dtype="float32", device="cpu")
    unlimited = load_model(str(tiny_model_dir(tmp_path, "mistral")), dtype="float32", device="cpu")
    paged = Paged(model, random_sequences([290, 40, 120]), 16)
    paged.step({0: 180, 1: 30})
    paged.step({2: 100, 0: 1, 1: 4})
    paged.step({1: 6, 0: 5, 2: 1})
    paged.step({0: 104, 2: 19})
    assert_equal(paged)
    assert (one_pass(model, paged.token_ids[0]) - one_pass(unlimited, paged.token_ids[0])).abs().max() > 0.1


def test_tiles_pad_little_and_cover_every_token() -> None:
    rows = [([0] * 40, start, length) for start, length in ((600, 1), (590, 5), (100, 1), (0, 300), (610, 17), (20, 2), (605, 1))]
    plan = make_plan(rows, 16, "cpu")
    assert sum(tile.tokens.stop - tile.tokens.start for tile in plan.tiles) == sum(row[2] for row in rows)
    assert plan.order is not None
    assert sorted(plan.order.tolist()) == list(range(sum(row[2] for row in rows)))
    assert 1 < len(plan.tiles) < len(rows)


def test_a_uniform_step_is_not_reordered_or_padded() -> None:
    plan = make_plan([([i], 10, 2) for i in range(6)], 16, "cpu")
    assert plan.order is None
    assert len(plan.tiles) == 1
    assert plan.tiles[0].take is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_block_held_before_does_not_matter(directory: Path, dtype: str, backend: str) -> None:
    """NaN in blocks not owned, in slots not written yet, and in the slots that are written next: not one bit changes."""
    model = load_model(str(directory), dtype=dtype, device="cpu")
    paged, clean = (Paged(model, random_sequences([70, 33]), 16, fill=fill) for fill in (float("nan"), 0.0))
    for step in ({0: 50, 1: 20}, {0: 1, 1: 1}, {0: 19, 1: 12}):
        paged.step(step)
        clean.step(step)
    assert paged.cache.backend == backend
    for poisoned, expected in zip(paged.all_logits(), clean.all_logits(), strict=True):
        assert torch.equal(poisoned, expected)


def test_large_scores_survive_bf16() -> None:
    """Scores of several hundred, as biases on keys make them: bf16 alone would round differences of 1 away."""
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(2, n, 64, generator=generator) for n in (6, 200, 200))
    offset = torch.randn(64, generator=generator) * 60
    q, keys, values = (tensor.to(torch.bfloat16) for tensor in (q * 3, keys + offset, values))
    mask = torch.zeros(1, 2, 6, 200, dtype=torch.bfloat16)
    scores = q.double() @ keys.double().transpose(1, 2) / 8
    assert scores.abs().max() > 300
    expected = scores.softmax(-1) @ values.double()
    error = (attention_tiles._attention(q, keys, values, mask, 1 / 8).double() - expected).abs().max()
    rounded = (scores.to(torch.bfloat16).double().softmax(-1) @ values.double() - expected).abs().max()
    assert error < 0.05 < rounded


def test_hidden_layers(model: Decoder, backend: str) -> None:
    paged = Paged(model, random_sequences([40, 7]), 16)
    rows = [(paged.tables[1], 0, 7), (paged.tables[0], 0, 40)]
    ids = torch.tensor(paged.token_ids[1] + paged.token_ids[0])
    positions = torch.cat([torch.arange(7), torch.arange(40)])
    plan = paged.cache.plan(rows)
    assert (plan.order is not None) == (backend == "tiles")
    hidden, layers = model.forward(ids, positions, plan, paged.cache, hidden_layers=(1, 0, -1))
    assert torch.equal(layers[2], hidden)
    assert torch.allclose(model.norm(layers[0]), hidden, atol=1e-6)
    assert not torch.allclose(layers[1], layers[0], atol=0.1)
    alone, (lower,) = model.forward(ids[:7], positions[:7], paged.cache.plan(rows[:1]), paged.cache, hidden_layers=(0,))
    assert torch.allclose(alone, hidden[:7], atol=1e-5)
    assert torch.allclose(lower, layers[1][:7], atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.2), ("float16", 0.03)])
def test_low_precision_is_near_float32(directory: Path, model: Decoder, dtype: str, tolerance: float) -> None:
    low = load_model(str(directory), dtype=dtype, device="cpu")
    paged = Paged(low, random_sequences([150, 60]), 16)
    paged.step({0: 140, 1: 50})
    paged.step({0: 5, 1: 1})
    paged.step({1: 9, 0: 5})
    for ids, logits in zip(paged.token_ids, paged.all_logits(), strict=True):
        assert logits.dtype == low.dtype
        assert (logits.float() - one_pass(model, ids)).pow(2).mean().sqrt() < tolerance


def test_bytes_per_block(model: Decoder) -> None:
    cache: Any = KVCache(model.config, 10, 16, torch.float32, "cpu")
    assert sum(layer.nbytes for layer in cache.layers) == 10 * KVCache.bytes_per_block(model.config, 16, torch.float32)


@pytest.mark.parametrize("window", [None, 20])
def test_pages_as_a_ragged_kernel_sees_them(window: int | None) -> None:
    """The arguments that paged GPU kernels get, given to a loop that reads them literally."""
    generator = torch.Generator().manual_seed(0)
    rows = [([5, 0, 3], 30, 5), ([1], 0, 9), ([2, 4], 17, 1)]
    q = torch.randn(15, 6, 8, generator=generator)
    pages = torch.randn(4, 6, 16 * 8, generator=generator)

    def literal(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ragged: Any, window: int | None, scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        for row, context in enumerate(ragged.contexts.tolist()):
            begin, end = ragged.q_ends[row:row + 2].tolist()
            slots = [(ragged.table[row, p // 16].item(), p % 16) for p in range(context)]
            for token in range(begin, end):
                own = context - end + token
                seen = slots[max(0, own + 1 - window) if window else 0:own + 1]
                for head in range(6):
                    k, v = (torch.stack([side[block, offset, head // 3] for block, offset in seen]) for side in (keys, values))
                    out[token, head] = (k @ q[token, head] * scale).softmax(0) @ v
        return out

    found = attention_cuda.run(literal, q, pages, attention_cuda.Ragged.make(rows, 16, "cpu"), window, 0.4)
    assert torch.allclose(found, attention_tiles._attend_alone(q, pages, rows, window, 0.4), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_stack_has_the_bits_of_its_kernels(tmp_path: Path, family: str, dtype: str, backend: str) -> None:
    """All layers in one call, or one kernel after the other from Python; stopped at a layer, or not."""
    if backend != "native" or not native.library().linear_panel:  # type: ignore[union-attr]
        pytest.skip("no packed products")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    window = {"sliding_window": 20} if family == "mistral" else {}
    model = load_model(str(tiny_model_dir(tmp_path, family, num_hidden_layers=3, **sizes, **window)), dtype=dtype, device="cpu")
    assert model.stack is not None
    found = []
    for stack in (model.stack, None):
        model.stack = stack
        paged = Paged(model, random_sequences([60, 33]), 16)
        paged.step({0: 50, 1: 30})
        paged.step({1: 3, 0: 1})
        ids, positions = torch.arange(9), torch.arange(51, 60)
        hidden, layers = model.forward(ids, positions, paged.cache.plan([(paged.tables[0], 51, 9)]), paged.cache, (0, 2, -1))
        found.append([*(torch.cat(parts) for parts in paged.logits), hidden, *layers])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_is_no_tree_of_the_row_is_refused(model: Decoder) -> None:
    cache = KVCache(model.config, 8, 16, model.dtype, model.device)
    rows = [(list(range(8)), 20, 5), (list(range(8)), 0, 3)]
    cache.plan(rows, [Tree(21, (-1, 0, 0, -1)), None])
    cache.plan(rows, [Tree(18, (-1, 0, 0, -1, 2, 2, 3)), None])
    for tree in (Tree(21, (-1, 0, 0)), Tree(22, (-1, 0, 0, -1)), Tree(25, ()), Tree(0, (-1,) * 25)):
        with pytest.raises(ValueError, match="must end with its row"):
            cache.plan(rows, [tree, None])
    for parents in ((0, 0, 0, 0), (-1, 0, 2, 0), (-1, -2, 0, 0)):
        with pytest.raises(ValueError, match="the parent of node j"):
            cache.plan(rows, [Tree(21, parents), None])


def test_moved_keys_and_values_are_copies(model: Decoder) -> None:
    """From slot to slot in every layer, in order; a later source may lie where an earlier one went."""
    paged = Paged(model, random_sequences([40]), 16, fill=0.0)
    paged.step({0: 40})
    slots = [block * 16 + i for block in paged.tables[0] for i in range(16)]
    before = [keys_and_values(paged, slot) for slot in slots[:40]]
    paged.cache.move([slots[5], slots[17], slots[39]], [slots[4], slots[5], slots[17]])
    after = [keys_and_values(paged, slot) for slot in slots[:40]]
    moved = {4: 5, 5: 17, 17: 39}
    for i in range(40):
        assert torch.equal(after[i], before[moved.get(i, i)])
    paged.cache.move([], [])


def keys_and_values(paged: Paged, slot: int) -> torch.Tensor:
    """What a slot holds in all layers, whatever the layout: found by moving it to an empty place and looking what changed there."""
    spare = next(block for block in range(paged.cache.num_blocks) if block not in paged.tables[0])
    for layer in paged.cache.layers:
        (layer[:, spare] if paged.cache.backend == "tiles" else layer[spare]).zero_()
    paged.cache.move([slot], [spare * 16])
    return torch.stack([(layer[:, spare] if paged.cache.backend == "tiles" else layer[spare]).clone() for layer in paged.cache.layers])
