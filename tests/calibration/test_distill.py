"""Recovery: distillation from the original network, without labels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.__main__ import main
from rankwise.calibration import distill
from rankwise.calibration.distill import MOVE, Effort, moved, read_effort, recover, recover_, varied
from rankwise.compression import Compression, Request
from rankwise.data.splits import load
from sentences import check_sentence


class Two(nn.Module):
    """A network with batch norm, dropout and a dict of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.Dropout()
        )
        self.wide = nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.wide(self.body(x))
        return {"maps": maps, "classes": self.head(maps.mean((2, 3)))}


def network() -> nn.Module:
    torch.manual_seed(0)
    return Two().eval()


def images() -> list[Tensor]:
    return [x for x, _ in load("digits", "train").thin(150).batches(50)]


def distance(one: nn.Module, other: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return sum(
            float((a - b).square().mean())
            for x in data
            for a, b in zip(one(x).values(), other(x).values(), strict=True)
        )


def test_outputs_come_closer_to_those_of_the_original() -> None:
    model, data = network(), images()
    small, _ = rw.compress(model, data[0][:1], keep=0.4, error="energy")
    held_out = [x for x, _ in load("digits", "test").batches(100)]
    before = distance(model, small, held_out)
    original = {k: v.clone() for k, v in model.state_dict().items()}
    better = recover(small, model, data, Effort(60))
    assert distance(model, better, held_out) < 0.7 * before
    assert distance(model, small, held_out) == before, "recover works on a copy"
    assert all(torch.equal(v, original[k]) for k, v in model.state_dict().items())


def test_the_same_seed_gives_the_same_network_and_everything_is_put_back() -> None:
    model, data = network(), images()
    small, _ = rw.compress(model, data[0][:1], keep=0.5, error="energy")
    small.wide.requires_grad_(False)
    small.body.train()
    flags = {n: p.requires_grad for n, p in small.named_parameters()}
    buffers = {n: b.clone() for n, b in small.named_buffers()}
    found = [recover(small, model, data, Effort(5), seed=3) for _ in range(2)]
    for a, b in zip(found[0].state_dict().values(), found[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert {n: p.requires_grad for n, p in found[0].named_parameters()} == flags
    assert all(p.grad is None for p in found[0].parameters())
    assert found[0].body.training
    assert not found[0].head.training
    assert all(torch.equal(b, buffers[n]) for n, b in found[0].named_buffers()), "batch norms keep their statistics"


def test_losses_fall_and_time_is_kept() -> None:
    model, data = network(), images()
    small, _ = rw.compress(model, data[0][:1], keep=0.4, error="energy")
    losses = recover_(small, model, data, Effort(40))
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5])
    assert recover_(small, model, data, Effort(10**6, seconds=0.0)) == []
    assert recover_(small, model, data, Effort(0)) == []


def test_variations_are_mirrored_and_mixed_images() -> None:
    """Of constant images of different brightness: about half stay as they are, the others lie between two of them."""
    level = torch.arange(1000.0)[:, None, None, None].expand(1000, 3, 4, 4)
    found = varied(level, torch.Generator().manual_seed(0))
    assert found.shape == level.shape
    assert float(found.amin()) >= 0
    assert float(found.amax()) <= 999
    assert torch.equal(found.flatten(1).amin(1), found.flatten(1).amax(1))
    same = (found == level).flatten(1).all(1)
    assert 400 < int(same.sum()) < 600
    ramp = torch.arange(4.0).expand(1000, 1, 4, 4)
    left = varied(ramp, torch.Generator().manual_seed(0))[:, 0, 0, 0]
    assert 150 < int((left == 0).sum()) < 450
    assert 150 < int((left == 3).sum()) < 450
    assert torch.equal(varied(ramp, torch.Generator().manual_seed(1)), varied(ramp, torch.Generator().manual_seed(1)))


def test_images_move_by_up_to_an_eighth() -> None:
    """Every moved image is a window of the reflected one, and every window turns up."""
    image = torch.arange(16.0 * 24).reshape(1, 1, 16, 24)
    down, right = 16 // MOVE, 24 // MOVE
    wide = torch.nn.functional.pad(image, (right, right, down, down), mode="reflect")[0, 0]
    windows = {
        tuple(wide[i : i + 16, j : j + 24].flatten().tolist())
        for i in range(2 * down + 1)
        for j in range(2 * right + 1)
    }
    found = moved(image.expand(1000, 1, 16, 24), torch.Generator().manual_seed(0))
    assert {tuple(one.flatten().tolist()) for one in found} == windows


def test_bad_requests() -> None:
    model, data = network(), images()
    small, _ = rw.compress(model, data[0][:1], keep=0.5, error="energy")
    assert "steps" in check_sentence(lambda: Effort(-1))
    assert "empty" in check_sentence(lambda: recover(small, model, []))
    assert "diverged" in check_sentence(lambda: recover(small, model, data, Effort(50, rate=1e12)))
    assert "no inputs" in check_sentence(lambda: rw.compress(model, None, keep=0.5, error="energy", recover=3))


PAIRS: dict[str, Any] = {"error": "effect", "decompositions": ("whitened",)}  # which leave something to recover


def test_compress_recovers_at_the_end() -> None:
    model, data = network(), images()
    how = {"keep": 0.4, "data": data, **PAIRS}
    plain, _ = rw.compress(model, data[0][:1], **how)
    better, plan = rw.compress(model, data[0][:1], **how, recover=40)
    assert distance(model, better, data) < distance(model, plain, data)
    assert sum(p.numel() for p in better.parameters()) == plan.after.params


def test_seconds_instead_of_steps() -> None:
    """As many steps as fit; whoever looks on hears how many that will be, and in the end how many it was."""
    model, data = network(), images()
    said: list[tuple[int, int]] = []

    def watch(stage: str) -> AbstractContextManager[Any]:
        heard = stage == "recovery"
        return nullcontext((lambda _, done, total: said.append((done, total))) if heard else None)

    job = Compression(model, data[0][:1], Request(recover="1.5s", changes=PAIRS), data, watch)
    small, plan = job.build(job.plan(rw.Budget(params=0.4)))
    before = distance(model, small, data)
    job.recover_(small, plan)
    assert distance(model, small, data) < before
    assert [i for i, _ in said] == list(range(1, len(said) + 1))
    assert said[-1][1] <= 2 * said[-1][0]
    kept = {name: value.clone() for name, value in small.state_dict().items()}
    for nothing in (0, "0", "0s"):
        Compression(model, request=Request(recover=nothing)).recover_(small, plan)
        assert all(torch.equal(value, kept[name]) for name, value in small.state_dict().items())
    for bad in (-1, "-1", "3.5", "s", "nans", "infs", "fast", "5m", 2.5):
        assert "90s" in check_sentence(lambda: read_effort(bad))  # type: ignore[arg-type] # noqa: B023


@pytest.mark.parametrize("extra", [["--data", "digits"], []])
def test_command_line(tmp_path: Path, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "compress",
                "digits-cnn",
                "--random-weights",
                "--keep",
                "0.5",
                "--recover",
                "3",
                "--out",
                str(tmp_path / "o"),
                *extra,
            ]
        )
        == 0
    )
    assert "done" in capsys.readouterr().out


