"""What an engine is made of, as far as the modules around it read it."""

from __future__ import annotations

from typing import Protocol

from headway.drafters.drafter import Drafter
from headway.engine.proposing import DrafterRunner
from headway.engine.runner import Runner
from headway.engine.scheduler import Scheduler
from headway.engine.structured.grammar import Compiler
from headway.engine.tokenizer import Tokenizer
from headway.engine.verify import Verifier
from headway.models.decoder import Decoder


class EngineParts(Protocol):
    """`Engine` is one."""

    model: Decoder
    tokenizer: Tokenizer
    grammars: Compiler
    max_model_len: int
    drafters: dict[str, Drafter]
    runner: Runner
    scheduler: Scheduler
    verifier: Verifier
    proposer: DrafterRunner
