"""A step without drafts should cost what it costs in a vLLM that does not speculate.

vLLM's model runner sends every step of a speculating server through its rejection sampler, which copies all logits, and asks a drafter of
the user's own (`custom_class`) for drafts even where none will be verified. Where Headway is at work, a model runner gets two short cuts:

    no drafts in this step      tokens are sampled as vLLM samples them without speculation: what the rejection sampler does with none
    none wanted for the next    the drafter is not asked

vLLM loads this in every process by entry point (`vllm.general_plugins`). A runner that does not have what is expected here stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

PACKAGE = "headway.vllm."
SKIPPED = ("ngram", "custom_class")   # drafters that miss nothing in steps in which they are not asked
HOOKS = {"_sample": ("logits", "spec_decode_metadata"), "propose_draft_token_ids": ("scheduler_output", "sampled_token_ids")}

logger = logging.getLogger("vllm.headway")


def register() -> None:
    """Called by vLLM, in some processes more than once."""
    try:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        prepare = WorkerWrapperBase.initialize_from_config
    except (ImportError, AttributeError) as error:
        logger.warning("steps without drafts cost what vLLM makes them cost: %r", error)
        return
    if getattr(prepare, "by_headway", False):
        return

    @functools.wraps(prepare)
    def prepare_and_lighten(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = prepare(self, *args, **kwargs)
        lighten(getattr(getattr(self, "worker", None), "model_runner", None))
        return found

    prepare_and_lighten.by_headway = True   # type: ignore[attr-defined]
    WorkerWrapperBase.initialize_from_config = prepare_and_lighten


def lighten(runner: Any) -> bool:
    """Gives `runner`, this one object, the short cuts; False: it stays as it is. Raises nothing."""
    config = getattr(runner, "vllm_config", None)
    spec = getattr(config, "speculative_config", None)
    if spec is None or not concerns(config):
        return False
    for name, needed in HOOKS.items():
        method = getattr(runner, name, None)
        if not callable(method) or tuple(inspect.signature(method).parameters)[: len(needed)] != needed:
            logger.info("steps without drafts cost what vLLM makes them cost: %s has no %s%s", type(runner).__name__, name, needed)
            return False
    runner._sample = functools.partial(_sample, runner._sample)
    if spec.method in SKIPPED:
        runner.propose_draft_token_ids = functools.partial(_propose, runner.propose_draft_token_ids)
    return True


def concerns(config: Any) -> bool:
    """Whether `config`, vLLM's, names Headway's scheduler or proposer."""
    scheduler, model = config.scheduler_config.scheduler_cls, config.speculative_config.model
    return any(isinstance(name, str) and name.startswith(PACKAGE) for name in (scheduler, model))


def _sample(sample: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """Rows without drafts have one row of logits each, in order."""
    if spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0:
        spec_decode_metadata = None
    return sample(logits, spec_decode_metadata)


def _propose(propose: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
    if scheduler_output.num_spec_tokens_to_schedule == 0:
        return [[] for _ in sampled_token_ids]
    return propose(scheduler_output, sampled_token_ids, *args, **kwargs)
