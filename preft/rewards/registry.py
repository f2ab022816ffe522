"""Rewards by their names in a recipe, and the sum of several."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from preft.errors import EngineError, PreftError, UsageError
from preft.rewards.format import DEFAULT_TAGS, FormatReward, RegexReward
from preft.rewards.sandbox import Limits

BUILT_IN = ("math", "regex", "format", "python-tests")
"""Names beside `module:function`."""


class Reward(Protocol):
    """Says how good a completion is."""

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Scores one completion.

        Args:
            prompt: The prompt's text, as the model got it.
            completion: The completion's text, without special tokens.
            row: The row of data that the prompt comes from.
        """


@dataclass(frozen=True)
class RewardOptions:
    """What the rewards need beside their names.

    Attributes:
        pattern: Of `regex`.
        tags: Of `format`.
        run_code: Whether `python-tests` may run what a model wrote, in the sandbox.
        limits: Of the sandbox.
        path: Where `module:function` is looked for.
    """

    pattern: str | None = None
    tags: Sequence[str] = DEFAULT_TAGS
    run_code: bool = False
    limits: Limits | None = None
    path: Path | str = "."


@dataclass(frozen=True)
class Sample:
    """One completion to score; see `Reward`."""

    prompt: str
    completion: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """Scores of some completions.

    Attributes:
        total: Weighted sum for each completion.
        parts: Each reward's own scores, before its weight, by name.
    """

    total: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]


class RewardSum:
    """Several rewards and their weights.

    Args:
        rewards: By name, in their order.
        weights: One for each.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Sequence[float]) -> None:
        if not rewards or len(rewards) != len(weights) or not all(math.isfinite(weight) for weight in weights):
            raise UsageError(
                "Rewards and weights do not go together",
                got=f"{len(rewards)} rewards, weights {list(weights)}",
                accepted="at least one reward, and a finite weight for each",
            )
        self._rewards, self.weights = dict(rewards), tuple(weights)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards."""
        return tuple(self._rewards)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Scores completions.

        Raises:
            EngineError: A user's function fails, or returns something that is no finite number.
            PreftError: A row lacks what a reward needs.
        """
        parts = {name: tuple(_scores(name, reward, samples)) for name, reward in self._rewards.items()}
        columns = zip(*parts.values(), strict=True)
        total = tuple(sum(w * value for w, value in zip(self.weights, column, strict=True)) for column in columns)
        return Scores(total, parts)

    def close(self) -> None:
        """Ends what the rewards have started."""
        for reward in self._rewards.values():
            close = getattr(reward, "close", None)
            if close is not None:
                close()


def build_rewards(
    names: Sequence[str], weights: Sequence[float] | None = None, options: RewardOptions | None = None
) -> RewardSum:
    """Makes the rewards that a recipe names.

    Args:
        names: Of `BUILT_IN`, or `module:function`.
        weights: One for each; None for 1 each.
        options: What they need.

    Raises:
        UsageError: A name is unknown or stands twice, an option is missing, or code may not be run.
        UnsupportedError: This machine cannot confine what would be run.
    """
    options = options or RewardOptions()
    if len(set(names)) < len(names):
        raise UsageError("A reward stands twice", got=", ".join(f"`{name}`" for name in names), accepted="each once")
    return RewardSum(
        {name: _build(name, options) for name in names}, [1.0] * len(names) if weights is None else list(weights)
    )


def _build(name: str, options: RewardOptions) -> Reward:
    makers: dict[str, Callable[[RewardOptions], Reward]] = {
        "math": _math,
        "regex": _regex,
        "format": lambda given: FormatReward(given.tags),
        "python-tests": _python_tests,
    }
    if name in makers:
        return makers[name](options)
    if ":" in name:
        from preft.rewards.user import UserReward

        return UserReward(name, options.path)
    known = ", ".join(f"`{known}`" for known in BUILT_IN)
    raise UsageError(f"Unknown reward: `{name}`", accepted=f"{known}, or `module:function`")


def _math(options: RewardOptions) -> Reward:
    from preft.rewards.math import MathReward

    return MathReward()


def _regex(options: RewardOptions) -> Reward:
    if options.pattern is None:
        raise UsageError("The reward `regex` has no pattern", hint="set `reward.pattern`")
    return RegexReward(options.pattern)


def _python_tests(options: RewardOptions) -> Reward:
    if not options.run_code:
        raise UsageError(
            "The reward `python-tests` runs what the model wrote, and that was not allowed",
            accepted="`reward.run_code: true`",
            hint="it runs confined: see docs/guides/grpo.md",
        )
    from preft.rewards.code import PythonTestsReward

    return PythonTestsReward(options.limits)


def _scores(name: str, reward: Reward, samples: Sequence[Sample]) -> list[float]:
    if name != "python-tests":
        return [_score(name, reward, sample) for sample in samples]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda sample: _score(name, reward, sample), samples))


def _score(name: str, reward: Reward, sample: Sample) -> float:
    try:
        value = reward(sample.prompt, sample.completion, sample.row)
        number = float(value)
    except PreftError:
        raise
    except Exception as error:  # whatever a user's function does
        raise EngineError(
            f"The reward `{name}` failed", got=f"{type(error).__name__}: {error}"[:200], accepted="a finite number"
        ) from error
    if not math.isfinite(number):
        raise EngineError(f"The reward `{name}` is not finite", got=repr(value)[:60], accepted="a finite number")
    return number
