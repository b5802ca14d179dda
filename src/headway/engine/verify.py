"""Accept or reject drafts: the only place that decides acceptance.

Five rules, chosen by the request and `rejection_sample_method`:

matching      Greedy requests, and every draft that is a function of the prefix (Draft.probs is None): the target chooses its own
              token at each position, with that position's own random number, and drafts are accepted while they are equal.
              For a point mass q at x, rejection sampling accepts x with min(1, p(x)/q(x)) = p(x) and otherwise samples p without x,
              rescaled. Drawing t from p and accepting when t = x does exactly that: t = x has probability p(x), and given t != x
              it is distributed as p without x. So neither the output distribution nor the acceptance rate differs, and since t
              is what plain decoding would have drawn, a seeded request writes the same text with speculation on and off. No lossless
              rule accepts more: P(first i drafts kept) cannot exceed the target's probability of them, which matching attains.
              In a tree the walk goes down to the child that is the target's token, as long as there is one.
standard      Sampled drafts: accept x with min(1, p(x)/q(x)); at the first refusal sample from max(p - q, 0), rescaled
              (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
block         Sampled drafts, judged together: the longest prefix that passes wins, even when a shorter one does not
              (Sun et al. 2024, arXiv 2403.10444). Never accepts fewer tokens in expectation. Chains only.
siblings      Sampled trees: at each node, from the top down, its children in turn are accepted with min(1, p(x)/q(x)); after a refusal
              p becomes max(p - q, 0), rescaled, and q loses x, rescaled. When all are refused the next token is drawn from p
              (SpecInfer, arXiv 2305.09781; without replacement as in Sequoia, arXiv 2402.12374).
lossy         `synthetic` accepts at given rates whatever the tokens are, and `lossy_typical` accepts what is likely enough
              (Medusa, arXiv 2401.10774). Their output is not the model's: `Verifier.lossless` is False.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.config import SpeculativeConfig
from headway.engine.logits import Position, mask_logits
from headway.engine.sampler import Purpose, Sampler, Span, draw, token_logprobs, uniforms
from headway.types import Draft, Row, Sequence, TokenLogprobs, Verdict


class VerifyRow(NamedTuple):
    """One sequence's drafts and where its 1 + len(tokens) rows start in the step's logits."""

    seq: Sequence
    tokens: list[int]
    probs: Tensor | None
    offset: int
    parents: tuple[int, ...] | None = None

    def spans(self) -> list[Span]:
        """Its rows: each decides the token after what comes before it."""
        if self.parents is None:
            return [Span(self.seq, self.tokens, 0, 1 + len(self.tokens))]
        paths: list[list[int]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        return [Span(self.seq, [], 0, 1), *(Span(self.seq, path, len(path), 1) for path in paths)]

    def children(self) -> list[list[int]]:
        """By node, those of -1 the last."""
        assert self.parents is not None
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent].append(node)
        return found


class Acceptance(NamedTuple):
    """How many drafts were accepted, the token that follows them, and of a tree which nodes."""

    num_accepted: int
    token: int
    path: tuple[int, ...] | None = None


FloatArray = NDArray[np.float64]


class Verifier:
    def __init__(self, speculative: SpeculativeConfig | None, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.sampler = Sampler(vocab_size, device)
        self.method = "standard" if speculative is None else speculative.rejection_sample_method
        self.lossless = self.method in ("standard", "block")
        self._rates: list[float] = []
        self._typical = (0.0, 0.0)
        if speculative is not None and self.method == "synthetic":
            self._rates = conditional_rates(_marginal_rates(speculative))
        if speculative is not None and self.method == "lossy_typical":
            self._typical = speculative.typical_acceptance_threshold, speculative.typical_acceptance_alpha

    @torch.inference_mode()
    def verify(self, logits: Tensor, rows: SequenceOf[Row], drafts: SequenceOf[Draft | None]) -> list[Verdict]:
        """One verdict per row, in order. Every row must sample.

        logits  [sum(1 + len(draft)), vocab], the target's, in its dtype: for each row those after its last known token, then those
                after each of its drafts. Not changed.

        Raises ValueError for trees where the method judges chains, and for shapes that do not fit.
        """
        verify_rows = self._verify_rows(logits, rows, drafts)
        decide = self._synthetic if self.method == "synthetic" else self._mixed
        acceptances = decide(logits, verify_rows)
        verdicts = [_verdict(c, acceptance) for c, acceptance in zip(verify_rows, acceptances, strict=True)]
        self._add_logprobs(logits, verify_rows, verdicts)
        return verdicts

    def _verify_rows(self, logits: Tensor, rows: SequenceOf[Row], drafts: SequenceOf[Draft | None]) -> list[VerifyRow]:
        out = []
        offset = 0
        for row, draft in zip(rows, drafts, strict=True):
            tokens: list[int] = [] if draft is None else draft.tokens
            probs = None if draft is None or not tokens else draft.probs
            parents = None if draft is None else draft.parents
            if parents is not None and self.method != "standard":
                raise ValueError(f"rejection_sample_method {self.method!r} judges chains of drafts, got parents {parents}")
            if parents is not None and (len(parents) != len(tokens) or not all(-1 <= parent < j for j, parent in enumerate(parents))):
                raise ValueError(f"the parents of {len(tokens)} drafts must come before them, got {parents}")
            if probs is not None and tuple(probs.shape) != (len(tokens), self.vocab_size):
                raise ValueError(f"Draft.probs must be [{len(tokens)}, {self.vocab_size}], got {list(probs.shape)}")
            out.append(VerifyRow(row.seq, tokens, probs, offset, parents))
            offset += 1 + len(tokens)
        if tuple(logits.shape) != (offset, self.vocab_size):
            raise ValueError(f"these rows and drafts need logits [{offset}, {self.vocab_size}], got {list(logits.shape)}")
        return out

    def _mixed(self, logits: Tensor, verify_rows: list[VerifyRow]) -> list[Acceptance]:
        """Each row by the rule its request and draft call for."""
        weighed = [i for i, c in enumerate(verify_rows) if self._is_weighed(c)]
        if not weighed:
            return self._matching(logits, verify_rows)
        acceptances = {i: self._descend(logits, verify_rows[i]) for i in weighed if verify_rows[i].parents is not None}
        weighed = [i for i in weighed if i not in acceptances]
        acceptances |= zip(weighed, self._weighed(logits, [verify_rows[i] for i in weighed]), strict=True)
        matched = [i for i in range(len(verify_rows)) if i not in acceptances]
        if matched:
            chosen = [verify_rows[i] for i in matched]
            rows = [c.offset + j for c in chosen for j in range(1 + len(c.tokens))]
            acceptances.update(zip(matched, self._matching(logits[rows], chosen), strict=True))
        return [acceptances[i] for i in range(len(verify_rows))]

    def _is_weighed(self, row: VerifyRow) -> bool:
        """Whether acceptance looks at probabilities; the rest is decided by matching tokens."""
        if not row.tokens or row.seq.params.greedy:
            return False
        return row.probs is not None or self.method == "lossy_typical"

    def _matching(self, logits: Tensor, verify_rows: list[VerifyRow]) -> list[Acceptance]:
        """`logits`: the logits of these rows only, in order."""
        sampled = self.sampler.sample(logits, [span for c in verify_rows for span in c.spans()])
        acceptances = []
        row = 0
        for c in verify_rows:
            acceptances.append(_matched(c, sampled[row : row + 1 + len(c.tokens)]))
            row += 1 + len(c.tokens)
        return acceptances

    def _descend(self, logits: Tensor, c: VerifyRow) -> Acceptance:
        """A sampled tree: see `siblings` above. Rows of `logits` are looked at as they are reached."""
        assert c.probs is not None
        spans, children = c.spans(), c.children()
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            span, position = spans[1 + node], len(c.seq.token_ids) + len(path)
            p = self.sampler.probabilities(logits, [(c.offset + 1 + node, Position(c.seq, span.drafts, span.first))])
            below = children[node]
            numbers = uniforms([c.seq.seed] * len(below), [position] * len(below), [_sibling(i) for i in range(len(below))])
            accepted, p = _first_accepted(p, c.probs[below[0]] if below else None, [c.tokens[child] for child in below], numbers)
            if accepted is None:
                break
            path.append(below[accepted])
        number = uniforms([c.seq.seed], [position], Purpose.RESIDUAL if below else Purpose.TOKEN)
        return Acceptance(len(path), draw(p, number)[0], tuple(path))

    def _synthetic(self, logits: Tensor, verify_rows: list[VerifyRow]) -> list[Acceptance]:
        """Accept draft j, given the ones before it, with its conditional rate; the final token is the target's own."""
        num_accepted = []
        for c in verify_rows:
            length = min(len(c.tokens), len(self._rates))
            numbers = uniforms([c.seq.seed] * length, len(c.seq.token_ids) + np.arange(length), Purpose.SYNTHETIC)
            num_accepted.append(_first_refusal(numbers < np.array(self._rates[:length])))
        spans = [Span(c.seq, c.tokens, n, 1) for c, n in zip(verify_rows, num_accepted, strict=True)]
        rows = [c.offset + n for c, n in zip(verify_rows, num_accepted, strict=True)]
        return [Acceptance(*pair) for pair in zip(num_accepted, self.sampler.sample(logits[rows], spans), strict=True)]

    def _weighed(self, logits: Tensor, verify_rows: list[VerifyRow]) -> Iterator[Acceptance]:
        """Decisions that need the target's probabilities, in groups that fit the sampler's workspace."""
        group: list[VerifyRow] = []
        size = 0
        for c in verify_rows:
            if group and size + 1 + len(c.tokens) > self.sampler.block_rows:
                yield from self._weigh(logits, group)
                group, size = [], 0
            group.append(c)
            size += 1 + len(c.tokens)
        if group:
            yield from self._weigh(logits, group)

    def _weigh(self, logits: Tensor, group: list[VerifyRow]) -> list[Acceptance]:
        targets = [(c.offset + j, Position(c.seq, c.tokens, j)) for c in group for j in range(1 + len(c.tokens))]
        p = self.sampler.probabilities(logits, targets)
        if self.method == "lossy_typical":
            num_accepted = self._typical_lengths(p, group)
            weights = p[_judges(group, num_accepted)]
        else:
            q = torch.cat([c.probs for c in group if c.probs is not None]).to(p)
            num_accepted, factors = _block_lengths(p, q, group) if self.method == "block" else _standard_lengths(p, q, group)
            weights = _residuals(p, q, group, num_accepted, factors)
        positions = [len(c.seq.token_ids) + n for c, n in zip(group, num_accepted, strict=True)]
        purposes = [Purpose.TOKEN if n == len(c.tokens) else Purpose.RESIDUAL for c, n in zip(group, num_accepted, strict=True)]
        numbers = uniforms([c.seq.seed for c in group], positions, purposes)
        return [Acceptance(*pair) for pair in zip(num_accepted, draw(weights, numbers), strict=True)]

    def _typical_lengths(self, p: Tensor, group: list[VerifyRow]) -> list[int]:
        """Medusa's rule: keep x while p(x) > min(threshold, alpha * exp(-entropy of p))."""
        threshold, alpha = self._typical
        rows, tokens = _draft_rows(group, p.device)
        likely = p[rows, tokens] > (alpha * torch.exp(-torch.special.entr(p[rows]).sum(-1))).clamp_(max=threshold)
        return [_first_refusal(part) for part in _split(likely.cpu().numpy(), group)]

    def _add_logprobs(self, logits: Tensor, verify_rows: list[VerifyRow], verdicts: list[Verdict]) -> None:
        """Fills `Verdict.logprobs` where the request asks: each emitted token at its own position, among those its grammar allows."""
        by_count: dict[int, list[int]] = {}
        for i, c in enumerate(verify_rows):
            if c.seq.params.logprobs is not None:
                by_count.setdefault(c.seq.params.logprobs, []).append(i)
        for num_top, wanted in by_count.items():
            rows = [verify_rows[i].offset + j for i in wanted for j in _judging_rows(verdicts[i])]
            chosen = logits[rows].float()
            positions = [Position(verify_rows[i].seq, verdicts[i].tokens, j) for i in wanted for j in range(len(verdicts[i].tokens))]
            mask_logits(chosen, list(enumerate(positions)), self.vocab_size)
            found = iter(token_logprobs(chosen, [token for i in wanted for token in verdicts[i].tokens], num_top))
            for i in wanted:
                logprobs: list[TokenLogprobs] = [next(found) for _ in verdicts[i].tokens]
                verdicts[i].logprobs = logprobs


