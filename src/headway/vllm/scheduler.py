"""What vLLM loads with `--scheduler-cls headway.vllm.Scheduler`: its own schedulers, with the number of drafts chosen step by step.

`Scheduler` makes the synchronous or the asynchronous one, as the server is configured; a subclass of only one of them would
switch the other off without a word. Whatever goes wrong inside Headway, vLLM goes on with the k it was configured with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm import __version__ as vllm_version
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

from headway.vllm import compat
from headway.vllm.adapter import Decision
from headway.vllm.build import Parts, build

logger = logging.getLogger("vllm.headway")


class _Lookup:
    """In the place of vLLM's table of batch sizes: asked once per step."""

    def __init__(self, num_to_draft: Callable[[], int]) -> None:
        self._num_to_draft = num_to_draft

    def __getitem__(self, num_requests: int) -> int:
        return self._num_to_draft()


class _Hooks:
    """Calls the adapter around vLLM's methods. After an exception in it, vLLM's own methods are all that runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts: Parts = build(self, vllm_version)
        self._adapter = self._parts.adapter
        if self._adapter is not None:
            self._vllm_lookup = getattr(self, "dynamic_sd_lookup", None)
            self.dynamic_sd_lookup: Any = _Lookup(self._num_to_draft)

    def _guarded(self, call: Callable[..., Any], *args: Any, default: Any = None, **kwargs: Any) -> Any:
        if self._adapter is None:
            return default
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        except Exception:
            self._adapter = None
            self.dynamic_sd_lookup = self._vllm_lookup
            self._parts.counters.turn_off("an error inside the controller; see the log", error=True)
            logger.exception("Headway's controller failed; from now on every step drafts the configured number of tokens")
            return default
        finally:
            self._parts.counters.observe_plugin((time.perf_counter() - began) * 1e3)

    def _num_to_draft(self) -> int:
        k: int = self._guarded(self._parts.num_to_draft, default=self.num_spec_tokens)  # type: ignore[attr-defined]
        return k

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._adapter is not None:
            self._guarded(self._adapter.read_output, scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """The last thing that `update_from_output` does: the requests are what the step made of them."""
        if self._adapter is not None:
            self._guarded(self._adapter.after_output)
        else:
            self._parts.counters.observe_fallback()
        idle = not self.has_unfinished_requests()  # type: ignore[attr-defined]
        self._guarded(self._parts.keep, idle=idle)
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        self._parts.sender.attach(stats, idle=idle)
        return stats

    def shutdown(self) -> None:
        self._parts.close()
        super().shutdown()  # type: ignore[misc]


class HeadwayScheduler(_Hooks, SyncScheduler):  # type: ignore[misc]
    """Sync: drafts are there when they are chosen from (ngram, suffix, custom_class, medusa)."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        adapter = self._adapter
        if adapter is not None:
            self._guarded(adapter.before_schedule)
        output = super().schedule(*args, **kwargs)
        if adapter is not None:
            self._guarded(adapter.after_schedule, output)
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        if self._adapter is not None:
            self._guarded(self._adapter.note_drafts, draft_token_ids)


class HeadwayAsyncScheduler(_Hooks, AsyncScheduler):  # type: ignore[misc]
    """Async: only the number of drafts is chosen, one step ahead (eagle, eagle3, mtp, draft_model, ngram_gpu)."""

    _placed: Decision | None = None

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        adapter, decided = self._adapter, self._placed
        self._placed = None
        give_placeholders = None
        if adapter is not None and scheduler_output.total_num_scheduled_tokens > 0:
            give_placeholders = self._guarded(adapter.place, scheduler_output)
            self._placed = adapter.take_decision()
            self._guarded(adapter.after_schedule, scheduler_output, decided_before=decided)
        super()._update_after_schedule(scheduler_output)
        if give_placeholders is not None:
            self._guarded(give_placeholders)


def Scheduler(*args: Any, **kwargs: Any) -> Any:
    """Called as vLLM calls a scheduler class. A vLLM that is not understood gets its own scheduler."""
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    ours, theirs = (HeadwayAsyncScheduler, AsyncScheduler) if is_async else (HeadwayScheduler, SyncScheduler)
    problems = compat.problems(vllm_version, theirs)
    if problems:
        logger.warning("Headway is off: %s", "; ".join(problems))
        return theirs(*args, **kwargs)
    return ours(*args, **kwargs)
