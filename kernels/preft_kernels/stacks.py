"""Stacked weights of adapters that decode together, kept from one step to the next.

A batched product wants the weights of its adapters in one tensor. Of a prompt that copy is small beside the product;
of single rows it is most of the work, and the same for every step until a request comes or goes. So the stack of
single rows is kept, one a module, and used again while its adapters and their order stay the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preft_kernels.packed import PackedSite


@dataclass(frozen=True)
class Stack:
    """The joined numbers of adapters at one module.

    Attributes:
        down_t: [S, d_in, sum of ranks].
        bias: [S, 1, sum of ranks], or None.
        ups: For each part [S, rank, width].
    """

    down_t: torch.Tensor
    bias: torch.Tensor | None
    ups: tuple[torch.Tensor, ...]

    @classmethod
    def build(cls, sites: Sequence[PackedSite]) -> Stack:
        """Copies the numbers of sites of one signature."""
        biases = [site.bias for site in sites if site.bias is not None]
        return cls(
            torch.stack([site.down_t for site in sites]),
            torch.stack(biases).unsqueeze(1) if biases else None,
            tuple(torch.stack([site.parts[part].up_t for site in sites]) for part in range(len(sites[0].parts))),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.down_t.nbytes + bias + sum(up.nbytes for up in self.ups)


@dataclass(frozen=True)
class _Entry:
    members: tuple[weakref.ref[PackedSite], ...]
    stack: Stack


class StackCache:
    """Stacks of single rows, one a key, within a number of bytes.

    It holds no adapter alive, and an adapter that was replaced is another object, so a stack is never out of date.

    Args:
        max_bytes: Of all stacks; beyond, none is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.num_built = 0
        self._entries: dict[tuple[int, int], _Entry] = {}

    def get(self, key: tuple[int, int], sites: Sequence[PackedSite]) -> Stack | None:
        """The stack of `sites`, in their order, or None if there is no room to keep it.

        Args:
            key: Of the module, and of the place in its rows; a new stack replaces the one before.
            sites: Of one signature.
        """
        entry = self._entries.get(key)
        if entry is not None:
            if len(entry.members) == len(sites) and all(
                member() is site for member, site in zip(entry.members, sites, strict=True)
            ):
                return entry.stack
            self.held_bytes -= self._entries.pop(key).stack.num_bytes
        if self.held_bytes + sum(site.num_bytes for site in sites) > self.max_bytes:
            return None
        stack = Stack.build(sites)
        self.num_built += 1
        self._entries[key] = _Entry(tuple(weakref.ref(site) for site in sites), stack)
        self.held_bytes += stack.num_bytes
        return stack