def test_command_line_for_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [
        "compress",
        "digits-cnn",
        "--random-weights",
        "--keep",
        "0.5",
        "--data",
        "digits",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*told, "--recover", "soon"]) == 2
    assert "90s" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert main([*told, "--recover", "1s"]) == 0
    assert "done" in capsys.readouterr().out


def test_rates_are_tried_on_held_out_inputs_until_one_helps() -> None:
    """A trial that makes things worse is undone, and the next one has a third of its rate; one that helps is kept."""
    small = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        small.weight.fill_(1.0)
    tried: list[Effort] = []

    def work(effort: Effort) -> list[float]:
        tried.append(effort)
        with torch.no_grad():
            small.weight.add_(1.0 if effort.rate > 2e-4 else -0.5)
        return [0.0]

    left = distill._with_rate(small, work, Effort(160, 80.0, rate=9e-4), lambda: float(small.weight))
    assert [effort.rate for effort in tried] == pytest.approx([9e-4, 3e-4, 1e-4])
    assert float(small.weight) == 0.5
    assert left.rate == pytest.approx(1e-4)
    assert left.steps == 160 - sum(effort.steps for effort in tried)
    assert left.seconds == pytest.approx(80.0 - sum(effort.seconds or 0.0 for effort in tried))
    tried.clear()
    left = distill._with_rate(small, work, Effort(160, rate=1.0), lambda: float(small.weight))
    assert float(small.weight) == 0.5, "nothing helped, so nothing was changed"
    assert left.rate == pytest.approx(1 / 27)
    assert left.seconds is None


def test_large_images_come_in_small_batches() -> None:
    assert distill._at_once(torch.zeros(200, 3, 32, 32)) == 128
    assert distill._at_once(torch.zeros(2, 3, 512, 512)) == 32
    assert distill._at_once(torch.zeros(200, 7)) == 128
