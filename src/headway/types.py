"""The records that flow through one step, in the order they are made.

    Request -> Sequence -> SequenceView -> Row / StepPlan -> Draft -> Verdict -> Feedback -> OutputDelta

Standard library only: the control layer and the vLLM plugin import this file without torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.structured_outputs import Matcher

NO_DRAFT = "none"


@dataclass(slots=True)
class Request:
    """One prompt and how to continue it. Raises InvalidRequestError for a cache_salt that is none.

    priority    smaller runs first (vLLM's convention), ties by arrival
    cache_salt  the request finds K/V prefixes and remembered responses of requests with the same salt only
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise InvalidRequestError("cache_salt must be a non-empty string", param="cache_salt")

    @property
    def salt(self) -> bytes:
        """16 bytes made from `cache_salt`; b"" without one."""
        if self.cache_salt is None:
            return b""
        return hashlib.blake2b(self.cache_salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache_salt").digest()


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation being written (a request with n > 1 has n of them). Owned and changed by the scheduler only.

    Index ranges of `token_ids`, always in this order:

        [0, num_prompt_tokens)              the prompt
        [num_prompt_tokens, num_tokens)     what was generated and committed
        [0, num_computed)                   K/V is in the cache blocks of `block_table`
        [num_computed, num_tokens)          known but not yet computed: what a row feeds next

    A decoding sequence has exactly one known token that is not computed (the last one sampled).
    """

    seq_id: int
    request: Request
    index: int                       # 0 <= index < params.n
    seed: int                        # 64 bits; params.seed + index, or drawn from the engine's seed
    eos_token_ids: frozenset[int]    # empty when params.ignore_eos
    stop_token_ids: frozenset[int]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    max_tokens: int                  # resolved: never None
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int = 0
    num_cached: int = 0              # prompt tokens found in the prefix cache
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)   # of the leading full blocks, chained
    status: Status = Status.WAITING
    finish_reason: str | None = None # stop | length | abort | error
    stop_reason: int | str | None = None
    stats: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    num_preemptions: int = 0
    matcher: Matcher | None = None   # keeps the text to the form that the request asks for
    salt: bytes = field(init=False)  # of the request: kept, since every step asks for it

    def __post_init__(self) -> None:
        self.salt = self.request.salt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """True when one more row of one token samples (and k drafts may ride on it)."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_output_tokens > 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's wish for one sequence in one step: `drafter` proposes at most `k` tokens.

    lookups  drafters to ask before, whose drafts are functions of the prefix: where one of these is chosen, `drafter` is not asked
    """

    drafter: str
    k: int
    lookups: tuple[Choice, ...] = ()


@dataclass(slots=True)
class Row:
    """Known tokens [start, start + length) of `seq` enter this step's forward pass; up to `k` drafts follow them.

    A prefill chunk, a plain decode (length 1) and a verification (length 1, k > 0) differ in numbers only. A row that
    ends at the last known token (`samples`) yields at least one new token. Only such a row may have k > 0.

    room     draft tokens there is room for: k for a chain; of a tree k is the depth, and `room` >= k bounds its nodes
    lookups  drafters to ask before `drafter`, as in `Choice`; each `k` <= `room`
    """

    seq: Sequence
    start: int
    length: int
    k: int = 0
    drafter: str = NO_DRAFT
    room: int = 0
    lookups: tuple[Choice, ...] = ()

    @property
    def samples(self) -> bool:
        return self.start + self.length == len(self.seq.token_ids)


@dataclass(slots=True)
class StepPlan:
    rows: list[Row]
    num_waiting: int = 0
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Known tokens in the step, drafts not counted."""
        return sum(row.length for row in self.rows)


def depths_of(parents: SequenceOf[int]) -> list[int]:
    """How many nodes of the tree come before each one on its path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(slots=True)
class Draft:
    """What a drafter proposes to follow a sequence's last known token.

    tokens      the proposed ids, a chain: position j continues position j - 1 (see `parents`)
    probs       None: `tokens` is a function of the prefix (a point mass: ngram, suffix, greedy drafters);
                else the distributions the tokens were drawn from, tensor [len(tokens), vocab]
    confidence  per position, in [0, 1]: an estimate of P(accepted | the ones before it were), made from the prefix
                before the position only, never from the token drawn there (losslessness depends on it). None: unknown
    parents     None: a chain. Else a tree: node j follows node parents[j] < j, -1: the last known token. `confidence` is given its parent;
                siblings differ. Nodes come in order of worth, so that every beginning is the best tree of its size. With `probs`,
                siblings were drawn one after the other without replacement, in this order, each from what the earlier ones left over
                of the one distribution given for all of them
    """

    tokens: list[int]
    probs: Any | None = None
    confidence: list[float] | None = None
    parents: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """The most tokens that can be accepted."""
        return len(self.tokens) if self.parents is None else max(depths_of(self.parents), default=-1) + 1

    def spine(self) -> Draft:
        """The chain of the first children."""
        if self.parents is None:
            return self
        nodes: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (nodes[-1] if nodes else -1):
                nodes.append(node)
        return Draft(
            [self.tokens[node] for node in nodes],
            None if self.probs is None else self.probs[nodes],
            None if self.confidence is None else [self.confidence[node] for node in nodes],
        )

    def pruned(self, nodes: SequenceOf[int]) -> Draft:
        """Of a tree that is a function of the prefix: these nodes, in ascending order, each with its parent."""
        assert self.parents is not None
        assert self.probs is None
        place = {-1: -1} | {node: j for j, node in enumerate(nodes)}
        confidence = None if self.confidence is None else [self.confidence[node] for node in nodes]
        return Draft([self.tokens[node] for node in nodes], None, confidence, tuple(place[self.parents[node]] for node in nodes))

    def truncated(self, length: int) -> Draft:
        if length >= len(self.tokens):
            return self
        return Draft(
            self.tokens[:length],
            None if self.probs is None else self.probs[:length],
            None if self.confidence is None else self.confidence[:length],
            None if self.parents is None else self.parents[:length],
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the token itself, its rank (1 = most likely) and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()   # (token id, logprob), most likely first


@dataclass(slots=True)
class Verdict:
    """What verification decided for one row: the accepted prefix of its draft plus one more token.

    tokens        accepted drafts, then one token from the target (bonus when all were accepted, else the correction)
    num_accepted  len(tokens) - 1 for an exact verification
    logprobs      one per token when the request asked for them
    path          of a tree: the accepted nodes, from the top down
    """

    tokens: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    path: tuple[int, ...] | None = None

    def accepted(self, num_tokens: int) -> range | tuple[int, ...]:
        """Which drafts were accepted, when only the first `num_tokens` tokens are kept and the last of these counts as the target's."""
        num = max(0, min(self.num_accepted, num_tokens - 1))
        return range(num) if self.path is None else self.path[:num]


@dataclass(frozen=True, slots=True)
class SequenceFeedback:
    """What one sampling row did in one step. `num_drafts` were verified (<= `num_proposed` <= the planned `k`).

    Of a tree these count nodes, which may be more than `k`, its depth; `parents` and `path` are those of `Draft` and `Verdict`.
    """

    seq_id: int
    drafter: str
    k: int
    num_proposed: int
    num_drafts: int
    num_accepted: int
    num_context: int
    confidence: tuple[float, ...] | None = None
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        """The most drafts that could be accepted."""
        return self.num_drafts if self.parents is None else max(depths_of(self.parents), default=-1) + 1


@dataclass(frozen=True, slots=True)
class ShadowFeedback:
    """A draft, or its tail, that was not verified, judged by what the target wrote later: evidence that cost no verification.

    Draft tokens [num_verified, num_drafts) were compared, those before had been verified and accepted. The first `num_confirmed` of the
    compared ones are what the target wrote; when they are not all, the next one is not. A sequence that ended sooner cuts
    `num_drafts` to what could be compared; 0 means that the drafter had nothing to propose. Only drafts that are a function of the
    prefix are shadowed.
    """

    seq_id: int
    drafter: str
    num_verified: int
    num_drafts: int
    num_confirmed: int
    confidence: tuple[float, ...] | None = None   # per draft token, of all `num_drafts`
    num_context: int = 0                          # known tokens when it was drafted; 0: not told


class LookupFeedback(NamedTuple):
    """A drafter that was asked before another one, and whose draft of at most `k` tokens was not chosen."""

    seq_id: int
    drafter: str
    k: int
    num_proposed: int


@dataclass(frozen=True, slots=True)
class DrafterFeedback:
    """What one drafter was asked for in one step, shadow drafts included, and the time it took."""

    drafter: str
    num_rows: int                     # sequences it drafted for
    num_steps: int                    # the largest k asked of it; the tokens of the longest draft where `continue_drafting` could stop it
    num_catch_up: int                 # known tokens it had not been asked about before, summed over the rows, one per row not counted
    num_proposed: int
    draft_ms: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy expected of the step it chose, and of the same step without drafts."""

    step_ms: float
    num_tokens: float                 # tokens written, over all sequences
    plain_ms: float


@dataclass(frozen=True, slots=True)
class Feedback:
    """One finished step, as a policy (and a trace) sees it. Times in milliseconds."""

    step: int
    sequences: tuple[SequenceFeedback, ...]
    num_prefill_tokens: int
    num_tokens: int                   # rows of the forward pass: known tokens plus verified drafts
    num_context_tokens: int           # K/V read, summed over rows
    draft_ms: float
    verify_ms: float                  # target forward pass and accept/reject
    step_ms: float                    # everything, scheduling and commit included
    num_rows: int = 0                 # sequences in the forward pass, prefill chunks included
    num_waiting: int = 0
    policy_ms: float = 0.0            # plan, shadow and select of this step, observe of the step before
    drafters: tuple[DrafterFeedback, ...] = ()
    shadows: tuple[ShadowFeedback, ...] = ()   # resolved in this step, whenever they were drafted
    lookups: tuple[LookupFeedback, ...] = ()   # of sequences for which another drafter was asked in the end, or nobody
    forecast: Forecast | None = None
    reason: str = ""                  # why the policy last changed what it does, in a few words


@dataclass(slots=True)
class OutputDelta:
    """What one step added to one sequence; the engine's output. `from_draft[i]`: token i was an accepted draft."""

    request_id: str
    index: int
    token_ids: list[int]
    from_draft: list[bool]
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None   # on the first delta only
    finish_reason: str | None = None                            # "error": this sequence's output could not be written
    stop_reason: int | str | None = None
    num_cached: int = 0
    stats: SpecDecodeMetrics | None = None                      # on the last delta
    rejected: list[int] = field(default_factory=list)           # draft tokens the target refused in this step

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
