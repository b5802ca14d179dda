"""Training on tiny models: the right gradients, the right network, resumed to the bit, exported as what drafts."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from headway.config import EngineConfig
from headway.drafters.core.eagle_network import load_eagle
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.models.attention import KVCache
from headway.models.decoder import Decoder
from headway.models.loader import load_model
from headway.train import data, losses, objective
from headway.train.batches import collate, epoch_order
from headway.train.data import Text, TextFile, read_texts
from headway.train.eagle3 import Eagle3Head, HeadShape
from headway.train.export import draft_vocabulary, write_speculator
from headway.train.hidden_states import HiddenStates, compute
from headway.train.initial import average, check_init, keep_init, new_head
from headway.train.options import LOSSES, TrainOptions
from headway.train.trainer import Progress, Trainer, TrainingError
from tests.tiny import tiny_model_dir

STEPS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tiny_model_dir(tmp_path_factory.mktemp("target"), "llama", seed=3, num_hidden_layers=3)
    return load_model(str(directory), dtype="float32", device="cpu", progress=False)


def greedy_texts(target: Decoder, count: int, length: int = 24) -> list[Text]:
    """What the target writes after random prompts."""
    random = torch.Generator().manual_seed(5)
    texts = []
    for _ in range(count):
        token_ids = torch.randint(3, 300, (6,), generator=random).tolist()
        while len(token_ids) < length:
            [example] = compute(target, (0,), [Text(token_ids, 1)])
            token_ids.append(int(target.logits(example.last[-1:]).argmax()))
        texts.append(Text(token_ids, 6))
    return texts


@pytest.fixture(scope="module")
def texts(target: Decoder) -> list[Text]:
    return greedy_texts(target, 12)


def make_trainer(target: Decoder, texts: list[Text], directory: Path, **changes: object) -> Trainer:
    options = TrainOptions(**{
        "out": str(directory), "batch_tokens": 96, "ttt_steps": STEPS, "learning_rate": 3e-3, "draft_vocab_size": 200, **changes,
    })  # type: ignore[arg-type]
    counts = torch.bincount(torch.tensor([t for text in texts for t in text.token_ids]), minlength=target.config.vocab_size)
    ids = draft_vocabulary(counts, options.draft_vocab_size)
    shape = HeadShape.of(target.config, len(ids))
    directory.mkdir(parents=True, exist_ok=True)
    features = HiddenStates(target, shape.layers, texts, directory, options.cache_bytes)
    features.store(lambda _: None)
    held_out = [collate(compute(target, shape.layers, texts[:3]), STEPS)]
    return Trainer(new_head(shape, target, ids, options.seed), target, texts, features, held_out, options, directory)


# -- losses -----------------------------------------------------------------------------------------------------------


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return F.log_softmax(torch.randn(5, 30, generator=random) * 2, -1), F.log_softmax(torch.randn(5, 30, generator=random) * 2, -1)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_distances(name: str) -> None:
    log_p, log_q = distributions()
    loss = losses.LOSSES[name]
    assert torch.allclose(loss(log_p, log_p), torch.zeros(5), atol=1e-6)
    assert (loss(log_p, log_q) > 0.01).all()
    log_q.requires_grad_()
    loss(log_p, log_q).sum().backward()
    assert log_q.grad is not None
    assert log_q.grad.isfinite().all()


def test_losses_are_what_their_names_say() -> None:
    log_p, log_q = distributions()
    p, q = log_p.exp(), log_q.exp()
    m = (p + q) / 2
    torch.testing.assert_close(losses.forward_kl(log_p, log_q), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(losses.reverse_kl(log_p, log_q), (q * (q / p).log()).sum(-1))
    torch.testing.assert_close(losses.jensen_shannon(log_p, log_q), 0.5 * ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)))
    torch.testing.assert_close(1 - losses.total_variation(log_p, log_q), torch.minimum(p, q).sum(-1))
    assert tuple(losses.LOSSES) == LOSSES


# -- the network ------------------------------------------------------------------------------------------------------


def test_an_exported_head_drafts_what_was_trained(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    """Logits of every draft step equal those of the network that the drafter `eagle` loads."""
    trainer = make_trainer(target, texts, tmp_path / "run")
    head = trainer.head
    with torch.no_grad():
        for parameter in head.parameters():   # not what it began as
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    write_speculator(tmp_path / "out", head, target, name="tiny", num_speculative_tokens=4, dtype=torch.float32)
    network = load_eagle(tmp_path / "out", target)
    assert network.hidden_layers == head.shape.layers
    assert torch.equal(network.target_ids, head.target_ids)
    [example] = compute(target, head.shape.layers, texts[:1])
    batch = collate([example], STEPS)
    length = len(example.token_ids)
    with torch.no_grad():
        trained = head.steps(batch.token_ids, batch.hidden, batch.lengths, trainer.targets.embedding, STEPS)
    cache = KVCache(network.shape, 4, 16, network.dtype, network.device)
    for row in (3, 11, length - STEPS - 2):
        hidden = [part[: row + 1] for part in torch.split(example.hidden, 64, -1)]
        plan = cache.plan([([0, 1, 2, 3], 0, row + 1)])
        x = network.forward(example.token_ids[1 : row + 2], torch.arange(row + 1), network.fuse(hidden), plan, cache)[-1:]
        for step in range(STEPS):
            logits, features = network.predict(x)
            torch.testing.assert_close(logits, head.lm_head(trained[step][:, row]), atol=2e-4, rtol=1e-4)
            at = row + 1 + step
            plan = cache.plan([([0, 1, 2, 3], at, 1)])
            x = network.forward(example.token_ids[at + 1 : at + 2], torch.tensor([at]), features, plan, cache)


def test_padding_changes_nothing(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    trainer = make_trainer(target, texts, tmp_path)
    short = Text(texts[1].token_ids[:15], 6)
    examples = compute(target, trainer.head.shape.layers, [texts[0], short])

    def total(batch: list[int]) -> torch.Tensor:
        return objective.distances(trainer.head, collate([examples[i] for i in batch], STEPS), trainer.targets, trainer.loss, STEPS)[0]

    torch.testing.assert_close(total([0, 1]), total([0]) + total([1]), rtol=1e-5, atol=1e-5)
    batch = collate(examples, STEPS)
    assert batch.learned().sum(-1).tolist() == [24 - 6, 15 - 6]


def test_acceptance_is_that_of_a_chain_of_drafts(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    """Counted by drafting at every position with the exported network, against what the target wrote."""
    trainer = make_trainer(target, texts, tmp_path / "run", draft_vocab_size=320)
    trainer.run(25, lambda _: None)
    found = trainer.evaluate()
    write_speculator(tmp_path / "out", trainer.head, target, name="tiny", num_speculative_tokens=4, dtype=torch.float32)
    network = load_eagle(tmp_path / "out", target)
    right, judged = [0] * STEPS, [0] * STEPS
    for text, example in zip(texts[:3], compute(target, trainer.head.shape.layers, texts[:3]), strict=True):
        cache = KVCache(network.shape, 4, 16, network.dtype, network.device)
        for row in range(text.num_prompt - 1, len(text.token_ids) - 1):
            hidden = [part[: row + 1] for part in torch.split(example.hidden, 64, -1)]
            plan = cache.plan([([0, 1, 2, 3], 0, row + 1)])
            x = network.forward(example.token_ids[1 : row + 2], torch.arange(row + 1), network.fuse(hidden), plan, cache)[-1:]
            for step in range(STEPS):
                at = row + 2 + step
                if at >= len(text.token_ids):
                    break
                logits, features = network.predict(x)
                token = int(logits.argmax()) if network.target_ids is None else int(network.target_ids[logits.argmax()])
                judged[step] += 1
                if token != text.token_ids[at]:
                    break
                right[step] += 1
                plan = cache.plan([([0, 1, 2, 3], at - 1, 1)])
                x = network.forward(torch.tensor([token]), torch.tensor([at - 1]), features, plan, cache)
    assert found == pytest.approx([r / max(1, j) for r, j in zip(right, judged, strict=True)])
    assert sum(right) > 0
    assert objective.mean_acceptance_length([0.5, 0.5]) == 1.75


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_falls(target: Decoder, texts: list[Text], tmp_path: Path, loss: str) -> None:
    seen: list[Progress] = []
    trainer = make_trainer(target, texts, tmp_path, loss=loss)
    trainer.run(60, seen.append)
    assert seen[-1].loss < 0.75 * seen[0].loss
    evaluated = [p.acceptance for p in seen if p.acceptance is not None]
    assert len(evaluated) >= 10
    assert [p.step for p in seen] == list(range(1, 61))
    rates = [p.learning_rate for p in seen]
    assert max(rates) == pytest.approx(3e-3, rel=0.05)
    assert rates[-1] < 0.1 * max(rates)


@pytest.mark.parametrize("on_policy", [0.0, 0.5])
def test_resuming_is_going_on_to_the_bit(target: Decoder, texts: list[Text], tmp_path: Path, on_policy: float) -> None:
    whole = make_trainer(target, texts, tmp_path / "a", on_policy=on_policy)
    whole.run(9, lambda _: None)
    first = make_trainer(target, texts, tmp_path / "b", on_policy=on_policy)
    first.run(9, lambda _: None, stop=lambda: first.step == 4)
    again = make_trainer(target, texts, tmp_path / "b", on_policy=on_policy)
    assert again.load()
    assert again.step == 4
    again.run(9, lambda _: None)
    for (name, a), (_, b) in zip(whole.head.state_dict().items(), again.head.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert whole.epoch == again.epoch > 0


def test_a_loss_that_is_not_a_number_keeps_the_last_good_state(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    trainer = make_trainer(target, texts, tmp_path)
    trainer.run(3, lambda _: None)
    good = trainer.checkpoint.read_bytes()
    with torch.no_grad():
        trainer.head.fc.weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="not a number at step 4"):
        trainer.run(6, lambda _: None)
    assert trainer.checkpoint.read_bytes() == good
    again = make_trainer(target, texts, tmp_path)
    assert again.load()
    assert all(parameter.isfinite().all() for parameter in again.head.parameters())


def test_a_damaged_checkpoint_is_named(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    trainer = make_trainer(target, texts, tmp_path)
    assert not trainer.load()
    trainer.save()
    trainer.checkpoint.write_bytes(trainer.checkpoint.read_bytes()[:1000])
    with pytest.raises(TrainingError, match=r"checkpoint.pt cannot be resumed from"):
        trainer.load()


def test_the_time_is_kept(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    trainer = make_trainer(target, texts, tmp_path)
    assert trainer.measure() > 0
    assert all(parameter.grad is None for parameter in trainer.head.parameters())
    trainer.run(10**6, lambda _: None, deadline=time.monotonic())
    assert trainer.step == 0
    assert trainer.checkpoint.exists()


def test_own_mistakes_are_learned_from(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    """On-policy texts carry the drafter's tokens in the answer only, and the target's hidden states for them."""
    trainer = make_trainer(target, texts, tmp_path, on_policy=1.0)
    import numpy as np

    batch = collate(trainer.features.get([0, 1]), STEPS)
    mixed = trainer._on_policy(batch, [0, 1], np.random.default_rng(0))
    changed = (mixed.token_ids != batch.token_ids).nonzero().tolist()
    assert changed
    assert all(column > 6 for _, column in changed)
    row, column = changed[0]
    assert torch.equal(mixed.hidden[row, : column - 1], batch.hidden[row, : column - 1])
    assert not torch.equal(mixed.hidden[row, column], batch.hidden[row, column])


def test_every_text_once_an_epoch() -> None:
    lengths = [5, 900, 40, 41, 42, 300, 7, 1024, 60]
    for epoch in range(3):
        steps = epoch_order(lengths, 600, 1, epoch)
        assert sorted(i for step in steps for micro in step for i in micro) == list(range(9))
        assert steps == epoch_order(lengths, 600, 1, epoch)
    assert epoch_order(lengths, 600, 1, 0) != epoch_order(lengths, 600, 1, 1)


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 5000, 1 << 30])
def test_hidden_states_are_the_same_from_disk_and_computed(target: Decoder, texts: list[Text], tmp_path: Path, limit: int) -> None:
    features = HiddenStates(target, (0, 1, 2), texts, tmp_path, limit)
    features.store(lambda _: None)
    size = sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix == ".bin")
    assert size <= limit
    assert features.num_stored == {0: 0, 5000: 0, 1 << 30: 12}[limit]
    for example, text in zip(features.get([3, 0, 11]), (texts[3], texts[0], texts[11]), strict=True):
        [alone] = compute(target, (0, 1, 2), [text])
        for a, b in zip(example[:4], alone[:4], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_hidden_states_are_not_computed_twice(target: Decoder, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HiddenStates(target, (0, 1), texts, tmp_path, 1 << 30).store(lambda _: None)
    calls = []
    monkeypatch.setattr("headway.train.hidden_states.compute", lambda *a: calls.append(a) or compute(*a))
    again = HiddenStates(target, (0, 1), texts, tmp_path, 1 << 30)
    again.store(lambda _: None)
    again.get([1, 2])
    assert not calls
    other = HiddenStates(target, (0, 1), texts[::-1], tmp_path, 1 << 30)
    other.store(lambda _: None)
    assert calls


def test_the_draft_vocabulary_is_the_most_frequent() -> None:
    counts = torch.tensor([0, 5, 0, 9, 9, 1])
    assert draft_vocabulary(counts, 3).tolist() == [1, 3, 4]
    assert draft_vocabulary(counts, 5).tolist() == [0, 1, 3, 4, 5]
    assert draft_vocabulary(counts, 99).tolist() == list(range(6))


def test_an_earlier_speculator_is_gone_on_from(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    trainer = make_trainer(target, texts, tmp_path / "first")
    trainer.run(3, lambda _: None)
    old = trainer.head
    write_speculator(tmp_path / "old", old, target, name="tiny", num_speculative_tokens=3, dtype=torch.float32)
    ids = torch.cat([old.target_ids[10:], torch.tensor([token for token in range(320) if token not in old.target_ids][:4])]).sort().values
    shape = HeadShape.of(target.config, len(ids))
    head, fresh = new_head(shape, target, ids, 7, str(tmp_path / "old")), new_head(shape, target, ids, 7)
    before, after, random = old.state_dict(), head.state_dict(), fresh.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "lm_head.weight")
    known = {token: row for row, token in enumerate(old.target_ids.tolist())}
    for row, token in enumerate(ids.tolist()):
        source = before["lm_head.weight"][known[token]] if token in known else random["lm_head.weight"][row]
        assert torch.equal(after["lm_head.weight"][row], source)


def test_what_was_gone_on_from_has_half_a_say(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    old = make_trainer(target, texts, tmp_path / "first").head
    write_speculator(tmp_path / "old", old, target, name="tiny", num_speculative_tokens=3, dtype=torch.float32)
    kept = keep_init(str(tmp_path / "old"), tmp_path / "run")
    assert kept is not None
    (tmp_path / "old" / "model.safetensors").write_bytes(b"what was made of it")
    assert keep_init(str(tmp_path / "old"), tmp_path / "run") == kept, "a later run begins from the same"
    ids = torch.cat([old.target_ids[10:], torch.tensor([token for token in range(320) if token not in old.target_ids][:4])]).sort().values
    head = new_head(HeadShape.of(target.config, len(ids)), target, ids, 7, kept)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 1.0
    average(head, kept)
    before, after = old.state_dict(), head.state_dict()
    for name in before.keys() - {"lm_head.weight"}:
        torch.testing.assert_close(after[name], before[name] + 0.5)
    known = {token: row for row, token in enumerate(old.target_ids.tolist())}
    fresh = new_head(HeadShape.of(target.config, len(ids)), target, ids, 7, kept).state_dict()["lm_head.weight"]
    for row, token in enumerate(ids.tolist()):
        torch.testing.assert_close(after["lm_head.weight"][row], fresh[row] + (0.5 if token in known else 1.0))


def test_what_cannot_be_gone_on_from_is_named(target: Decoder, texts: list[Text], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        check_init(str(tmp_path))
    trainer = make_trainer(target, texts, tmp_path / "first")
    ids = trainer.head.target_ids
    write_speculator(tmp_path / "old", trainer.head, target, name="tiny", num_speculative_tokens=3)
    path = tmp_path / "old" / "model.safetensors"
    state = load_file(path)
    cut = {name: state[name][:3].clone() for name in ("fc.weight", "lm_head.weight")}
    for name, broken in (*cut.items(), ("d2t", None)):
        save_file({key: value for key, value in {**state, name: broken}.items() if value is not None}, path)
        with pytest.raises(ConfigError, match=name):
            new_head(trainer.head.shape, target, ids, 0, str(tmp_path / "old"))
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(ConfigError, match="cannot read"):
        new_head(trainer.head.shape, target, ids, 0, str(tmp_path / "old"))


@pytest.fixture(scope="module")
def engine(target: Decoder) -> Engine:
    return Engine(EngineConfig(model=str(target.directory), dtype="float32", device="cpu", max_num_seqs=4))


def write(engine: Engine, file: TextFile, num_texts: int, **extra: object) -> None:
    data.write_texts(
        engine, file, extra.pop("prompts", None), max_tokens=12, seed=1, deadline=math.inf, num_tokens=None, num_texts=num_texts, **extra,  # type: ignore[arg-type]
    )


def test_the_model_writes_its_own_prompts_and_answers(engine: Engine, tmp_path: Path) -> None:
    file = TextFile(tmp_path / "texts.jsonl", [])
    write(engine, file, 3)
    texts = read_texts(file.path)
    assert len(texts) == file.num_texts == 3
    for text in texts:
        words = engine.tokenizer.decode(text.token_ids[: text.num_prompt], skip_special_tokens=False)
        assert words.startswith("<|im_start|>user\n")
        assert words.endswith("<|im_start|>assistant\n")
        assert 2 <= text.num_answer <= 12
    assert len({tuple(text.token_ids[: text.num_prompt]) for text in texts}) == 3
    assert not engine.has_work()
    file.path.write_text(file.path.read_text() + '{"num_prompt": 3, "tok', encoding="utf-8")
    again = TextFile(file.path, [])
    write(engine, again, 5)
    assert read_texts(file.path)[:3] == texts
    assert len(read_texts(file.path)) == 5


def test_known_prompts_are_not_new(tmp_path: Path) -> None:
    file = TextFile(tmp_path / "texts.jsonl", [Text([1, 2, 3, 4], 2)])
    assert not file.is_new([1, 2])
    assert file.is_new([1, 2, 3])
    file.add(Text([1, 2, 3, 9], 3))
    assert not TextFile(tmp_path / "texts.jsonl", []).is_new([1, 2, 3])


def test_long_answers_are_not_left_out_of_few(engine: Engine, tmp_path: Path) -> None:
    """Whatever was begun is finished: of the answers to eight prompts those that end first are not the first three to be kept."""
    prompts = [[*engine.tokenizer.encode(word, add_special_tokens=False), 5, 6, 7] for word in "abcdefgh"]
    file = TextFile(tmp_path / "texts.jsonl", [])
    write(engine, file, 3, prompts=iter(prompts), aside=True)
    assert {tuple(text.token_ids[: text.num_prompt]) for text in read_texts(file.path)} == {tuple(prompt) for prompt in prompts[:3]}


def test_the_users_own_texts(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]},
        {"prompt": "once"},
        {"text": "all of it"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    prompts, complete = data.read_user_file(path, engine, 200)
    assert [engine.tokenizer.decode(p, skip_special_tokens=False) for p in prompts] == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "once",
    ]
    assert engine.tokenizer.decode(complete[0].token_ids[complete[0].num_prompt :], skip_special_tokens=False) == "you<|im_end|>\n"
    assert complete[1].num_prompt == 1
    file = TextFile(tmp_path / "texts.jsonl", [])
    write(engine, file, 10, prompts=iter(prompts))
    assert sorted(text.num_prompt for text in read_texts(file.path)) == sorted(map(len, prompts))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"), ("[]", 'expected an object with "messages"'), ('{"messages": []}', "expected an object"),
        ('{"messages": [{"role": "user", "content": 5}]}', "a content that is a string"), ('{"text": 5}', "expected an object"),
    ],
)  # fmt: skip
def test_errors_in_the_users_texts_name_the_line(engine: Engine, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        data.read_user_file(path, engine, 100)
    assert "line 2" in str(error.value)
    with pytest.raises(ConfigError, match="cannot read --data"):
        data.read_user_file(tmp_path / "none.jsonl", engine, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": ""}, "--out"), ({"minutes": 0.0}, "minutes must be > 0"), ({"loss": "mse"}, "unknown loss 'mse'"),
        ({"ttt_steps": 0}, "ttt_steps"), ({"on_policy": 2.0}, "on_policy"), ({"learning_rate": 0.0}, "learning_rate"),
    ],
)  # fmt: skip
def test_options_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TrainOptions(out="x"), **changes)   # type: ignore[arg-type]


def test_the_shape_reads_low_middle_and_high(target: Decoder) -> None:
    assert HeadShape.of(dataclasses.replace(target.config, num_layers=30), 8).layers == (1, 14, 26)
    assert HeadShape.of(target.config, 8).layers == (0, 1, 2)
    assert isinstance(new_head(HeadShape.of(target.config, 8), target, torch.arange(8), 0), Eagle3Head)
