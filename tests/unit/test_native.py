"""The compiled kernels against float64 references, for every instruction set that was built and that this CPU has."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway import native
from headway.models.attention_native import NativePlan
from headway.models.attention_plan import Tree
from headway.models.layers import Layer, Scores
from headway.models.rope import Rope
from headway.native import ops
from headway.types import depths_of

BUILT = [variant for variant in native.supported_variants() if native.library_path(variant).exists()]
if os.environ.get("HEADWAY_NATIVE") == "0" or not BUILT:
    pytest.skip(f"no compiled kernels: {native.choose().reason}", allow_module_level=True)

GATES = {
    "silu": lambda gate, up: gate * gate.sigmoid() * up,
    "gelu_pytorch_tanh": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "gpt_oss": lambda gate, up: gate.clamp(max=7.0) * (1.702 * gate.clamp(max=7.0)).sigmoid() * (up.clamp(-7.0, 7.0) + 1.0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Results are of size 1; inputs are rounded to the type once or twice on the way.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.008}
EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """Work is divided, whatever the environment says."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=BUILT)
def library(request: pytest.FixtureRequest) -> native.Library:
    return native.Library(native.library_path(request.param), request.param)


def test_the_best_built_library_is_chosen() -> None:
    assert native.choose().library is not None
    assert native.choose().library.variant == BUILT[0]  # type: ignore[union-attr]


def test_tiles_run_where_they_should(library: native.Library) -> None:
    """Through the CPU's own in the library for AMX, through emulated ones in all libraries of an emulated build, else through none."""
    emulated = "emulated" in str(library.path)
    assert library.tiles == ("emulated tiles" if emulated else "AMX tiles" if library.variant == "amx" else "")


