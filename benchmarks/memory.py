"""Peak memory while planning, above the model itself, in units of its largest layer.

    python benchmarks/memory.py

A child process for each network: build the model, plan once for a tiny network so that libraries are
loaded, then measure the peak of resident memory during build_table + allocate with all folds and slices.
Twice: as the C library's allocator keeps freed memory by default, and with freed memory given back at once
(MALLOC_MMAP_THRESHOLD_), which shows what is really in use. Includes the table itself, which is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import torch
from common import machine, say

import rankwise as rw
from rankwise.models import networks

NETWORKS = ("torchvision:resnet18", "torchvision:vgg16_bn", "torchvision:resnet50")


class Peak:
    """Resident memory of this process, sampled every millisecond."""

    def __enter__(self) -> Peak:
        self.process, self.top, self.running = psutil.Process(), 0, True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.top = max(self.top, self.process.memory_info().rss)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()


def measure(spec: str) -> None:
    torch.set_num_threads(1)
    tiny = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Linear(64, 64))
    rw.allocate(rw.build_table(tiny), rw.Budget(params=0.5))
    model = networks.build(spec)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    before = psutil.Process().memory_info().rss
    with Peak() as peak:
        # A few slice counts keep the large networks short; memory is set by k = 1.
        groups = "all" if spec.endswith("resnet18") else [1, 2, 4, 8]
        table = rw.build_table(model, groups=groups)
        rw.allocate(table, rw.Budget(params=0.5))
    extra = peak.top - before
    kept = sum(a.nbytes for a in table.spectra.values())
    say(
        f"{spec:22} model {size / 2**20:6.1f} MiB, largest layer {largest / 2**20:6.1f} MiB, "
        f"peak above the model {extra / 2**20:6.1f} MiB = {extra / largest:.2f} × largest layer "
        f"(of which table {kept / 2**20:.1f} MiB)"
    )


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    say(machine())
    for title, env in (("freed memory kept", {}), ("freed memory given back", {"MALLOC_MMAP_THRESHOLD_": "65536"})):
        say(title)
        for spec in NETWORKS:
            subprocess.run([sys.executable, __file__, spec], check=True, env={**os.environ, **env})


if __name__ == "__main__":
    main()
