"""Prompts to measure with, the same for the same name, number and seed (and Python version: two of them come from its library).

    code-edit    a function of the standard library, to be repeated with one change: drafts from the prompt are nearly always right
    summarize    a passage of Python's own reference, to be summed up: names and phrases recur
    chat         80 everyday requests: little recurs
    reasoning    small problems of arithmetic and logic, to be solved step by step: formulas and names recur
    mixed        code-edit, summarize and chat in turn
    drift        16 of code-edit, 16 of chat, and so on in turn; drift:N has N of each
    random       random token ids: nothing recurs, and the model writes whatever it writes
    jsonl:PATH   one {"prompt": text} or {"messages": [...]} per line, in the file's order

No prompt is handed out twice: a repeated prompt would be answered from the prefix cache, and drafted from the answer to its twin.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ConfigError, unknown_key

NAMES = ("code-edit", "summarize", "chat", "reasoning", "mixed", "drift", "random")
DRIFT_LEN = 16
DRIFT_KINDS = ("code-edit", "chat")
# About 600 tokens of a code-aware vocabulary, about 500 of prose.
CODE_CHARS = (1500, 2500)
PROSE_CHARS = 2200
RANDOM_LEN = 512
FUNCTIONS_PER_FILE = 6
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "ensurepip"}
NEW_NAMES = ("payload", "candidate", "outcome", "record", "handle", "target_value", "current", "envelope", "cursor", "snapshot", "bundle")
PEOPLE = ("Ada", "Bruno", "Carla", "Deniz", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jana", "Kofi", "Lena")
# A second and later turn through the 80 requests differs from the first.
CHAT_VARIANTS = (
    "", " Answer in at most five sentences.", " Use a numbered list.", " Start with the most surprising point.", " Give one example.",
    " Write for a reader in a hurry.", " End with a question to me.", " Avoid technical terms.",
)


class ChatTokenizer(Protocol):
    """What turns a prompt into token ids (`engine.tokenizer.Tokenizer` does)."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Any) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of the three is set."""

    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def encode(self, tokenizer: ChatTokenizer) -> list[int]:
        if self.token_ids is not None:
            return list(self.token_ids)
        return tokenizer.apply_chat_template(list(self.messages)) if self.messages is not None else tokenizer.encode(self.text or "")


def load(name: str, num_prompts: int, seed: int, vocab_size: int | None = None) -> list[Prompt]:
    """`num_prompts` different prompts. Raises ConfigError: unknown workload, too few prompts in it, an unreadable line.

    vocab_size  for `random` only: ids are drawn from [0, vocab_size)
    """
    found = list(itertools.islice(_stream(name, seed, vocab_size), num_prompts))
    if len(found) < num_prompts:
        raise ConfigError(f"the workload {name} has {len(found)} different prompts, {num_prompts} were asked for (repeats included)")
    return found


