"""From a configuration to an engine's parts: drafters, memory plan, K/V cache, scheduler, verifier, and the policy, started with what
earlier runs learned."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.costs import CostModel
from headway.control.policy import Policy, Setup
from headway.drafters.drafter import Drafter, Target
from headway.engine import profile
from headway.engine.drafting import SequenceSampler, bind_drafters, hidden_layers_of
from headway.engine.kv_cache import BlockPool
from headway.engine.memory import MemoryPlan, plan_memory
from headway.engine.parts import EngineParts
from headway.engine.proposing import DrafterRunner
from headway.engine.runner import Runner
from headway.engine.scheduler import Scheduler
from headway.engine.structured.grammar import Backend, Compiler
from headway.engine.tokenizer import Tokenizer
from headway.engine.verify import Verifier
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.telemetry.learned_state import UNREADABLE, LearnedState
from headway.types import Sequence

logger = logging.getLogger("headway.learned")


@dataclass(frozen=True, slots=True)
class Built:
    """What a way to speculate is made of."""

    drafters: dict[str, Drafter]
    memory: MemoryPlan
    runner: Runner
    scheduler: Scheduler
    verifier: Verifier
    proposer: DrafterRunner


def build(
    config: EngineConfig, speculative: SpeculativeConfig | None, model: Decoder, sequences: Mapping[int, Sequence], progress: bool
) -> Built:
    """Around a loaded model, with an empty K/V cache. sequences: the live ones, by seq_id, whose parameters drafts are sampled with.

    Raises ConfigError or ModelError when a drafter cannot work for this target, or memory does not suffice.
    """
    drafters, drafter_memory = bind_drafters(speculative, config, model, progress)
    memory = plan_memory(config, model, drafter_memory)
    runner = Runner(model, memory.num_blocks, config.block_size, hidden_layers_of(drafters))
    pool = BlockPool(memory.num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=memory.max_model_len,
        drafters=tuple(drafters),
        max_k=speculative.num_speculative_tokens if speculative else 0,
        tree_sizes={name: drafter.tree_size for name, drafter in drafters.items() if drafter.tree_size},
        drafts_need_grammar=bool(drafters) and all(drafter.needs_grammar for drafter in drafters.values()),
    )
    verifier = Verifier(speculative, model.config.vocab_size, model.device)
    sampler = SequenceSampler(verifier.sampler, sequences)
    for drafter in drafters.values():
        drafter.load(Target(model, runner.cache, pool.generations, memory.max_model_len, sampler))
    return Built(drafters, memory, runner, scheduler, verifier, DrafterRunner(drafters, scheduler))


def open_learned(engine: EngineParts) -> LearnedState:
    """What is kept of this model on this machine, with costs that hold: measured where they are not known."""
    learned = LearnedState(profile.path_of(engine))
    costs = learned.costs
    if costs is None or not profile.holds(engine, costs):
        learned.measured(profile.measured(engine))
    return learned


def build_policy(engine: EngineParts, speculative: SpeculativeConfig, learned: LearnedState | None) -> Policy:
    """The policy of `speculative`, started; with `learned`, on its costs and followed by it."""
    views = engine.proposer.views
    policy: Policy = speculative.build_policy()
    if learned is None or learned.costs is None or not policy.needs_costs:
        policy.start(Setup(views, engine.scheduler.max_k, CostModel()))
        return policy
    key = f"{speculative.policy} {[(name, speculative.model_of(name)) for name in speculative.methods]}"
    try:
        policy.start(Setup(views, engine.scheduler.max_k, learned.costs, learned.learned(key)))
    except UNREADABLE as error:
        logger.warning("what the policy %s learned earlier cannot be read: %r", speculative.policy, error)
        policy = speculative.build_policy()
        policy.start(Setup(views, engine.scheduler.max_k, learned.costs))
    learned.follow(key, policy, learned.costs)
    return policy


def grammar_compiler(tokenizer: Tokenizer, model: ModelConfig) -> Compiler:
    """Compiles what requests ask of their text. The library and its table of tokens are loaded for the first one."""

    def backend() -> Backend:
        from headway.engine.structured.guidance import GuidanceBackend

        return GuidanceBackend(tokenizer, model.vocab_size, model.eos_token_ids)

    return Compiler(backend)