def _verdict(c: VerifyRow, acceptance: Acceptance) -> Verdict:
    accepted = c.tokens[: acceptance.num_accepted] if acceptance.path is None else [c.tokens[node] for node in acceptance.path]
    return Verdict([*accepted, acceptance.token], acceptance.num_accepted, path=acceptance.path)


def _judging_rows(verdict: Verdict) -> list[int]:
    """Which of its rows decided each token of a verdict."""
    return [0, *(1 + draft for draft in verdict.accepted(len(verdict.tokens)))]


def _matched(c: VerifyRow, sampled: list[int]) -> Acceptance:
    """`sampled`: the target's token at each of the row's places."""
    if c.parents is None:
        num_accepted = 0
        for token in c.tokens:
            if token != sampled[num_accepted]:
                break
            num_accepted += 1
        return Acceptance(num_accepted, sampled[num_accepted])
    following = {(parent, token): node for node, (parent, token) in enumerate(zip(c.parents, c.tokens, strict=True))}
    path: list[int] = []
    node = following.get((-1, sampled[0]))
    while node is not None:
        path.append(node)
        node = following.get((node, sampled[1 + node]))
    return Acceptance(len(path), sampled[1 + path[-1] if path else 0], tuple(path))


def _first_accepted(p: Tensor, q: Tensor | None, tokens: list[int], numbers: FloatArray) -> tuple[int | None, Tensor]:
    """Which of the siblings `tokens`, drawn in turn without replacement from `q`, is accepted (None: none), and p, or what is left of it.

    p  [1, width], changed        q  [vocab], None where there are no siblings
    """
    if q is None:
        return None, p
    q = q.to(p, copy=True)
    ours = p[0, : len(q)]
    for i, (token, number) in enumerate(zip(tokens, numbers.tolist(), strict=True)):
        if number * float(q[token]) < float(ours[token]):
            return i, p
        rest = (ours - q).clamp_(min=0.0)
        total = float(rest.sum())
        if total > 0.0:     # nothing is left only when p = q up to rounding; then p itself is the limit
            ours.copy_(rest / total)
        q[token] = 0.0
        total = float(q.sum())
        if total <= 0.0:    # nothing more could have been drawn
            break
        q /= total
    return None, p


