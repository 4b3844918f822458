"""Tutorial 3: a network for a budget in time on this machine, timed again, and run by ONNX Runtime.

python examples/latency_and_export.py --out fast/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from my_network import digits, network, train

import rankwise as rw


def main(out: Path, epochs: int = 8, batch: int = 32) -> dict[str, float]:
    torch.manual_seed(0)
    model = network()
    train(model, epochs)
    x, _, test, _ = digits()

    # At most 80 % of the time of a batch of 32. Batch norms are folded first, because that costs no accuracy.
    timing = rw.Timing(batch=batch)
    small, plan = rw.compress(model, x[:1], latency=0.8, data=x[:512].split(64), timing=timing)
    rw.save(small, plan, out)
    for sentence in plan.warnings:
        print("note:", sentence)

    # Both networks again: the time that was measured while planning is in the plan, too.
    seconds = [rw.time_network(net, x[:batch], timing).median for net in (model, small)]
    print(f"{1e3 * seconds[0]:.2f} ms -> {1e3 * seconds[1]:.2f} ms for {batch} images")

    # The file is opened again and compared with the network before it gets its name.
    written = rw.export(small, x[:1], out / "model.onnx", to="onnx")
    session = onnxruntime.InferenceSession(out / "model.onnx")
    (name,) = [one.name for one in session.get_inputs()]
    (theirs,) = session.run(None, {name: test.numpy()})
    ours = small(test).detach().numpy()
    difference = float(np.abs(theirs - ours).max() / np.abs(ours).max())
    print(f"{written['path']}: largest difference {difference:.1e} of the largest output")
    return {"keep": plan.keep("latency"), "difference": difference}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("fast"))
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    main(given.out, given.epochs)
