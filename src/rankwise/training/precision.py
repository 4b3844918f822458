"""Which precision trains fastest on this machine: what the recipe's `precision=auto` stands for.

bf16 pays where the processor multiplies it itself. Some virtual machines promise those instructions and do not have
them, and the process that tries dies; so another process tries first.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

_FLAGS = ("avx512_bf16", "amx_bf16")
_TRIAL = (
    "import torch; torch.set_num_threads(1); x = torch.ones(2, 16, 8, 8).bfloat16(); "
    "print(float(torch.nn.functional.conv2d(x, torch.ones(16, 16, 3, 3).bfloat16(), padding=1).float()[0, 0, 4, 4]))"
)


def settle(precision: str) -> str:
    """`auto` becomes bf16 or no; every other precision stays."""
    return fastest() if precision == "auto" else precision


@cache
def fastest() -> str:
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    return "bf16" if promises_bf16() and _keeps_it() else "no"


def promises_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor says that it multiplies bf16; where nobody can say, it does not."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return any(flag in text.split() for flag in _FLAGS)


def _keeps_it() -> bool:
    """144 ones added up in bf16, in a process that may die of it."""
    try:
        done = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == "144.0"
