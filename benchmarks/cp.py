"""CP of convolution kernels: our solver beside tensorly's, error and CPU seconds of one thread in one run.

    pip install tensorly
    python benchmarks/cp.py --weights FILE        # a .safetensors file of a network with convolutions

For some kernels, at a quarter, half and nine tenths of the rank at which four layers are as large as one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from common import machine, say
from safetensors.torch import load_file
from torch import Tensor

from rankwise.decompositions import cp
from rankwise.errors import need

SHARES = (0.25, 0.5, 0.9)
KERNELS = 3


def timed(w: Tensor, solve: Callable[[], Tensor]) -> str:
    start = time.process_time()
    error = float((w - solve()).square().sum() / w.square().sum())
    return f"{error:.4f} ({time.process_time() - start:.2f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    args = parser.parse_args()
    tensorly = need("tensorly", extra="dev", purpose="the comparison")
    parafac = need("tensorly.decomposition", extra="dev", purpose="the comparison").parafac
    tensorly.set_backend("pytorch")
    torch.set_num_threads(1)
    kernels = {k: w.double() for k, w in load_file(args.weights).items() if w.ndim == 4 and min(w.shape[2:]) > 1}
    chosen = list(kernels)[1 :: max(1, len(kernels) // KERNELS)]
    say(f"relative squared error (CPU seconds); {machine()}\n")
    say("| kernel | rank | closed form | own | tensorly, svd | tensorly, random |\n| --- | ---: |" + " ---: |" * 4)
    for name in chosen:
        w = kernels[name]
        f, c, h, v = w.shape
        for share in SHARES:
            rank = max(1, int(share * w.numel() / (f + c + h + v)))
            solvers: list[Callable[[], Tensor]] = [
                lambda w=w, r=rank: cp._product(cp._start(w, r)),  # type: ignore[misc]
                lambda w=w, r=rank: cp._product(cp._alternate(w, cp._start(w, r))),  # type: ignore[misc]
            ]
            for init in ("svd", "random"):
                solvers.append(
                    lambda w=w, r=rank, init=init: tensorly.cp_to_tensor(  # type: ignore[misc]
                        parafac(w, r, n_iter_max=100, init=init, random_state=0, tol=1e-6)
                    )
                )
            say(f"| {name} {tuple(w.shape)} | {rank} | {' | '.join(timed(w, solve) for solve in solvers)} |")


if __name__ == "__main__":
    main()
