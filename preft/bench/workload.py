"""Which adapter each request names, and what its prompt is: the same for every arm, new for every run."""

from __future__ import annotations

import random
from dataclasses import dataclass

from preft.errors import UsageError

ACCEPTED = "distinct, uniform, zipf:A with A above 0 such as zipf:1.1, or weights:W/W such as weights:70/20/10"
MOST_WEIGHTS = 4096
LEAST_TOKEN = 3
"""Smaller ids are the special ones in most vocabularies."""


@dataclass(frozen=True)
class Popularity:
    """How requests choose among adapters.

    Attributes:
        name: `distinct`: in turn; `uniform`: each as likely; `zipf`: the k-th in proportion to 1 / k^exponent;
            `weights`: in proportion to given numbers.
        exponent: Of zipf, 0 otherwise.
        weights: One an adapter; empty otherwise.
    """

    name: str
    exponent: float = 0.0
    weights: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Popularity:
        """Reads `distinct`, `uniform`, `zipf:A` or `weights:W/W`.

        Raises:
            UsageError: It is none of them.
        """
        name, given, number = text.partition(":")
        if name in ("distinct", "uniform") and not given:
            return cls(name)
        if name in ("zipf", "weights") and given:
            try:
                values = tuple(float(part) for part in number.split("/"))
            except ValueError:
                values = ()
            if name == "zipf" and len(values) == 1 and 0 < values[0] < 100:
                return cls(name, values[0])
            if name == "weights" and 0 < len(values) <= MOST_WEIGHTS and all(0 < value < 1e9 for value in values):
                return cls(name, weights=values)
        raise UsageError("`--popularity` is not valid", got=f"`{text}`", accepted=ACCEPTED)

    def require_adapters(self, adapters: int) -> None:
        """Refuses a number of adapters that the weights do not fit.

        Raises:
            UsageError: There are more adapters than weights, or fewer.
        """
        if self.weights and len(self.weights) != adapters:
            raise UsageError(
                "`--popularity` names another number of adapters",
                got=f"{len(self.weights)} weights for {adapters} adapters",
                accepted="one weight an adapter",
            )

    def choose(self, requests: int, adapters: int, *, seed: int) -> list[int]:
        """The adapter's number for each request, from 0."""
        if self.name == "distinct":
            return [index % adapters for index in range(requests)]
        weights = self.weights or [1 / (rank + 1) ** self.exponent for rank in range(adapters)]
        return random.Random(f"popularity {seed}").choices(range(adapters), weights, k=requests)


def make_prompts(requests: int, length: int, vocab_size: int, *, seed: int) -> list[list[int]]:
    """Prompts of arbitrary tokens. No two seeds share a prompt, so that a prefix cache helps nobody."""
    draw = random.Random(f"prompts {seed}")
    least = min(LEAST_TOKEN, vocab_size - 1)
    return [[draw.randrange(least, vocab_size) for _ in range(length)] for _ in range(requests)]


def run_seed(seed: int, repeat: int, run: int) -> int:
    """The seed of one run: the same for all arms of a repeat."""
    return (seed * 100_003 + repeat) * 1_009 + run