def test_a_cpu_whose_tiles_are_refused_is_one_with_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel or a container may refuse AMX although the CPU has it."""
    if not native.library_path("amx").exists() or "amx" in BUILT or BUILT[0] != "avx512_bf16":
        pytest.skip("needs a CPU with AVX-512 BF16 and without AMX, and the library for AMX")
    monkeypatch.setattr(native, "has_tiles", lambda: True)
    native.choose.cache_clear()
    try:
        chosen = native.choose()
    finally:
        native.choose.cache_clear()
    assert chosen.library is not None
    assert chosen.library.variant == "avx512_bf16"
    assert "not amx: this process is not permitted to use AMX tiles" in chosen.reason


def chosen_with(value: str) -> str:
    """What a process with this HEADWAY_NATIVE says of its choice."""
    code = "from headway import native; print(native.library(), native.choose().reason)"
    environment = {**os.environ, "HEADWAY_NATIVE": value}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout


def test_the_environment_turns_them_off() -> None:
    assert chosen_with("0").split() == ["None", "HEADWAY_NATIVE=0"]


def test_a_broken_library_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    for variant in native.VARIANTS:
        (tmp_path / f"_kernels_{variant}.so").write_bytes(b"not a library")
    said = chosen_with(str(tmp_path))
    assert said.startswith("None")
    assert "cannot be loaded" in said


def test_a_library_from_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    with pytest.raises(OSError, match="built from other sources"):
        native.Library(native.library_path(BUILT[0]), BUILT[0])


# ------------------------------------------------------------------------------------------------------------ attention


class Problem:
    """Sequences in blocks of a pool full of NaN, with their queries, keys and values."""

    def __init__(self, shape: dict[str, int], lengths: list[int], dtype: torch.dtype, seed: int, q_norm: bool = False) -> None:
        self.shape, self.lengths, self.dtype = shape, lengths, dtype
        random = torch.Generator().manual_seed(seed)
        kv_heads, head_dim, block_size = shape["kv_heads"], shape["head_dim"], shape["block_size"]
        heads = shape["group"] * kv_heads
        self.heads, self.kv_heads, self.head_dim, self.block_size = heads, kv_heads, head_dim, block_size
        self.qkv = [torch.randn(n, heads + 2 * kv_heads, head_dim, generator=random).to(dtype) for n in lengths]
        counts = [-(-n // block_size) for n in lengths]
        blocks = torch.randperm(sum(counts) + 2, generator=random).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.free = blocks
        self.pages = torch.full((sum(counts) + 2, kv_heads, 2, block_size * head_dim), math.nan).to(dtype)
        self.rope, self.rotation = Rope(1e4 ** (-torch.arange(0, head_dim, 2).float() / head_dim), 1.25), 0
        norms = [torch.rand(head_dim, generator=random).to(dtype) + 0.5 for _ in range(2)] if q_norm else None
        self.layer: Any = Layer(*[None] * 7)  # type: ignore[arg-type]
        if norms:
            from headway.models.layers import RMSNorm

            self.layer.q_norm, self.layer.k_norm = (RMSNorm(weight, 1e-5) for weight in norms)

    def step(
        self, library: native.Library, rows: list[tuple[int, int, int]], window: int | None = None, scores: Scores | None = None
    ) -> list[torch.Tensor]:
        """rows: (sequence, start, length) -> attention of each, [length, heads, head_dim]."""
        self.layer.scores, self.layer.rotation = scores or Scores(window), self.rotation
        plan = NativePlan([(self.tables[i], start, length) for i, start, length in rows], self.block_size, library)
        plan.begin(torch.cat([torch.arange(start, start + length) for _, start, length in rows]), self.rope, self.dtype)
        qkv = torch.cat([self.qkv[i][start : start + length] for i, start, length in rows])
        plan.write(qkv, self.layer, self.pages)
        out = plan.attend(qkv, self.layer, self.pages)
        return list(out.view(-1, self.heads, self.head_dim).split([length for *_, length in rows]))

    def expected(self, sequence: int, window: int | None, scores: Scores | None = None) -> torch.Tensor:
        """Of the whole sequence, in float64; rotated queries and keys are rounded to the type, as in the cache."""
        rule = scores or Scores(window)
        x = self.qkv[sequence].double()
        n, half = len(x), self.head_dim // 2
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.layer.q_norm is not None:
            q, k = (
                y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (norm.weight.double() + norm.offset)
                for y, norm in ((q, self.layer.q_norm), (k, self.layer.k_norm))
            )
        angles = self.rope.angles(torch.arange(n))
        cos, sin = (table.double().chunk(self.rope.rotations, -1)[self.rotation][:, None] for table in angles)
        q, k = (torch.cat([y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin], -1) for y in (q, k))
        q, k = q.to(self.dtype).double(), k.to(self.dtype).double()
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        found = torch.einsum("qhd,khd->hqk", q, k) * (rule.scale or self.head_dim**-0.5)
        found = rule.softcap * (found / rule.softcap).tanh() if rule.softcap else found
        own, key = torch.arange(n)[:, None], torch.arange(n)
        hidden = key > own
        if rule.window is not None:
            hidden |= key <= own - rule.window
        found = found.masked_fill(hidden, -math.inf)
        if rule.sinks is not None:
            found = torch.cat([found, rule.sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        return torch.einsum("hqk,khd->qhd", found.softmax(-1)[..., :n], v)


shapes = st.fixed_dictionaries({
    "group": st.integers(1, 9), "kv_heads": st.integers(1, 3), "head_dim": st.sampled_from([16, 48, 64, 80, 96, 128, 256]),
    "block_size": st.sampled_from([16, 48, 64]),
})


@EXAMPLES
@given(
    shape=shapes, lengths=st.lists(st.integers(1, 330), min_size=1, max_size=4), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9),
    window=st.none() | st.integers(1, 300), q_norm=st.booleans(), data=st.data(),
)
def test_attention(
    library: native.Library, shape: dict[str, int], lengths: list[int], dtype: torch.dtype, seed: int, window: int | None, q_norm: bool,
    data: st.DataObject,
) -> None:
    """Rows of any length, in any company, equal one pass over the whole in float64; blocks not in a table stay as they were."""
    problem = Problem(shape, lengths, dtype, seed, q_norm)
    done = [0] * len(lengths)
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    while done != lengths:
        rows = []
        for i in data.draw(st.permutations([i for i, n in enumerate(lengths) if done[i] < n])):
            length = min(lengths[i] - done[i], data.draw(st.sampled_from([1, 2, 5, 40, 200])))
            rows.append((i, done[i], length))
            done[i] += length
        for (i, *_), out in zip(rows, problem.step(library, rows, window), strict=True):
            found[i].append(out)
    for i in range(len(lengths)):
        error = (torch.cat(found[i]).double() - problem.expected(i, window)).abs().max()
        assert error < TOLERANCE[dtype] * (2 if q_norm else 1)
    assert problem.pages[problem.free].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "sinks", "window"), [(3.0, False, None), (0.0, True, 40), (2.0, True, None)])
def test_scores_by_other_rules(library: native.Library, dtype: torch.dtype, softcap: float, sinks: bool, window: int | None) -> None:
    """Soft caps, sinks, another scale, norms with an offset, and the second of two rotations that leaves some pairs alone."""
    problem = Problem({"group": 3, "kv_heads": 2, "head_dim": 64, "block_size": 16}, [300], dtype, seed=1, q_norm=True)
    for norm in (problem.layer.q_norm, problem.layer.k_norm):
        norm.offset = 0.25
    partial = problem.rope.inv_freq * (torch.arange(32) < 24)
    problem.rope, problem.rotation = Rope(torch.cat([problem.rope.inv_freq * 0.3, partial]), 1.25, 2), 1
    scores = Scores(window, 0.2, softcap, torch.linspace(-3, 8, 6) if sinks else None)
    found = [problem.step(library, [(0, start, length)], scores=scores)[0] for start, length in ((0, 280), (280, 1), (281, 19))]
    assert (torch.cat(found).double() - problem.expected(0, window, scores)).abs().max() < 2 * TOLERANCE[dtype]


@EXAMPLES
@given(
    shape=shapes, length=st.integers(2, 12), start=st.integers(0, 600), dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 700),
)
def test_a_verification_has_the_bits_of_plain_decoding(
    library: native.Library, shape: dict[str, int], length: int, start: int, dtype: torch.dtype, window: int | None
) -> None:
    """One row of several tokens, one token at a time, and both in the company of a prefill: not one bit differs."""
    total = start + length
    outs = []
    for rows in ([(start, length)], [(start + i, 1) for i in range(length)]):
        problem = Problem(shape, [total, 70], dtype, seed=1)
        if start:
            problem.step(library, [(0, 0, start)], window)
        parts = [problem.step(library, [(1, 0, 70), (0, *row)] if i % 2 else [(0, *row)], window)[-1] for i, row in enumerate(rows)]
        outs.append(torch.cat(parts))
    assert torch.equal(*outs)


@settings(EXAMPLES, max_examples=10)
@given(
    shape=shapes, start=st.integers(1, 300), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9), window=st.none() | st.integers(1, 300),
    num_nodes=st.integers(1, 20), trunk=st.integers(0, 2), cached=st.integers(0, 5),
)
@example(
    shape={"group": 3, "kv_heads": 1, "head_dim": 64, "block_size": 64}, start=250, dtype=torch.bfloat16, seed=0, window=None, num_nodes=40,
    trunk=1, cached=0,
)
def test_a_node_gets_the_bits_of_a_chain_along_its_path(
    library: native.Library, shape: dict[str, int], start: int, dtype: torch.dtype, seed: int, window: int | None, num_nodes: int,
    trunk: int, cached: int,
) -> None:
    """Beside a chain in the same pass; some nodes computed in an earlier pass. The K/V moved to the path is that of the chain, too."""
    random = torch.Generator().manual_seed(seed)
    trunk, cached = min(trunk, start - 1) if cached == 0 else 0, min(cached, num_nodes - 1)
    parents = [int(torch.randint(-1, node, (1,), generator=random)) if node else -1 for node in range(num_nodes)]
    problem = Problem(shape, [start + num_nodes, 30], dtype, seed)
    begin = start - trunk
    problem.step(library, [(0, 0, begin), (1, 0, 25)], window)

    def grow(first: int, stop: int, at: int) -> torch.Tensor:
        """Nodes [first, stop), behind known tokens from slot `at` on."""
        rows = [(problem.tables[0], at, start + stop - at), (problem.tables[1], 25, 5)]
        plan = NativePlan(rows, problem.block_size, library, [Tree(start, tuple(parents[:stop])), None])
        positions = [*range(at, start), *(start + depth for depth in depths_of(parents)[first:stop]), *range(25, 30)]
        plan.begin(torch.tensor(positions), problem.rope, dtype)
        qkv = torch.cat([problem.qkv[0][at : start + stop], problem.qkv[1][25:]])
        plan.write(qkv, problem.layer, problem.pages)
        return plan.attend(qkv, problem.layer, problem.pages).view(-1, problem.heads, problem.head_dim)

    parts = [grow(0, cached, begin)[:-5]] if cached else []
    whole = grow(cached, num_nodes, start + cached if cached else begin)
    found = torch.cat([*parts, whole[:-5]])[trunk:]
    alone = Problem(shape, [start + num_nodes, 30], dtype, seed)
    alone.step(library, [(1, 0, 25)], window)
    assert torch.equal(alone.step(library, [(1, 25, 5)], window)[0], whole[-5:])
    for node in range(num_nodes):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = Problem(shape, [start + num_nodes, 30], dtype, seed)
        chain.step(library, [(0, 0, start)], window)
        chain.qkv[0] = torch.cat([chain.qkv[0][:start], problem.qkv[0][[start + i for i in path]]])
        assert torch.equal(chain.step(library, [(0, start, len(path))], window)[0][-1], found[node])
    slots = [problem.tables[0][i // problem.block_size] * problem.block_size + i % problem.block_size for i in range(start + num_nodes)]
    moved = torch.tensor([[slots[start + i] for i in path], slots[start : start + len(path)]])
    pages = (ctypes.c_void_p * 1)(problem.pages.data_ptr())
    args = ops.MoveArgs(
        pages=ctypes.addressof(pages), sources=moved[0].data_ptr(), targets=moved[1].data_ptr(), num_moves=len(path), num_layers=1,
        kv_heads=problem.kv_heads, head_dim=problem.head_dim, block_size=problem.block_size, num_threads=1,
    )
    library.function("move", dtype)(ctypes.byref(args))
    last = torch.randn(1, problem.qkv[0].shape[1], problem.head_dim, generator=random).to(dtype)
    outs = []
    for one in (problem, chain):
        one.qkv[0] = torch.cat([one.qkv[0][: start + len(path) - (len(path) == num_nodes)], last])
        outs.append(one.step(library, [(0, len(one.qkv[0]) - 1, 1)], window)[0])
    assert torch.equal(*outs)


def test_attention_refuses_what_it_was_not_planned_for(library: native.Library) -> None:
    problem = Problem({"group": 2, "kv_heads": 2, "head_dim": 64, "block_size": 16}, [40], torch.float32, 0)
    with pytest.raises(ValueError, match="needs 3 blocks of 16 tokens, its table has 2"):
        NativePlan([(problem.tables[0][:2], 0, 40)], 16, library)
    plan = NativePlan([(problem.tables[0], 0, 40)], 16, library)
    plan.begin(torch.arange(40), problem.rope, torch.float32)
    good, pages = problem.qkv[0], problem.pages
    for qkv, bad_pages in (
        (good[:39], pages), (good.to(torch.bfloat16), pages), (good, pages[..., :-64]), (good, pages[:1]), (good, pages.transpose(0, 1)),
        (good[:, :-1].transpose(1, 2).contiguous().transpose(1, 2), pages), (good[..., ::2], pages),
    ):
        with pytest.raises(ValueError, match=r"plan is for|strides"):
            plan.write(qkv, problem.layer, bad_pages)
    out_of_pool = NativePlan([([9999, 0, 1], 0, 40)], 16, library)
    out_of_pool.begin(torch.arange(40), problem.rope, torch.float32)
    with pytest.raises(ValueError, match="blocks up to 9999 of"):
        out_of_pool.write(good, problem.layer, pages)
    for row in (([0, -1, 1], 0, 40), ([0], 0, 0), ([0], -1, 2)):
        with pytest.raises(ValueError, match="rows need"):
            NativePlan([row], 16, library)


# ------------------------------------------------------------------------------------------------------- other kernels


@EXAMPLES
@given(
    num_tokens=st.integers(1, 70), size_in=st.integers(1, 90).map(lambda n: 2 * n) | st.integers(1, 6).map(lambda n: 32 * n),
    size_out=st.integers(1, 5).map(lambda n: 64 * n),
    bias=st.booleans(), kind=st.sampled_from(["plain", "residual", *ops.GATES]), strided=st.booleans(),
    weights=st.sampled_from(["float32", "bfloat16", "int8"]), seed=st.integers(0, 99),
)
def test_linear(
    library: native.Library, num_tokens: int, size_in: int, size_out: int, bias: bool, kind: str, strided: bool, weights: str, seed: int
) -> None:
    int8, dtype = weights == "int8", torch.float32 if weights == "float32" else torch.bfloat16
    size_in = -(-size_in // 16) * 16 if int8 else size_in
    if not library.linear_panel:
        assert not ops.can_pack(library, torch.zeros(64, 64, dtype=dtype))
        return
    random = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(*size, generator=random).to(dtype) for size in ((size_out, size_in), (num_tokens, 2 * size_in)))
    x = x[:, :size_in] if strided else x[:, :size_in].contiguous()
    added = torch.randn(size_out, generator=random).to(dtype) if bias else None
    residual = torch.randn(num_tokens, size_out, generator=random).to(dtype) if kind == "residual" else None
    kept = weight.double()
    if int8:   # what is multiplied is at most half a step from the weight
        largest = weight.float().abs().amax(1, keepdim=True)
        kept = (weight.float() * (127 / largest)).round().double() * (largest.double() / 127)
        assert ((kept - weight.double()).abs() <= 0.501 * largest / 127).all()
    expected = x.double() @ kept.T + (added.double() if added is not None else 0)
    slack = torch.tensor((1e-6 if weights == "float32" else 1e-3) * size_in**0.5)
    if kind in ops.GATES:
        gate, up = expected.chunk(2, -1)
        expected = GATES[kind](gate, up)
        slack = slack if weights == "bfloat16" else slack * (1 + gate.abs() + up.abs())   # an error of x comes through either factor
    if residual is not None:
        expected = expected + residual.double()
    found = ops.PackedLinear(library, weight, added, gate=kind if kind in ops.GATES else None, int8=int8)(x, residual)
    assert ((found.double() - expected).abs() <= (1e-5 if weights == "float32" else 0.005) * expected.abs() + slack).all()


@pytest.mark.parametrize("size_in", [144, 160])   # the latter by tiles, where there are any
@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_a_row_of_a_product_does_not_depend_on_its_company(library: native.Library, dtype: torch.dtype, int8: bool, size_in: int) -> None:
    if not library.linear_panel:
        pytest.skip("no packed product for this instruction set")
    linear = ops.PackedLinear(library, torch.randn(192, size_in).to(dtype), int8=int8)
    x = torch.randn(67, size_in).to(dtype)
    whole = linear(x)
    for begin, end in ((0, 1), (5, 10), (3, 16), (12, 37), (20, 36), (1, 67)):
        assert torch.equal(linear(x[begin:end]), whole[begin:end])


def test_int8_weights_at_their_limits(library: native.Library) -> None:
    """The largest sums fit, an output of zeros stays zero, and what is not a number stays that."""
    if not library.linear_panel:
        pytest.skip("no packed product for this instruction set")
    size_in = 8960
    weight = torch.ones(64, size_in, dtype=torch.bfloat16)
    weight[1] = 0
    weight[2] = -1
    x = torch.full((4, size_in), 3.0, dtype=torch.bfloat16)
    x[1], x[2, 5], x[3, 7] = 0, float("nan"), float("inf")
    y = ops.PackedLinear(library, weight, int8=True)(x).float()
    assert y[0, :3].tolist() == [size_in * 3, 0, -size_in * 3]
    assert (y[1] == 0).all()
    assert y[2].isnan().all()
    assert y[3, [0, 2]].isfinite().logical_not().all()


def test_linear_refuses_wrong_shapes(library: native.Library) -> None:
    if not library.linear_panel:
        pytest.skip("no packed product for this instruction set")
    weight = torch.zeros(128, 64, dtype=torch.bfloat16)
    for bad in (weight.half(), weight[:100], weight[:, :63], weight[:0]):
        with pytest.raises(ValueError, match="cannot pack"):
            ops.PackedLinear(library, bad)
    for bad in (weight[:, :50], weight.float()):
        with pytest.raises(ValueError, match="cannot pack"):
            ops.PackedLinear(library, bad, int8=True)
    with pytest.raises(ValueError, match="the bias must be"):
        ops.PackedLinear(library, weight, torch.zeros(64, dtype=torch.bfloat16))
    linear = ops.PackedLinear(library, weight)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    for bad in (x.float(), x[:, :62], torch.zeros(64, 3, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match=r"x must be torch.bfloat16"):
            linear(bad)
    for bad in (torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, 128), torch.zeros(128, 3, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="the residual must be"):
            linear(x, bad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 16), (3, 576), (40, 1024)])
def test_rms_norm(library: native.Library, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    x, weight = (torch.randn(num_tokens, width) * 3).to(dtype), torch.randn(width).to(dtype)
    y = x.double()
    for offset in (0.0, 1.0):
        expected = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
        error = (ops.rms_norm(library, x, weight, 1e-5, offset).double() - expected).abs() / (1 + expected.abs())
        assert error.max() < {torch.float32: 1e-6, torch.bfloat16: 0.004, torch.float16: 0.0006}[dtype]
    for bad, wrong in ((x[:, :-1], weight[:-1]), (x, weight[:-1]), (x, weight.double()), (x.T.contiguous().T, weight)):
        if bad.is_contiguous() and bad.shape[1:] == wrong.shape and bad.dtype == wrong.dtype and not width % 16 and bad.shape == x.shape:
            continue
        with pytest.raises(ValueError, match="rms_norm takes"):
            ops.rms_norm(library, bad, wrong, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sigmoid", "groups", "residual"), [(False, (1, 1), True), (True, (1, 1), False), (True, (4, 2), True)])
def test_experts(library: native.Library, dtype: torch.dtype, sigmoid: bool, groups: tuple[int, int], residual: bool) -> None:
    """Equal to the same sums by PyTorch in float64; a token's bits are its own; one that is not a number harms no other."""
    if not library.linear_panel:
        pytest.skip("no products")
    random = torch.Generator().manual_seed(0)

    def packed(size_out: int, size_in: int, gate: str | None) -> tuple[torch.Tensor, ops.PackedLinear]:
        weight = (torch.randn(size_out, size_in, generator=random) / size_in**0.5).to(dtype)
        return weight, ops.PackedLinear(library, weight, gate=gate)

    ups, downs = ([packed(*shape) for _ in range(8)] for shape in ((256, 64, "silu"), (64, 128, None)))
    bias = torch.randn(8, generator=random) * 0.2 if sigmoid else None
    experts = ops.PackedExperts(
        library, [up for _, up in ups], [down for _, down in downs], per_token=3, sigmoid=sigmoid, normalised=True, scale=1.5,
        choice_bias=bias, num_groups=groups[0], groups_kept=groups[1],
    )
    x, more = (torch.randn(40, 64, generator=random).to(dtype) for _ in range(2))
    logits = torch.randn(40, 64, generator=random).to(dtype)[:, :8]
    found = experts(x, logits, more if residual else None)
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    if groups[0] > 1:
        best = choice.view(40, groups[0], -1).topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(groups[1], -1).indices, 1.0)
        choice = choice.masked_fill(kept.repeat_interleave(8 // groups[0], 1) == 0, -math.inf)
    chosen = choice.topk(3, -1).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * 1.5
    expected = more.double() if residual else torch.zeros(40, 64, dtype=torch.float64)
    for token in range(40):
        for place, number in enumerate(chosen[token].tolist()):
            gate, up = (ups[number][0].double() @ x[token].double()).chunk(2)
            expected[token] += weights[token, place] * (downs[number][0].double() @ (gate * gate.sigmoid() * up))
    assert (found.double() - expected).abs().max() < {torch.float32: 2e-5, torch.bfloat16: 0.06}[dtype]
    alone = [experts(x[i : i + 1], logits[i : i + 1], more[i : i + 1] if residual else None) for i in range(40)]
    assert torch.equal(torch.cat(alone), found)
    x[:30], logits[:30] = math.nan, math.nan
    broken = experts(x, logits, more if residual else None)
    assert broken[:30].isnan().all()
    assert torch.equal(broken[30:], found[30:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 320), (5, 1003)])
def test_softcap(library: native.Library, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    x = (torch.randn(num_tokens, width) * 60).to(dtype)
    expected = 30 * (x.double() / 30).tanh()
    error = (ops.softcap_(library, x.clone(), 30.0).double() - expected).abs() / (1 + expected.abs())
    assert error.max() < {torch.float32: 1e-5, torch.bfloat16: 0.004, torch.float16: 0.0006}[dtype]
    alone = torch.cat([ops.softcap_(library, row[None].clone(), 30.0) for row in x])
    assert torch.equal(alone, ops.softcap_(library, x.clone(), 30.0))
    for bad, softcap in ((x.T, 30.0), (x[0], 30.0), (x, 0.0)):
        if bad.dim() == 2 and bad.is_contiguous() and softcap:
            continue
        with pytest.raises(ValueError, match="softcap takes"):
            ops.softcap_(library, bad, softcap)


@EXAMPLES
@given(
    num_rows=st.integers(0, 5), width=st.integers(1, 3000), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
    special=st.sampled_from(["none", "ties", "nan", "-inf"]),
)
@example(num_rows=2, width=49152, dtype=torch.bfloat16, seed=0, special="ties")
def test_argmax(library: native.Library, num_rows: int, width: int, dtype: torch.dtype, seed: int, special: str) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, width + 3, generator=random).to(dtype)[:, :width]
    if special == "ties":
        logits = logits.round()
    elif special == "-inf":
        logits.fill_(-math.inf)
    elif special == "nan":
        logits[:, torch.randint(0, width, (2,), generator=random)] = math.nan
    assert ops.argmax(library, logits).tolist() == logits.float().numpy().argmax(-1).tolist()
    with pytest.raises(ValueError, match="argmax takes"):
        ops.argmax(library, torch.zeros(4, 6)[:, ::2])


@EXAMPLES
@given(
    num_rows=st.integers(1, 4), width=st.integers(2, 700), spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]), seed=st.integers(0, 99),
    top_k=st.integers(0, 50), top_p=st.sampled_from([0.0001, 0.3, 0.9, 0.999, 1.0]), min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_top_floors(
    library: native.Library, num_rows: int, width: int, spread: float, seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    """Against sorting each row in float64; ties and rounding may move the floor by one of the values next to it."""
    random = torch.Generator().manual_seed(seed)
    probs = (torch.randn(num_rows, width, generator=random) * spread).softmax(-1)
    floors = probs.amax(-1) * min_p
    found = ops.top_floors(library, probs, floors, torch.full((num_rows,), top_k), torch.full((num_rows,), top_p, dtype=torch.float64))
    for row, floor, result in zip(probs, floors.tolist(), found.tolist(), strict=True):
        ordered = row.double().sort(descending=True).values
        if 0 < top_k < width:
            floor = max(floor, ordered[top_k - 1].item())
        kept = ordered[ordered >= floor]
        if top_p < 1.0:
            share = kept.cumsum(0) / (kept.sum() if floor > 0 else 1.0)
            accepted = {kept[min(int((share < bound).sum()), len(kept) - 1)].item() for bound in (top_p - 1e-6, top_p, top_p + 1e-6)}
            assert result in accepted
        else:
            assert result == floor
    with pytest.raises(ValueError, match="top_floors takes"):
        ops.top_floors(library, probs, floors.double(), torch.full((num_rows,), top_k), torch.full((num_rows,), top_p))
