"""Headway: speculative decoding that pays at every load, losslessly and without tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.config import EngineConfig, SpeculativeConfig
from headway.errors import ConfigError, HeadwayError, InvalidRequestError, ModelError, QueueFullError
from headway.sampling_params import RequestSpeculation, SamplingParams
from headway.structured_outputs import StructuredOutputsParams
from headway.types import Request
from headway.version import __version__

if TYPE_CHECKING:
    from headway.engine.engine import Engine
    from headway.llm import LLM, CompletionOutput, RequestOutput

__all__ = [
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "HeadwayError",
    "InvalidRequestError",
    "LLM",
    "ModelError",
    "QueueFullError",
    "Request",
    "RequestOutput",
    "RequestSpeculation",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "__version__",
]

_NEED_TORCH = {"Engine": "headway.engine.engine", "LLM": "headway.llm", "CompletionOutput": "headway.llm", "RequestOutput": "headway.llm"}


def __getattr__(name: str) -> Any:
    """Names that need torch are imported when first used, so that `import headway` stays quick."""
    if name in _NEED_TORCH:
        import importlib

        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
