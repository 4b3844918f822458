"""Embeddings and tied heads of low rank, probabilities as what counts, and recovery on texts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.calibration.answers import change_of
from rankwise.calibration.distill import Effort, recover_
from rankwise.calibration.objective import divergence, logits_in, pull_of_probabilities
from rankwise.compression import Compression, Request
from rankwise.decompositions.embedding import Use, directions, errors

V, D = 60, 12


class Tiny(nn.Module):
    """A language model without attention: an embedding, a hidden layer, and a head that may share its weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.norm = nn.LayerNorm(D)
        self.hidden = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        found = self.embed(input_ids)
        found = found + torch.tanh(self.hidden(self.norm(found.cumsum(1))))
        return self.head(self.norm(found))  # type: ignore[no-any-return]


def tiny(tied: bool = True) -> Tiny:
    torch.manual_seed(0)
    model = Tiny(tied).eval()
    with torch.no_grad():
        model.embed.weight *= torch.linspace(2, 0.05, D)  # directions that hardly matter
        if not tied:
            model.head.weight *= 3
    return model


def texts(count: int = 48, length: int = 20) -> list[dict[str, Tensor]]:
    drawn = V * torch.rand(count, length, generator=torch.Generator().manual_seed(1)).square()  # small: frequent
    return [{"input_ids": part} for part in drawn.long().split(8)]


@pytest.fixture(scope="module")
def compressed() -> tuple[Tiny, nn.Module, rw.Plan]:
    model = tiny()
    small, plan = rw.compress(model, texts()[0], keep=0.8, data=texts())
    return model, small, plan


def test_embeddings_are_found_with_their_heads() -> None:
    model, example = tiny(), texts()[0]
    (found,) = rw.find_layers(model, example).embeddings
    assert (found.name, found.heads, found.shape, found.head_rows) == ("embed", ("head",), (V, D), 160)
    assert not rw.find_layers(model, example, exclude="head").embeddings
    assert [la.name for la in rw.find_layers(model, example).layers] == ["hidden"]
    (alone,) = rw.find_layers(tiny(tied=False), example).embeddings
    assert not alone.heads
    positions = nn.Sequential(nn.Embedding(4 * D, D), nn.Linear(D, D))  # few rows, of which a text may show the first
    assert not rw.find_layers(positions, texts()[0]["input_ids"] % (4 * D)).embeddings
    bounded = tiny()
    bounded.embed.max_norm = 1.0
    assert not rw.find_layers(bounded, example).embeddings


def test_the_plan_counts_what_torch_counts(compressed: tuple[Tiny, nn.Module, rw.Plan]) -> None:
    _, small, plan = compressed
    assert [c.kind for c in plan.choices if c.name == "embed"] == ["Embedding"]
    assert plan.after.params == sum(p.numel() for p in small.parameters())
    assert plan.after.macs == rw.find_layers(small, texts()[0]).macs
    assert small.head.decoder.weight is small.embed.encoder.weight


def test_a_folder_and_the_way_back(compressed: tuple[Tiny, nn.Module, rw.Plan], tmp_path: Path) -> None:
    model, small, plan = compressed
    batch = texts()[0]["input_ids"]
    rw.save(small, plan, tmp_path)
    again = rw.load(tmp_path, tiny())
    assert torch.equal(again(batch), small(batch))
    assert again.head.decoder.weight is again.embed.encoder.weight
    dense = rw.densify(small)
    assert dense.head.weight is dense.embed.weight
    assert dense.embed.weight.shape == model.embed.weight.shape
    torch.testing.assert_close(dense(batch), small(batch), atol=1e-4, rtol=1e-4)


def test_heads_that_were_trained_apart_stay_apart(compressed: tuple[Tiny, nn.Module, rw.Plan]) -> None:
    small = copy.deepcopy(compressed[1])
    with torch.no_grad():
        small.head.encoder.weight.mul_(2)
    dense = rw.densify(small)
    assert dense.head.weight is not dense.embed.weight
    batch = texts()[0]["input_ids"]
    torch.testing.assert_close(dense(batch), small(batch), atol=1e-4, rtol=1e-4)


def test_a_plan_is_replayed_with_data(compressed: tuple[Tiny, nn.Module, rw.Plan]) -> None:
    model, small, plan = compressed
    job = Compression(model, texts()[0], Request(plan=plan), texts())
    again, _ = job.build(job.plan(None))
    batch = texts()[0]["input_ids"]
    torch.testing.assert_close(again(batch), small(batch), atol=1e-4, rtol=1e-4)
    with pytest.raises(rw.RankwiseError, match="needs calibration data"):
        rw.apply_plan(model, plan)


def test_the_prediction_is_in_nats_and_right_for_the_embedding() -> None:
    model = tiny()
    _, plan = rw.compress(model, texts()[0], keep=0.9, data=texts(240))
    assert plan.search.objective is not None
    assert plan.search.measured is not None
    assert plan.search.objective < 2.5 * plan.search.measured < 2.5**2 * plan.search.objective


