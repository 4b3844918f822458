"""What others do to networks works on compressed ones: compile, quantise, halve, distribute, copy, adapt."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.models.vision import import_torchvision

X = torch.randn(4, 3, 8, 8)


def compressed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.Flatten(),
        nn.Linear(576, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    ).eval()
    small, plan = rw.compress(model, X, method="svd", keep=0.5)
    assert {"3", "5"} <= {c.name for c in plan.choices}
    return small


def test_compile() -> None:
    small = compressed()
    fast = torch.compile(small, fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(fast(X), small(X), atol=1e-5)


def test_int8_dynamic_quantisation() -> None:
    from torch.ao.quantization import quantize_dynamic

    small = compressed()
    quantised = quantize_dynamic(small, {nn.Linear}, dtype=torch.qint8)
    kinds = [type(m).__module__ for m in quantised[5]]
    assert all("quantized" in kind for kind in kinds)
    with torch.no_grad():
        wanted, given = small(X), quantised(X)
    assert 0 < (wanted - given).abs().max() < 0.05 * wanted.abs().max()


def test_int8_by_torchao() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    small = compressed()
    quantised = copy.deepcopy(small)
    torchao.quantize_(quantised, torchao.Int8DynamicActivationInt8WeightConfig())
    with torch.no_grad():
        wanted, given = small(X), quantised(X)
    assert 0 < (wanted - given).abs().max() < 0.05 * wanted.abs().max()


HALF = """
import torch, test_interplay as t
small = t.compressed()
for dtype, most in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
    with torch.no_grad():
        wanted, given = small(t.X), small.to(dtype)(t.X.to(dtype)).float()
        assert given.isfinite().all() and 0 < (wanted - given).abs().max() < most * wanted.abs().max(), dtype
        small = t.compressed()
print("fine")
"""


def test_half_precision() -> None:
    # A process of its own: some virtual machines promise bf16 instructions that they do not have.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PYTHONPATH": _path()}
    done = subprocess.run([sys.executable, "-c", HALF], capture_output=True, text=True, env=environment)
    assert done.stdout == "fine\n", done.stderr


SHARED = """
import sys, torch, test_interplay as t
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
small = t.compressed().train()
wrapped = DistributedDataParallel(small)
optimiser = torch.optim.SGD(wrapped.parameters(), lr=0.1)
before = small[5].encoder.weight.detach().clone()
x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
for _ in range(3):
    optimiser.zero_grad()
    wrapped(x).square().mean().backward()
    optimiser.step()
assert not torch.equal(before, small[5].encoder.weight)
mine = torch.cat([p.detach().flatten() for p in small.parameters()])
parts = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(parts, mine)
assert torch.equal(*parts)
dist.destroy_process_group()
print("fine")
"""


def test_fine_tuning_in_two_processes(tmp_path: Path) -> None:
    """Gradients of both factors are shared: two processes with other data end with the same weights."""
    environment = {**os.environ, "PYTHONPATH": _path()}
    command = [sys.executable, "-c", SHARED]
    both = [
        subprocess.Popen([*command, str(r), str(tmp_path / "meet")], stdout=-1, stderr=-1, text=True, env=environment)
        for r in (0, 1)
    ]
    for process in both:
        out, err = process.communicate(timeout=600)
        assert out == "fine\n", err


def _path() -> str:
    return os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1]), str(Path(rw.__file__).parents[1])]
    )


def test_copies_and_state_dicts() -> None:
    small = compressed()
    again = copy.deepcopy(small)
    assert torch.equal(again(X), small(X))
    assert rw.densify(again)(X).shape == small(X).shape  # what a pair was made from is copied too
    again[5].encoder.weight.data.zero_()
    assert small[5].encoder.weight.abs().sum() > 0
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(X), small(X))


def test_adapters_on_the_factors() -> None:
    import_torchvision()  # first, in the way that suits this torch; peft would import it as it comes
    peft = pytest.importorskip("peft")
    small = compressed()
    before = {k: v.clone() for k, v in small.state_dict().items()}
    with torch.no_grad():
        wanted = small(X)
    adapted = peft.get_peft_model(small, peft.LoraConfig(r=2, target_modules=r".*(encoder|decoder)"))
    assert torch.allclose(adapted(X), wanted, atol=1e-6)  # adapters start as nothing
    names = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert names
    assert all("lora" in n and ("encoder" in n or "decoder" in n) for n in names)
    optimiser = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        _step(adapted, optimiser)
    merged = adapted.merge_and_unload()
    assert not torch.allclose(merged(X), wanted, atol=1e-4)
    assert merged.state_dict().keys() == before.keys()
    assert rw.densify(merged)(X).shape == wanted.shape


def _step(model: nn.Module, optimiser: torch.optim.Optimizer) -> Tensor:
    optimiser.zero_grad()
    loss: Tensor = model(X).square().mean()
    loss.backward()
    optimiser.step()
    return loss
