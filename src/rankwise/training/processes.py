"""One process or many: the same code on one CPU, one GPU, or with `torchrun` on many machines, by accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.errors import need


@dataclass(frozen=True, eq=False)
class Engine:
    """A thin view of accelerate's `Accelerator`: this is process `rank` of `world`, and the first one writes."""

    accelerator: Any

    @property
    def rank(self) -> int:
        return cast(int, self.accelerator.process_index)

    @property
    def world(self) -> int:
        return cast(int, self.accelerator.num_processes)

    @property
    def writes(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.accelerator.device)

    @contextmanager
    def prepared(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[nn.Module, Optimizer]]:
        """The network to call, and the optimiser to step; afterwards the network is what it was.

        With several processes DDP gives all of them the weights of the first, then the mean of all gradients.
        Meanwhile channels are the innermost axis in memory, which convolutions like better on CPUs and GPUs.
        """
        model.to(self.device)
        images = all(p.dim() != 5 for p in model.parameters()) and any(p.dim() == 4 for p in model.parameters())
        if images:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # One process in full precision has nothing to wrap, and giving a wrapper back walks all objects there are,
        # which costs a tiny network more than an epoch.
        plain = self.accelerator.distributed_type.value == "NO" and self.accelerator.mixed_precision == "no"
        called, stepped = (model, optimizer) if plain else self.accelerator.prepare(model, optimizer)
        try:
            yield called, stepped
        finally:
            if not plain:
                self.accelerator.unwrap_model(called, keep_fp32_wrapper=False)
                self.accelerator.free_memory()
            if images:
                model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def align_(self, model: nn.Module) -> None:
        """Give every process the buffers of the first: DDP leaves each with its own batch-norm statistics."""
        if self.world > 1:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def from_first(self, content: bytes | None) -> bytes | None:
        """What the first process has, in every process. Bytes, so that nothing is unpickled."""
        if self.world == 1:
            return content
        distributed = torch.distributed
        length = torch.tensor([-1 if content is None else len(content)], device=self.device)
        distributed.broadcast(length, src=0)
        if int(length) < 0:
            return None
        if self.writes and content:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        else:
            data = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if int(length):
            distributed.broadcast(data, src=0)
        return data.cpu().numpy().tobytes()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return values if self.world == 1 else cast(Tensor, self.accelerator.reduce(values, reduction="sum"))


def make_engine(precision: str = "no") -> Engine:
    """`precision`: no, bf16 or fp16 (mixed precision). The processes are those that torchrun or accelerate started."""
    assert precision != "auto", "steps.py finds out what auto stands for"
    accelerate = need("accelerate", extra="train", purpose="training")
    state = need("accelerate.state", extra="train", purpose="training").AcceleratorState
    if state._shared_state and state().mixed_precision != precision:
        state._reset_state(reset_partial_state=False)  # it is kept for the process, and we may train twice
    return Engine(accelerate.Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision))
