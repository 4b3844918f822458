"""A network as a list of equal blocks with something before and behind: each part runs alone, in single precision.

    with Blocks(model) as parts:
        hidden = parts.first(batch)                     # what the first block gets
        for i in range(len(parts)):
            hidden = parts.run(i, parts.block(i), batch, hidden)
        logits = parts.last(batch, hidden)              # what the network gives for it

Nothing is known of a network but its longest list of modules. What surrounds the blocks is a copy of the network with
stand-ins for them: a stand-in gives back what it gets, or what it is told to give, and takes note of what else a block
is called with (masks, positions), which no block may change. So weights of a block are needed only while it runs; those
of a network that was mapped from its files (models/mapped.py) are read at that time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.surgery.forward import Example, run_example, stopping

LEAST = 2  # blocks


class _StandIn(nn.Module):
    """In place of a block: gives what it gets. Whatever else a network asks a block for, the block answers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)
        self.stop: Callable[[], None] | None = None
        self.give: Tensor | None = None
        self.shape: Any = None  # how a block wraps what it gives
        self.seen: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.stop is not None:
            self.seen = (args, kwargs)
            self.stop()
        hidden = _hidden(args, kwargs) if self.give is None else self.give
        return hidden if self.shape is None else (hidden, *self.shape)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(found, Tensor):
        raise RankwiseError("its blocks do not begin with what the block before gives")
    return found


def find_blocks(model: nn.Module) -> str:
    """The name of the list of blocks: that with the most parameters, of at least two modules of one class."""
    best, size = "", 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) >= LEAST and len({type(m) for m in module}) == 1:
            here = sum(p.numel() for p in module.parameters())
            if here > size:
                best, size = name, here
    if not best:
        raise RankwiseError(f"{type(model).__name__} has no list of equal blocks, so it cannot be taken block by block")
    return best


class Blocks:
    """A network in parts. The network itself is never changed, nor is it run."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.name = model, find_blocks(model)
        self._blocks = cast(nn.ModuleList, model.get_submodule(self.name))
        inside = {id(module) for module in self._blocks.modules()}
        own = {id(p) for p in self._blocks.parameters()}
        others: list[Any] = [m for m in model.modules() if id(m) not in inside]
        if any(id(p) in own for module in others for p in module._parameters.values()):
            raise RankwiseError("its blocks share weights with the rest of the network: take it whole, --no-blocks")
        memo: dict[int, Any] = {id(block): _StandIn(block) for block in self._blocks}
        self.outer: nn.Module = copy.deepcopy(model, memo).float().eval()
        self._stands: Any = self.outer.get_submodule(self.name)
        config: Any = getattr(self.outer, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False

    def __len__(self) -> int:
        return len(self._blocks)

    def prefix(self, number: int) -> str:
        """What names of layers in a block begin with."""
        return f"{self.name}.{number}."

    def block(self, number: int) -> nn.Module:
        """A copy of a block, in single precision."""
        found: nn.Module = copy.deepcopy(self._blocks[number]).float().eval()
        return found

    def _arguments(self, number: int, batch: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stand: _StandIn = self._stands[number]
        try:
            with stopping() as stand.stop:
                run_example(self.outer, batch)
                raise RankwiseError(f"the network does not come to {self.prefix(number)[:-1]}")
            return stand.seen
        finally:
            stand.stop, stand.seen = None, ((), {})

    def first(self, batch: Example) -> Tensor:
        """What the first block gets; gradients lead to the embedding where they are enabled."""
        return _hidden(*self._arguments(0, batch))

    def run(self, number: int, block: nn.Module, batch: Example, hidden: Tensor) -> Tensor:
        """What a block gives for `hidden`, called as the network calls it."""
        with torch.no_grad():
            args, kwargs = self._arguments(number, batch)
        given = block(hidden, *args[1:], **kwargs) if args else block(**{**kwargs, "hidden_states": hidden})
        if isinstance(given, tuple):
            for stand in self._stands:
                stand.shape = given[1:]
            given = given[0]
        if not isinstance(given, Tensor) or given.shape != hidden.shape:
            raise RankwiseError("its blocks do not give what the next one begins with")
        return given

    def last(self, batch: Example, hidden: Tensor) -> Any:
        """What the network gives if this is what the last block gives."""
        stand: _StandIn = self._stands[len(self) - 1]
        stand.give = hidden
        try:
            return run_example(self.outer, batch)
        finally:
            stand.give = None
