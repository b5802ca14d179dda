"""What one client can learn of another's answers, by the very attack: with the caches shared it works, with salts or keys it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.config import SpeculativeConfig
from headway.llm import LLM
from headway.server.options import ServerOptions
from tests.integration.conftest import MODEL, LiveServer, live_server

DIGITS = [3 + byte for byte in b"0123456789"]   # the tiny tokenizer's ids
NUM_KNOWN, NUM_SECRET = 4, 6
QUESTION = "What is the number of the account that was opened yesterday?"
DRAFTING = {"method": "suffix", "policy": "static", "num_speculative_tokens": 8}
SUFFIX = SpeculativeConfig.parse(DRAFTING)
FORGETFUL = SpeculativeConfig.parse({**DRAFTING, "suffix_decoding_max_cached_requests": 0})


class Client:
    """One who asks the server, with an API key or a salt of their own."""

    def __init__(self, server: LiveServer, key: str | None = None, salt: str | None = None) -> None:
        self.server = server
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.salt = {"cache_salt": salt} if salt else {}

    def ask(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        response = self.server.client.post(path, json={**body, **self.salt}, headers=self.headers)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def is_told_a_number(self) -> list[int]:
        """The tokens of an answer that is digits, drawn at random."""
        answer = self.ask(
            prompt=QUESTION, seed=12, max_tokens=NUM_KNOWN + NUM_SECRET + 6, logit_bias=dict.fromkeys(DIGITS, 100), ignore_eos=True,
            logprobs=0, temperature=2,
        )["choices"][0]
        return [DIGITS["0123456789".index(text)] for text in answer["logprobs"]["tokens"]]

    def num_drafts(self, text: list[int], guess: int) -> int:
        """Has `guess` written behind the text, and counts the drafts that were refused: what is remembered goes on otherwise."""
        usage = self.ask(prompt=text, max_tokens=8, temperature=0, logit_bias={guess: 100})["usage"]
        return int(usage["completion_tokens_details"]["rejected_prediction_tokens"])

    def attacks(self, known: list[int]) -> tuple[list[int], list[list[int]]]:
        """(the digits behind `known`, as they look from here; what was seen)."""
        text, seen = list(known), []
        for _ in range(NUM_SECRET):
            seen.append([self.num_drafts(text, guess) for guess in DIGITS])
            text.append(DIGITS[seen[-1].index(max(seen[-1]))])
        return text[len(known) :], seen


@pytest.fixture
def serve(tiny_dir: Path) -> Iterator[Any]:
    """serve(**options): a server that drafts from what it remembers."""
    return lambda speculative=SUFFIX, **options: live_server(
        tiny_dir, ServerOptions(served_model_name=MODEL, **options), speculative=speculative, block_size=16, profile=False
    )


def attack(server: LiveServer, victim: Client | None, attacker: Client, answer: list[int] | None = None) -> Any:
    """What the attacker takes for the secret, whether it is, and what was seen. Without a victim the answer was never written here."""
    answer = victim.is_told_a_number() if victim else answer
    assert answer is not None
    known, secret = answer[:NUM_KNOWN], answer[NUM_KNOWN : NUM_KNOWN + NUM_SECRET]
    assert len(set(secret)) > 3
    found, seen = attacker.attacks(known)
    return answer, found == secret, seen


def test_the_attack_works_where_the_memory_is_shared(serve):
    with serve() as server:
        _, found, _ = attack(server, Client(server), Client(server))
        assert found
    with serve(api_key=("one",)) as server:
        _, found, _ = attack(server, Client(server, "one"), Client(server, "one"))
        assert found
    with serve(api_key=("one", "two")) as server:   # a key is a client: their own answers are remembered for them
        _, found, _ = attack(server, Client(server, "two"), Client(server, "two"))
        assert found


@pytest.mark.parametrize(
    ("keys", "victim", "attacker"),
    [
        ((), {"salt": "a"}, {}),
        ((), {}, {"salt": "a"}),
        ((), {"salt": "a"}, {"salt": "b"}),
        (("one", "two"), {"key": "one"}, {"key": "two"}),
        (("one", "two"), {"key": "one", "salt": "a"}, {"key": "two", "salt": "a"}),
        (("one", "two"), {"key": "one", "salt": "a"}, {"key": "one"}),
    ],
)
def test_the_attack_sees_nothing_through_a_salt_or_another_key(serve, keys, victim, attacker):
    with serve(api_key=keys) as server:
        answer, found, seen = attack(server, Client(server, **victim), Client(server, **attacker))
        assert not found
    with serve(api_key=keys) as untouched:   # where there was nobody to learn from
        assert attack(untouched, None, Client(untouched, **attacker), answer)[2] == seen


def test_a_drafter_that_keeps_no_answers_tells_none(serve):
    with serve(FORGETFUL) as server:
        _, found, _ = attack(server, Client(server), Client(server))
        assert not found


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "x" * 50}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 50}]}),
])  # fmt: skip
def test_prefixes_are_found_by_the_same_salt_only(serve, path, body):
    def cached(client: Client) -> int:
        return int(client.ask(path, **body, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serve(api_key=("one", "two")) as server:
        seen = [cached(Client(server, key, salt)) for key in ("one", "two") for salt in (None, "a", "b")]
        assert seen == [0] * 6
        again = [cached(Client(server, key, salt)) for key in ("one", "two") for salt in (None, "a", "b")]
        assert min(again) >= 48
        server.assert_idle()


def test_a_remembered_answer_is_drafted_for_its_own_salt(serve):
    """The same question again: what a salt keeps apart still pays within it."""
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with serve() as server:
        accepted = [
            Client(server, salt=salt).ask(**body)["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
            for salt in ("a", "b", "a", "b")
        ]
    assert accepted[0] == accepted[1] < accepted[2] == accepted[3]


def test_an_empty_salt_is_a_400(server: LiveServer):
    for wrong in ("", 5, ["a"]):
        response = server.client.post("/v1/completions", json={"prompt": "x", "cache_salt": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "cache_salt"


def test_salts_offline(tiny_dir: Path):
    llm = LLM(str(tiny_dir), dtype="float32", kv_cache_memory_bytes=4 * 2**20, block_size=16, speculative_config=None)

    def cached(**prompt: str) -> int:
        return llm.generate([prompt], use_tqdm=False)[0].num_cached_tokens

    text = "y" * 40
    assert [cached(prompt=text, cache_salt="a"), cached(prompt=text, cache_salt="b"), cached(prompt=text)] == [0, 0, 0]
    assert [cached(prompt=text, cache_salt="a"), cached(prompt=text)] == [32, 32]
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string"):
        cached(prompt=text, cache_salt="")
