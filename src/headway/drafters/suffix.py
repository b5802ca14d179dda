"""Suffix decoding: draft what most often followed the longest match, as far as the match justifies.

Two histories are searched for places where the text ended as it ends now: the sequence's own, and a bounded cache of
past responses of the same salt. For every match length m the draft starts from all places that match at least m tokens and descends to
the most frequent next token (ties: the most recent). The path probability of a position is the product of count / total
along the way; the path ends where it would fall below suffix_decoding_min_token_prob, and after
suffix_decoding_max_spec_factor * m tokens. The path with the largest sum of path probabilities (the accepted tokens it
promises) is the draft; ties go to the longer match, then to the own history.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975). There suffix trees hold the counts; here hash chains find the
places, at most MAX_PLACES most recent ones per n-gram looked up. Two more differences: a draft may be as long as its match
allows (a tree of depth 24 ends after match + draft = 24), and at the end of the own history a copy goes on with itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

from headway.config import option
from headway.drafters.core.ngram_index import OWN_ESCAPE, SEPARATOR, NgramIndex, acceptance
from headway.drafters.drafter import Committed, ContinueDrafting, Drafter, DraftRequest, stop_early
from headway.errors import ConfigError
from headway.types import Draft

ORDERS = (1, 3)           # n-grams looked up; more orders find the same places sooner, at more cost per token
MAX_PLACES = 32
CACHE_TOKENS = 1 << 20    # the response cache never holds more; 40 bytes each
CACHE_ESCAPE = 5.0        # fitted like OWN_ESCAPE: what others wrote is the weaker evidence
SALT_STRIDE = 1 << 24     # more than any vocabulary has tokens; an int64 has room for 5e11 salts one after the other


@dataclass(frozen=True, slots=True)
class _Path:
    tokens: list[int]
    confidence: list[float]
    score: float


NO_PATH = _Path([], [], 0.0)


class ResponseCache:
    """The newest responses, at most `max_responses` of them and `max_tokens` (a power of two) tokens, separators included.

    They lie in one ring, each followed by a separator; the newest overwrite the oldest, so memory is fixed from the start. Token t of
    a response is kept as t plus a multiple of SALT_STRIDE that belongs to its salt, so tokens of two salts are never equal and nothing
    matches across. Salts share the ring's room.
    """

    def __init__(self, max_responses: int, max_tokens: int = CACHE_TOKENS) -> None:
        self.index = NgramIndex(ORDERS, window=max_tokens)
        self.index.extend([SEPARATOR])
        self._max_responses = max_responses
        self._max_tokens = max_tokens
        self._responses: deque[tuple[int, bytes]] = deque()   # (start, its leading separator included; salt), oldest first
        self._num_responses: Counter[bytes] = Counter()
        self._offsets: dict[bytes, int] = {}                  # of the salts that have responses
        self._unused_offsets = count(0, SALT_STRIDE)

    def __len__(self) -> int:
        return len(self._responses)

    def offset(self, salt: bytes) -> int | None:
        """What is added to each token of this salt; None while it has no responses."""
        return self._offsets.get(salt)

    def add(self, response: Sequence[int], salt: bytes = b"") -> None:
        response = response[-(self._max_tokens - 2) :]
        if salt not in self._offsets:
            self._offsets[salt] = next(self._unused_offsets)
        self._responses.append((self.index.end - 1, salt))
        self._num_responses[salt] += 1
        end = self.index.end + len(response) + 1
        while len(self._responses) > self._max_responses or end - self._responses[0][0] > self._max_tokens:
            self._drop_oldest()
        self.index.drop_before(self._responses[0][0])
        offset = self._offsets[salt]
        self.index.extend([*(token + offset for token in response), SEPARATOR])

    def _drop_oldest(self) -> None:
        _, salt = self._responses.popleft()
        self._num_responses[salt] -= 1
        if not self._num_responses[salt]:
            del self._num_responses[salt], self._offsets[salt]


class Suffix(Drafter):
    reads_commits = True

    @dataclass(frozen=True)
    class Options:
        """Names and defaults are vLLM's."""

        suffix_decoding_max_tree_depth: int = option(24, "longest match compared, and longest draft")
        suffix_decoding_max_cached_requests: int = option(10000, "past responses kept and drafted from, the oldest leave first; 0: none")
        suffix_decoding_max_spec_factor: float = option(1.0, "draft at most this many tokens per matched token")
        suffix_decoding_min_token_prob: float = option(0.1, "draft only tokens whose path is at least this probable, by counts")

        def __post_init__(self) -> None:
            for name, ok, accepted in (
                ("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth >= 1, ">= 1"),
                ("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests >= 0, ">= 0"),
                ("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor >= 0.0, ">= 0"),
                ("suffix_decoding_min_token_prob", 0.0 <= self.suffix_decoding_min_token_prob <= 1.0, "in [0, 1]"),
            ):
                if not ok:
                    raise ConfigError(f"{name} must be {accepted}, got {getattr(self, name)}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        cached = self.options.suffix_decoding_max_cached_requests
        self.cache = ResponseCache(cached) if cached else None
        self._indices: dict[int, NgramIndex] = {}
        self._committed: dict[int, Committed] = {}

    def propose(self, requests: Sequence[DraftRequest], continue_drafting: ContinueDrafting) -> list[Draft]:
        return stop_early(requests, [self._draft(request) for request in requests], continue_drafting)

    def commit(self, committed: Sequence[Committed]) -> None:
        # Indexing waits for the next draft or for `stop`: a sequence that does not speculate costs nothing here.
        for item in committed:
            self._committed[item.seq_id] = item

    def stop(self, seq_id: int) -> None:
        self._indices.pop(seq_id, None)
        last = self._committed.pop(seq_id, None)
        if last is not None and self.cache is not None and len(last.token_ids) > last.num_prompt_tokens:
            self.cache.add(last.token_ids[last.num_prompt_tokens :], last.salt)

    def _draft(self, request: DraftRequest) -> Draft:
        history = request.token_ids
        known = len(history) - request.num_tentative
        index = self._indices.get(request.seq_id)
        if index is None or index.end > known:
            index = self._indices[request.seq_id] = NgramIndex(ORDERS)
        index.extend(history[index.end : known])
        depth = self.options.suffix_decoding_max_tree_depth
        tail, k = history[-depth:], min(request.k, depth)
        # The last position is no earlier place: it is the end of the text itself.
        best = self._search(index, tail, index.end - 1, k, NO_PATH, OWN_ESCAPE)
        offset = self.cache.offset(request.salt) if self.cache is not None else None
        if self.cache is None or offset is None:
            return Draft(best.tokens, confidence=best.confidence)
        tail = [token + offset for token in tail] if offset else tail
        found = self._search(self.cache.index, tail, self.cache.index.end, k, best, CACHE_ESCAPE)
        tokens = found.tokens if found is best else [token - offset for token in found.tokens]
        return Draft(tokens, confidence=found.confidence)

    def _search(self, index: NgramIndex, tail: list[int], before: int, k: int, best: _Path, escape: float) -> _Path:
        """The best path that starts at a place of `index`, or `best` if none has a larger score."""
        searched = len(tail) + 1   # match lengths from here on are done
        for order in sorted(index.orders, reverse=True):
            # A path's score is at most its length, and shorter matches allow shorter paths only.
            if self._limit(searched - 1, k) <= best.score:
                break
            if order > len(tail):
                continue
            found = list(islice(index.occurrences(tail, order, before), MAX_PLACES))
            if found:
                lengths = index.match_lengths(found, tail)
                for matched in sorted({m for m in lengths if order <= m < searched}, reverse=True):
                    limit = self._limit(matched, k)
                    if limit <= best.score:
                        return best
                    rows = index.continuations([place for place, m in zip(found, lengths, strict=True) if m >= matched], limit)
                    path = _descend(rows, limit, self.options.suffix_decoding_min_token_prob, matched, escape)
                    if path.score > best.score:
                        best = path
            searched = order
        return best

    def _limit(self, matched: int, k: int) -> int:
        """Longest draft that a match of `matched` tokens justifies."""
        return int(min(k, matched * self.options.suffix_decoding_max_spec_factor + 1e-6))


def _descend(rows: list[list[int]], length: int, floor: float, matched: int, escape: float) -> _Path:
    """Follows the most frequent next token through `rows`, the continuations at each place, most recent first."""
    tokens: list[int] = []
    confidence: list[float] = []
    probability, score = 1.0, 0.0
    for j in range(length):
        counts: dict[int, int] = {}
        for row in rows:
            counts[row[j]] = counts.get(row[j], 0) + 1
        counts.pop(SEPARATOR, None)   # where a response ended nothing follows, but the place counts in the total
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        count, total = counts[token], len(rows)
        probability *= count / total
        if probability < floor:
            break
        tokens.append(token)
        confidence.append(acceptance(count, total, matched + j, escape))
        score += probability
        if count < total:
            rows = [row for row in rows if row[j] == token]
    return _Path(tokens, confidence, score)
