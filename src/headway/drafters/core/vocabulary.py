"""Do two models mean the same by the same token id?"""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError

SHOWN = 3


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Raises ConfigError, saying where they differ, unless every id of either tokenizer is the same text in the other."""
    ours, theirs = _tokens(target), _tokens(draft)
    different = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if not different:
        return
    shown = "; ".join(f"token {i} is {_text(ours, i)} in the target, {_text(theirs, i)} in the draft model" for i in different[:SHOWN])
    more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    raise ConfigError(
        f"the draft model {draft} must have the vocabulary of the target {target} ({len(ours)} tokens, the draft model has {len(theirs)}): "
        f"{shown}{more}"
    )


def _text(tokens: dict[int, str], token_id: int) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "missing"


def _tokens(directory: Path) -> dict[int, str]:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{directory} has no tokenizer.json, so it cannot be told whether the draft model fits the target")
    return {token_id: text for text, token_id in Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).items()}
