"""Seeds for fuzzing, as our own writers make them: python tests/trust/make_corpus.py (they are kept in corpus/)."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

import made_rows
import rankwise as rw
from rankwise.reports import published
from rankwise.training import resume
from trust import fuzz, writers

STUDIES = {
    "oneshot": """title = "a"
keeps = [0.7, 0.5]
retrain = [0, 0.25]
methods = ["alds", { method = "alds", error = "max", label = "b" }]
[[network]]
model = "digits-cnn"
data = "digits"
set = { epochs = 8 }
""",
    "iterate": """mode = "iterate"
repeats = 2
retrain = 0.5
methods = ["svd"]
[[network]]
model = "resnet20"
data = "<cifar10>"
weights = "<resnet20>"
exclude = ["conv1"]
recipe = "fast"
keeps = { alpha = 0.8, count = 3 }
cpus = 2
""",
    "sweep": """mode = "sweep"
unit = "macs"
keeps = { first = 0.9, last = 0.1, count = 2 }
methods = ["ft"]
seed = 3
calibrate = 8
split = "val"
[[network]]
model = "torchvision:resnet18"
data = "parquet:a"
limit = 100
size = 32
""",
}


def keep(name: str, seed: str, data: bytes) -> None:
    (fuzz.CORPUS / name).mkdir(parents=True, exist_ok=True)
    (fuzz.CORPUS / name / f"{seed}.bin").write_bytes(data)


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    example = torch.zeros(1, 2, 4, 4)
    for method in ("alds", "svd", "messi"):
        keep("plan", method, rw.compress(net, example, keep=0.8, method=method)[1].dumps().encode())
    made = json.loads(fuzz.corpus("plan")[0])
    made["search"] |= {"inputs": "calibration", "variance": 2.0, "unit": "nats", "expected": 0.1, "measured": 0.2}
    made["search"] |= {"fitted": 0.05, "uncorrected": 0.3, "gap": 0.0, "price": 1e-6, "ranks": "energy", "draws": 2.0}
    made["search"] |= {"groups": [{"layers": ["0"], "channels": 4, "kept": 2}]}
    made["search"] |= {"whole": [{"layers": ["3"], "channels": 3, "reason": "b"}]}
    keep("plan", "findings", json.dumps(made).encode())
    try:
        keep("plan", "ft", rw.compress(net, example, keep=0.8, method="ft")[1].dumps().encode())
    except rw.RankwiseError as err:
        print(f"no plan by ft: {err}")
    for method in ("alds", "tucker2", "ft", "cp"):
        plan = rw.compress(fuzz.small_network(), torch.zeros(1, 4, 6, 6), keep=0.6, method=method)[1]
        keep("plan-replayed", method, plan.dumps().encode())
    folded = replace(plan, fused={"1": "0"}, layout="channels-last")
    keep("plan-replayed", "folded", folded.dumps().encode())
    layers = {"0": {"f│chw": [1.0, 0.5, 0.25]}, "1": {"fc│hw": [1, 0.125], "f│chw": []}}
    keep("spectra", "real", json.dumps({"model": "a", "layers": layers}, ensure_ascii=False).encode())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rw.build_table(nn.Sequential(nn.Linear(4, 3)), torch.zeros(1, 4)).save(folder / "t.table")
        keep("table-file", "real", (folder / "t.table").read_bytes())
        with safe_open(folder / "t.table", framework="np") as file:
            keep("table-header", "real", file.metadata()["rankwise-table"].encode())
        writers._times(folder, 0)
        times = {**json.loads((folder / "times.json").read_text()), "machine": "made up"}
        keep("measured-times", "real", json.dumps(times, ensure_ascii=False).encode())
    state = {name: value.contiguous() for name, value in fuzz.pair().state_dict().items()}
    about = {"plan": "0" * 64, "same": {}, "modules": {}}
    keep("weights", "real", save(state, metadata={"rankwise": json.dumps(about)}))
    keep("weights", "trained", save(state, metadata={"rankwise": json.dumps({"network": "digits-cnn", "same": {}})}))
    keep("network-weights", "real", save(state))
    keep("network-weights", "prefix", save({f"module.{k}": v for k, v in state.items()}))
    keep("mapped-weights", "real", save(state))
    keep("block-shelf", "given", save({"0": torch.ones(2, 3), "1": torch.ones(1, 3)}))
    keep("block-shelf", "pair", save({name: torch.ones(shape) for name, shape in fuzz.SHELF.items()}))
    factors = {"encoder": torch.ones(1, 3, 5), "decoder": torch.ones(1, 4, 3)}
    keep("block-shelf", "factors", save({**factors, "mean": torch.ones(5)}))
    keep("block-shelf", "lookup", save({key: t.bfloat16() for key, t in factors.items()}))
    plan = json.loads(fuzz.corpus("plan")[0])
    entry = {"quant_method": "rankwise", "version": "0.2.0", "plan": plan}
    keep("config", "real", json.dumps({"model_type": "llama", "quantization_config": entry}).encode())
    listed = dict.fromkeys(state, "a.safetensors")
    keep("sharded-index", "real", json.dumps({"metadata": {"total_size": 64}, "weight_map": listed}).encode())
    split = {key: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, key in enumerate(state)}
    keep("sharded-index", "two", json.dumps({"weight_map": split}).encode())
    keep("sharded-weights", "real", json.dumps({"metadata": {"total_size": 64}, "weight_map": listed}).encode())
    weights = {"weight": torch.ones(2, 3), "bias": torch.arange(3.0)}
    notes = {"plan": "{}", "compressed": {"top1": 90.0, "loss": 0.5, "n": 10}}
    made = resume.State({"kind": "train", "recipe": {"lr": 0.1}}, 1, [{"epoch": 1}], 0.5, 1, 2.0, notes, weights)
    keep("training-state", "real", resume.dumps(made))
    keep("row", "done", json.dumps(made_rows.row(retrained={"top1": 91.0, "n": 3})).encode())
    keep("row", "failed", json.dumps(made_rows.failed("a", "no")).encode())
    table = json.loads(sorted(published.FOLDER.glob("*oneshot*.json"))[0].read_text())
    table["records"], table["table"] = table["records"][:3], "tab-supp:made"
    keep("published", "short", json.dumps(table).encode())
    for name, text in STUDIES.items():
        keep("study", name, text.encode())


if __name__ == "__main__":
    main()
