"""Registers `preft-hf` and `preft-vllm` with lm-evaluation-harness: importing this module is all it takes."""

from __future__ import annotations

from preft.eval.hf_model import PreftHFLM
from preft.eval.vllm_model import PreftVLLM

PreftModel = PreftHFLM | PreftVLLM

__all__ = ["PreftHFLM", "PreftModel", "PreftVLLM"]