def test_errors_are_those_of_the_matrices_that_are_built() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=random, dtype=torch.float64)

    def use() -> tuple[Tensor, Tensor, Use]:
        counts, half = torch.rand(V, generator=random).double(), torch.randn(D, D, generator=random).double()
        columns = half @ half.t()
        return counts, columns, Use(weight.t() @ (counts[:, None] * weight), columns)

    both = [use(), use()]
    left, right = directions([u for *_, u in both], (0.1, 0.1), weight.t() @ weight)
    curve = errors((left, right), [u for *_, u in both])
    for rank in (0, 3, D):
        lost = weight - weight @ left[:, :rank] @ right[:rank]
        direct = sum(float(((lost @ n) * (counts[:, None] * lost)).sum()) for counts, n, _ in both)
        assert curve[rank] == pytest.approx(direct, abs=1e-8 * curve[0])
    # One use alone: nothing of this rank is better than the truncated SVD in both metrics.
    counts, columns, alone = both[0]
    root = torch.linalg.cholesky(columns)
    values = torch.linalg.svdvals(counts.sqrt()[:, None] * weight @ root).square()
    best = errors(directions([alone], (0.0, 0.0), weight.t() @ weight), [alone])
    assert best[4] == pytest.approx(float(values[4:].sum()), rel=1e-6)


def test_pulls_have_the_curvature_of_probabilities() -> None:
    logits = 2 * torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)[0]
    many = pull_of_probabilities(logits.expand(40_000, 6), torch.Generator().manual_seed(1))
    torch.testing.assert_close(many.t() @ many / len(many), p.diag() - p[:, None] * p, atol=0.01, rtol=0.05)
    step = 1e-2 * torch.randn(1, 6, generator=torch.Generator().manual_seed(2))
    second = 0.5 * float(step @ (p.diag() - p[:, None] * p) @ step.t())
    assert divergence(logits.double(), (logits + step).double()) == pytest.approx(second, rel=0.1)


def test_only_a_vocabulary_makes_probabilities() -> None:
    model = tiny()
    assert logits_in(model, [torch.zeros(2, 3, V)]) is not None
    assert logits_in(model, [torch.zeros(2, 3, D)]) is None
    assert logits_in(nn.Linear(D, V), [torch.zeros(2, V)]) is None


def test_the_change_is_the_divergence_of_every_position() -> None:
    model, other = tiny(), tiny()
    with torch.no_grad():
        other.hidden.weight.mul_(1.5)
    (batch,) = texts(8)
    p, q = (net(batch["input_ids"]).log_softmax(-1).flatten(0, 1) for net in (model, other))
    wanted = float(F.kl_div(q, p, reduction="batchmean", log_target=True))
    assert change_of(model, other, [batch], 2 * batch["input_ids"].shape[1]) == pytest.approx(wanted, rel=1e-4)


def test_recovery_on_texts_trains_factors_and_keeps_the_best_state(compressed: tuple[Tiny, nn.Module, rw.Plan]) -> None:
    model, small = compressed[0], copy.deepcopy(compressed[1])
    held = texts(16, 24)

    def measure() -> float:
        return change_of(model, small, held, 48)

    before, norm = measure(), small.norm.weight.clone()
    losses = recover_(small, model, texts(), Effort(60, rate=3e-3), check=measure)
    assert measure() < before
    assert losses[-1] < losses[0]
    assert torch.equal(small.norm.weight, norm)
    assert small.head.decoder.weight is small.embed.encoder.weight
    assert all(p.requires_grad for p in small.parameters())
    worse = measure()
    recover_(small, model, texts(), Effort(30, rate=3.0), check=measure)  # far too high a rate
    assert measure() <= worse


def test_a_hugging_face_folder_with_a_tied_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import rankwise.hf
    from tiny_language import llama

    model = llama(vocab_size=512)
    random = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(512, (8, 16), generator=random)} for _ in range(3)]
    small, plan = rw.compress(model, data[0], keep=0.45, data=data)
    assert [c.heads for c in plan.choices if c.kind == "Embedding"] == [("lm_head",)]
    rw.save(small, plan, tmp_path / "one")
    ids = data[0]["input_ids"]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.equal(opened(ids).logits, small(ids).logits)
    assert opened.lm_head.decoder.weight is opened.model.embed_tokens.encoder.weight
    names = rankwise.hf.factor_names(opened)
    assert "lm_head.encoder" in names
    assert "lm_head.decoder" not in names
    assert opened.generate(ids[:1], max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
    opened.save_pretrained(tmp_path / "two")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert torch.equal(again(ids).logits, small(ids).logits)
    dense = rw.densify(opened)
    dense.save_pretrained(tmp_path / "three")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "three")
    torch.testing.assert_close(whole(ids).logits, small(ids).logits, atol=1e-4, rtol=1e-4)