def _sibling(index: int) -> int:
    """The purpose of the number that judges it; the first one is judged as a chain's draft is."""
    return Purpose.SIBLING + index if index else Purpose.ACCEPT


def conditional_rates(marginal: SequenceOf[float]) -> list[float]:
    """P(first j drafts accepted) for j = 1, 2, ... -> P(draft j accepted | the ones before it were)."""
    return [rate / before if before > 0.0 else 0.0 for before, rate in zip([1.0, *marginal], marginal, strict=False)]


def _marginal_rates(speculative: SpeculativeConfig) -> tuple[float, ...]:
    """The given rates, or those of the given mean length with the least variance: ones, one fraction, zeros (as in vLLM)."""
    if speculative.synthetic_acceptance_rates is not None:
        return speculative.synthetic_acceptance_rates
    assert speculative.synthetic_acceptance_length is not None
    accepted = speculative.synthetic_acceptance_length - 1.0
    return tuple(min(1.0, max(0.0, accepted - j)) for j in range(speculative.num_speculative_tokens))


def _first_refusal(accepted: NDArray[np.bool_]) -> int:
    """How many leading entries are true."""
    return len(accepted) if accepted.all() else int(accepted.argmin())


def _draft_rows(group: SequenceOf[VerifyRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """For all drafts of a group in order: the row of the group's target distributions that judges it, and its token."""
    rows: list[int] = []
    start = 0
    for c in group:
        rows.extend(range(start, start + len(c.tokens)))
        start += 1 + len(c.tokens)
    tokens = [token for c in group for token in c.tokens]
    return torch.tensor(rows, device=device), torch.tensor(tokens, device=device)


def _judges(group: SequenceOf[VerifyRow], num_accepted: SequenceOf[int]) -> list[int]:
    """For each row which of the group's target distributions follows its first `num_accepted` drafts."""
    starts = np.cumsum([0] + [1 + len(c.tokens) for c in group])[:-1]
    judges: list[int] = (starts + np.array(num_accepted)).tolist()
    return judges


def _split(values: NDArray[Any], group: SequenceOf[VerifyRow]) -> list[NDArray[Any]]:
    """One entry per draft -> one array per row."""
    ends = list(accumulate(len(c.tokens) for c in group))
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _probabilities_of_drafts(p: Tensor, q: Tensor, group: SequenceOf[VerifyRow]) -> tuple[FloatArray, FloatArray]:
    rows, tokens = _draft_rows(group, p.device)
    return p[rows, tokens].double().cpu().numpy(), q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double().cpu().numpy()


def _standard_lengths(p: Tensor, q: Tensor, group: SequenceOf[VerifyRow]) -> tuple[list[int], list[float]]:
    """Accept x with min(1, p(x)/q(x)), up to the first refusal: (lengths, the factors of p in the residual: all 1)."""
    target, draft = _probabilities_of_drafts(p, q, group)
    seeds = [c.seq.seed for c in group for _ in c.tokens]
    positions = [len(c.seq.token_ids) + j for c in group for j in range(len(c.tokens))]
    accepted = uniforms(seeds, positions, Purpose.ACCEPT) * draft < target
    return [_first_refusal(part) for part in _split(accepted, group)], [1.0] * len(group)


def _block_lengths(p: Tensor, q: Tensor, group: SequenceOf[VerifyRow]) -> tuple[list[int], list[float]]:
    """Block verification: (lengths, the factors of p in the residual).

    With w_0 = 1, w_i = min(1, w_{i-1} p(x_i)/q(x_i)) and R_i = sum over x of max(w_i p(x | x_1..x_i) - q(x | x_1..x_i), 0), prefix i
    passes with probability R_i / (R_i + 1 - w_i), the whole block (i = k) with w_k; the longest that passes is kept, and the next
    token comes from max(w_i p - q, 0), rescaled. The numbers are keyed by where the block starts: one that refused position i here
    must not be used again when the next block judges that position, for it is known to be large.
    """
    target, draft = _probabilities_of_drafts(p, q, group)
    factors = [_prefix_weights(*pair) for pair in zip(_split(target, group), _split(draft, group), strict=True)]
    rows, _ = _draft_rows(group, p.device)
    scale = torch.tensor([w for ws in factors for w in ws[:-1]], dtype=p.dtype, device=p.device).unsqueeze(-1)
    excess = (p[rows, : q.shape[1]] * scale).sub_(q).clamp_(min=0.0).sum(-1).double().cpu().numpy()
    seeds, starts = [c.seq.seed for c in group for _ in c.tokens], [len(c.seq.token_ids) for c in group for _ in c.tokens]
    numbers = uniforms(seeds, starts, np.concatenate([Purpose.BLOCK + np.arange(len(c.tokens)) for c in group]))
    num_accepted = []
    for ws, over, drawn in zip(factors, _split(excess, group), _split(numbers, group), strict=True):
        rests = [(r, r + 1.0 - w) for r, w in zip(over[1:].tolist(), ws[1:], strict=False)]
        passing = [r / scale if scale > 0.0 else 1.0 for r, scale in rests] + [ws[-1]]
        num_accepted.append(max((i for i, (u, h) in enumerate(zip(drawn.tolist(), passing, strict=True), 1) if u < h), default=0))
    return num_accepted, [ws[n] for ws, n in zip(factors, num_accepted, strict=True)]


def _prefix_weights(target: FloatArray, draft: FloatArray) -> list[float]:
    """w_0 .. w_k of `_block_lengths`."""
    weights = [1.0]
    for p, q in zip(target.tolist(), draft.tolist(), strict=True):
        weights.append(min(1.0, weights[-1] * p / q) if q > 0.0 else float(weights[-1] * p > 0.0))
    return weights


def _residuals(p: Tensor, q: Tensor, group: SequenceOf[VerifyRow], num_accepted: list[int], factors: list[float]) -> Tensor:
    """What the token after the accepted drafts is drawn from, not rescaled: max(factor * p - q, 0), or p after a whole block."""
    lengths = np.array([len(c.tokens) for c in group])
    weights = p[_judges(group, num_accepted)]
    refused = [b for b, n in enumerate(num_accepted) if n < lengths[b]]
    if refused:
        ours = weights[refused, : q.shape[1]]
        theirs = q[(np.cumsum(lengths) - lengths + num_accepted)[refused].tolist()]
        scale = torch.tensor([factors[b] for b in refused], dtype=p.dtype, device=p.device).unsqueeze(-1)
        rest = (ours * scale).sub_(theirs).clamp_(min=0.0)
        # Nothing is left only when p = q up to rounding; then p itself is the limit.
        weights[refused, : q.shape[1]] = torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, ours)
    return weights