def load_with_warmup(
    name: str, num_prompts: int, num_warmup: int, seed: int, vocab_size: int | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """`load`, and prompts of the same kind that are not among them; when a file has none left, `chat` ones."""
    prompts = load(name, num_prompts, seed, vocab_size)
    rest = list(itertools.islice(_stream(name, seed, vocab_size), num_prompts, num_prompts + num_warmup))
    return prompts, rest if len(rest) == num_warmup else load("chat", num_warmup, seed)


class Prompts:
    """Prompts of any workloads, asked for in any order; none is handed out twice, though `mixed` and `drift` consist of other workloads."""

    def __init__(self, seed: int, vocab_size: int | None = None) -> None:
        self._seed, self._vocab_size = seed, vocab_size
        self._kinds: dict[str, Iterator[str]] = {}
        self._streams: dict[str, Iterator[Prompt]] = {}

    def take(self, name: str, num_prompts: int) -> list[Prompt]:
        """The next prompts of the workload `name`. Raises ConfigError when it is unknown or used up."""
        found = list(itertools.islice(self.stream(name), num_prompts))
        if len(found) < num_prompts:
            raise ConfigError(f"the workload {name} has {len(found)} prompts left, {num_prompts} were asked for: use fewer rounds")
        return found

    def stream(self, name: str) -> Iterator[Prompt]:
        for kind in self._kinds.setdefault(name, _kinds(name)):
            if kind not in self._streams:
                self._streams[kind] = _source(kind, self._seed, self._vocab_size)
            prompt = next(self._streams[kind], None)
            if prompt is None:
                return
            yield prompt


def _stream(name: str, seed: int, vocab_size: int | None) -> Iterator[Prompt]:
    return Prompts(seed, vocab_size).stream(name)


def _kinds(name: str) -> Iterator[str]:
    """The workload of each prompt of `name`, which may be made of others."""
    if name == "mixed":
        return itertools.cycle(("code-edit", "summarize", "chat"))
    if name == "drift":
        name = f"drift:{DRIFT_LEN}"
    if name.startswith("drift:"):
        length = name.removeprefix("drift:")
        if not length.isdigit() or int(length) < 1:
            raise ConfigError(f"drift:N needs a whole number >= 1, got {name!r}")
        return itertools.chain.from_iterable(itertools.repeat(kind, int(length)) for kind in itertools.cycle(DRIFT_KINDS))
    return itertools.repeat(name)


def _source(kind: str, seed: int, vocab_size: int | None) -> Iterator[Prompt]:
    if kind.startswith("jsonl:"):
        return iter(read_jsonl(Path(kind.removeprefix("jsonl:"))))
    if kind == "random":
        if vocab_size is None:
            raise ConfigError("the workload random is token ids: it needs a tokenizer and the endpoint completions")
        return _random_ids(random.Random(seed), vocab_size)
    if kind not in GENERATORS:
        raise ConfigError(unknown_key("workload", kind, NAMES) + ", jsonl:PATH")
    return GENERATORS[kind](seed)


def read_jsonl(path: Path) -> list[Prompt]:
    """Raises ConfigError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the workload {path}: {error}") from error
    return [_parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse_line(line: str, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    accepted = 'a line is {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]}'
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        raise ConfigError(f"{where}: {accepted}")
    if "prompt" in item:
        if not isinstance(item["prompt"], str) or not item["prompt"]:
            raise ConfigError(f"{where}: prompt must be a text that is not empty")
        return Prompt(text=item["prompt"])
    messages = item["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ConfigError(f"{where}: {accepted}")
    return Prompt(messages=tuple(messages))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _ask(text: str) -> Prompt:
    return Prompt(messages=({"role": "user", "content": text},))


def _code_edit(seed: int) -> Iterator[Prompt]:
    rng = random.Random(seed)
    for source, node in _functions(rng):
        task = f"Repeat the following Python function with one change: {_change(node, rng)}. Answer with the code only."
        yield _ask(f"{task}\n\n```python\n{source}\n```")


def _functions(rng: random.Random) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(source, definition) of functions of CODE_CHARS characters, a few from each file, files in random order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(library).parts))
    if not files:
        raise ConfigError(f"the workload code-edit needs the standard library's sources, and {library} has none")
    rng.shuffle(files)
    seen: set[str] = set()
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")   # old escape sequences in the library
            tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name not in seen and not node.name.startswith("__"):
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if CODE_CHARS[0] <= len(source) <= CODE_CHARS[1]:
                    found.append((source, node))
        for source, node in rng.sample(found, min(FUNCTIONS_PER_FILE, len(found))):
            seen.add(node.name)
            yield source, node


def _change(node: ast.FunctionDef, rng: random.Random) -> str:
    parameters = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
    new = rng.choice([name for name in NEW_NAMES if name not in parameters])
    changes = [
        f"rename the function `{node.name}` to `{node.name.lstrip('_')}_{new}`",
        f"add the comment `# checked: {new}` as its first line",
    ]
    if parameters:
        changes.append(f"rename the parameter `{rng.choice(parameters)}` to `{new}`")
        changes.append(f"add a type annotation to the parameter `{rng.choice(parameters)}`")
    if ast.get_docstring(node) is None:
        changes.append("add a docstring of one line that says what it does")
    return rng.choice(changes)


def _summarize(seed: int) -> Iterator[Prompt]:
    from pydoc_data.topics import topics

    rng = random.Random(seed)
    # Some topics are printed in another one as well: each passage once.
    passages = list(dict.fromkeys(passage for name in sorted(topics) for passage in _passages(topics[name])))
    rng.shuffle(passages)
    passages = [passage for passage in passages if len(passage) >= PROSE_CHARS // 2]
    for passage in passages:
        sentences = rng.choice(("two", "three", "four"))
        yield _ask(f"Summarize the following text in {sentences} sentences.\n\n{passage}")


def _passages(text: str) -> Iterator[str]:
    """Consecutive whole paragraphs, at most PROSE_CHARS characters together; longer paragraphs are left out."""
    held = ""
    for paragraph in text.split("\n\n"):
        joined = f"{held}\n\n{paragraph}" if held else paragraph
        if len(joined) <= PROSE_CHARS:
            held = joined
        else:
            yield held
            held = paragraph if len(paragraph) <= PROSE_CHARS else ""
    yield held


def _chat(seed: int) -> Iterator[Prompt]:
    rng = random.Random(seed)
    items = json.loads(Path(__file__).with_name("chat_prompts.json").read_text(encoding="utf-8"))
    for variant in CHAT_VARIANTS:
        for item in rng.sample(items, len(items)):
            yield _ask(item["prompt"] + variant)


def _reasoning(seed: int) -> Iterator[Prompt]:
    """Each problem with numbers and names of its own, the problems in a new order each time."""
    rng = random.Random(seed)
    problems = json.loads(Path(__file__).with_name("reasoning_prompts.json").read_text(encoding="utf-8"))
    seen: set[str] = set()
    while True:
        for problem in rng.sample(problems, len(problems)):
            people = dict(zip(("n1", "n2", "n3", "n4", "n5"), rng.sample(PEOPLE, 5), strict=True))
            b, c, d = rng.sample(range(3, 16), 3)
            text = problem.format(a=rng.randrange(60, 900, 20), b=b, c=c, d=d + 15, e=rng.randrange(50, 100, 2), **people)
            if text not in seen:
                seen.add(text)
                yield _ask(f"{text} Think step by step, then give the answer in one sentence.")


def _random_ids(rng: random.Random, vocab_size: int) -> Iterator[Prompt]:
    while True:
        yield Prompt(token_ids=tuple(rng.randrange(vocab_size) for _ in range(RANDOM_LEN)))


GENERATORS: dict[str, Callable[[int], Iterator[Prompt]]] = {
    "code-edit": _code_edit, "summarize": _summarize, "chat": _chat, "reasoning": _reasoning,
}
