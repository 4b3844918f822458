"""Hugging Face folders in and out: every family goes in, is compressed, opened by transformers, trained and saved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
import tiny_language as tiny
from rankwise.models.huggingface import example_of
from rankwise.networks import build
from rankwise.surgery import checkpoint, weights_file
from rankwise.surgery.coverage import EXPERTS
from rankwise.surgery.forward import run_example, tensors_of

KEEP = {"mixtral": 0.93, "qwen_moe": 0.9}  # most of their weights are experts
TOKENS = 200  # of a vocabulary that is worth decomposing


def outputs(network: nn.Module, example: Any) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(run_example(network.eval(), example))


def same(one: nn.Module, other: nn.Module, example: Any) -> bool:
    """Equal weights, and outputs that differ by rounding only: where weights lie in memory decides how sums are cut."""
    ours, theirs = one.state_dict(), other.state_dict()
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    pairs = zip(outputs(one, example), outputs(other, example), strict=True)
    return equal and all(bool(((a - b).abs().max() <= 1e-5 * (1 + a.abs().max())).all()) for a, b in pairs)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of a family and what `compress` made of it: (spec, example, small network, plan, folder)."""
    made: dict[tuple[str, str], Any] = {}

    def make(family: str, method: str = "svd") -> Any:
        if (family, method) not in made:
            place = tmp_path_factory.mktemp(family)
            random = tiny.FAMILIES[family]()
            if method != "svd":  # some directions of the embedding hardly matter
                random.get_input_embeddings().weight.data *= torch.logspace(0.5, -3, 32)
            spec = f"hf:{tiny.folder(place / 'in', random)}"
            network = build(spec)
            example = example_of(network)
            data = None if method == "svd" else [drawn(example, seed) for seed in range(6)]
            alone = "encoder.*" if data and family == "bert" else ()  # layers that hardly matter either
            small, plan = rw.compress(
                network, example, method, KEEP.get(family, 0.85), name=spec, data=data, exclude=alone
            )
            rw.save(small, plan, place / "out")
            made[family, method] = spec, example, small, plan, place / "out"
        return made[family, method]

    return make


def drawn(example: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """A batch like the example with other tokens, small numbers more often than large ones."""
    random = torch.Generator().manual_seed(seed)
    batch = {name: value.expand(4, *value.shape[1:]).clone() for name, value in example.items()}
    for name in batch.keys() & {"input_ids", "decoder_input_ids"}:
        batch[name] = (TOKENS * torch.rand(batch[name].shape, generator=random).square()).long()
    return batch


def opened(family: str, folder: Path) -> Any:
    """By transformers alone, after `import rankwise.hf`."""
    import rankwise.hf  # noqa: F401

    autos = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModel", "vit": "AutoModelForImageClassification"}
    auto = getattr(tiny.transformers, {**autos, "clip": "AutoModel"}.get(family, "AutoModelForCausalLM"))
    return auto.from_pretrained(folder)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_goes_in_out_and_on(family: str, written: Any, tmp_path: Path) -> None:
    go_on(family, written(family), tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mixtral", "qwen_moe"])
def test_so_does_every_family_with_an_embedding_of_low_rank(
    family: str, written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it the head, where both are one weight."""
    monkeypatch.setattr(tiny, "VOCABULARY", TOKENS)
    found = written(family, "auto")
    small, plan = found[2], found[3]
    lookups = [choice.name for choice in plan.choices if choice.option.decomposition == "embedding"]
    assert lookups
    if family in ("llama", "gpt2"):
        embedding, head = small.get_submodule(lookups[0]), small.get_output_embeddings()
        assert head[-1].weight is embedding[0].weight
    go_on(family, found, tmp_path)


def go_on(family: str, found: Any, place: Path) -> None:
    """In → compress → from_pretrained → equal outputs → generate or encode → LoRA step → save again."""
    _, example, small, plan, folder = found
    network = opened(family, folder)
    assert plan.choices
    assert sum(p.numel() for p in network.parameters()) == plan.after.params
    assert same(network, small, example)
    assert close(used(family, network, folder), used(family, small, folder))
    train_adapters(network, example)
    network.save_pretrained(place / "again")
    for again in (opened(family, place / "again"), rw.load(place / "again")):
        assert same(again, network, example)
        assert sum(p.numel() for p in again.parameters()) == plan.after.params
    assert close(used(family, again, folder), used(family, network, folder))
    assert not same(network, small, example)


def used(family: str, network: Any, folder: Path) -> Tensor:
    """What a network is for: tokens that it writes, or what it makes of a sentence or an image."""
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    if family == "vit":
        return network(pixel_values=images).logits.detach()
    tokens = tiny.transformers.AutoTokenizer.from_pretrained(folder)([tiny.SENTENCE], return_tensors="pt")
    tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    if network.can_generate():
        longer = network.generate(**tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert longer.shape[1] == 4 + (1 if family == "t5" else tokens["input_ids"].shape[1])
        return longer
    if family == "clip":
        return network(**tokens, pixel_values=images).logits_per_image.detach()
    return network(**tokens).last_hidden_state.detach()


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-4, atol=1e-5)


def train_adapters(network: Any, example: Any) -> None:
    """One step of LoRA on the factors, merged into them: same shapes, and the outputs of the adapted network."""
    peft = pytest.importorskip("peft")
    from rankwise.hf import factor_names

    shapes = {name: value.shape for name, value in network.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=factor_names(network), init_lora_weights=False, lora_alpha=1)
    adapted = peft.get_peft_model(network, config)
    optimiser = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    loss = sum(t.float().square().mean() for t in tensors_of(adapted(**example)) if t.requires_grad)
    loss.backward()
    assert any(float(p.grad.norm()) > 0 for p in adapted.parameters() if p.grad is not None)
    optimiser.step()
    wanted = outputs(adapted, example)
    merged = adapted.merge_and_unload()
    assert {name: value.shape for name, value in merged.state_dict().items()} == shapes
    for a, b in zip(wanted, outputs(merged, example), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_without_the_import_transformers_refuses_and_names_the_package(written: Any, tmp_path: Path) -> None:
    _, _, _, _, folder = written("llama")
    opened("llama", folder).save_pretrained(tmp_path / "again")
    code = """
import rankwise, sys, transformers
for place in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(place)
    except ValueError as err:
        print(err)
"""
    places = [str(folder), str(tmp_path / "again")]
    done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert all("pip install rankwise, then `import rankwise.hf` before from_pretrained" in line for line in said)


def test_the_folder_has_what_others_expect(written: Any) -> None:
    spec, _, _, plan, folder = written("llama")
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "README.md", "plan.json"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "rankwise"
    assert plan.summary() in (folder / "README.md").read_text()
    assert checkpoint.read_plan(folder) == plan
    assert same(rw.load(folder, build(spec)), rw.load(folder), example_of(build(spec)))


def test_a_network_compressed_in_python_saves_itself(written: Any, tmp_path: Path) -> None:
    """`save_pretrained` of what `rw.compress` gave opens again; multiplied out, it is an ordinary network."""
    _, example, small, _, _ = written("llama")
    small.save_pretrained(tmp_path / "own")
    assert same(rw.load(tmp_path / "own"), small, example)
    dense = rw.densify(small)
    dense.save_pretrained(tmp_path / "dense")
    again = tiny.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert same(again, dense, example)


def test_the_trunk_of_a_language_model_opens_alone(written: Any) -> None:
    import rankwise.hf  # noqa: F401

    _, example, small, _, folder = written("gpt2")
    trunk = tiny.transformers.AutoModel.from_pretrained(folder)
    assert same(trunk, small.transformer, example)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shards_of_any_precision_come_in_and_go_out(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.llama(tie_word_embeddings=False).to(getattr(torch, dtype))
    folder = tiny.folder(tmp_path / "in", network, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    again = build(f"hf:{folder}")
    example = example_of(again)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in network.state_dict().items())
    small, plan = rw.compress(again, example, "svd", 0.8, name=f"hf:{folder}")
    assert {p.dtype for p in small.parameters()} == {getattr(torch, dtype)}
    monkeypatch.setattr(checkpoint, "LARGEST", 20_000)
    out = tmp_path / "out"
    for _ in range(2):  # the second time over the first
        rw.save(small, plan, out)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert max(path.stat().st_size for path in shards) < 30_000
    assert same(rw.load(out), small, example)
    assert same(rw.load(out, again), small, example)
    monkeypatch.setattr(checkpoint, "LARGEST", weights_file.LARGEST)
    rw.save(small, plan, out)  # in one file again: the old ones are gone
    assert not list(out.glob("model-*.safetensors"))
    assert same(rw.load(out), small, example)


def test_weights_of_another_plan_are_refused(written: Any, tmp_path: Path) -> None:
    spec, example, _, _, folder = written("llama")
    shutil.copytree(folder, tmp_path / "mixed")
    other, plan = rw.compress(build(spec), example, "svd", 0.7, name=spec)
    rw.save(other, plan, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "mixed" / "model.safetensors")
    with pytest.raises(rw.RankwiseError, match="do not belong together"):
        rw.load(tmp_path / "mixed")


@pytest.mark.parametrize("family", ["mixtral", "qwen_moe"])
def test_experts_in_one_tensor_are_named_with_their_share(family: str) -> None:
    network = tiny.FAMILIES[family]()
    skipped = [s for s in rw.find_layers(network, example_of(network)).skipped if s.reason == EXPERTS]
    assert [s.name for s in skipped] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert all(s.params == 9216 for s in skipped)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("hf:{empty}", "has no config.json"),
        ("hf:nobody/nothing", "could not be opened"),
        ("hf:{bert}?class=os", "which transformers does not have"),
        ("hf:{bert}?class=BertForMaskedLM", "which would be random"),
        ("hf:{bert}?trust_remote_code=true", "possible are class, dtype, revision"),
        ("hf:{bert}?dtype=int8", "possible are auto, float32"),
    ],
)
def test_what_cannot_be_opened_is_said(
    spec: str, said: str, written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    bert = written("bert")[0].removeprefix("hf:")
    with pytest.raises(rw.RankwiseError, match=said):
        build(spec.format(empty=tmp_path, bert=bert))


def test_code_in_a_folder_is_never_run(written: Any, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(written("bert")[0].removeprefix("hf:"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "code.Model", "AutoConfig": "code.Config"}
    config["model_type"] = "unheard-of"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(rw.RankwiseError, match="could not be opened"):
        build(f"hf:{folder}")
    assert not (tmp_path / "ran").exists()


def test_a_network_of_the_hub_comes_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf:OWNER/NAME`, without a connection: what was downloaded before is opened, and its tokenizer goes along."""
    hub = pytest.importorskip("transformers.utils.hub")
    place = tmp_path / "models--me--tiny"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    tiny.folder(place / "snapshots" / ("a" * 40), tiny.llama())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    network = build("hf:me/tiny")
    small, plan = rw.compress(network, method="svd", keep=0.9, name="hf:me/tiny")
    rw.save(small, plan, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert same(rw.load(tmp_path / "out"), small, example_of(network))


def test_a_folder_that_is_half_replaced_is_the_old_one_or_the_new_one(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rename is the last before the machine stops, transformers opens one of the two networks, whole."""
    spec, example, small, _, folder = written("llama")
    other, another = rw.compress(build(spec), example, "svd", 0.7, name=spec)
    seen = []
    for last in range(8):
        out = tmp_path / str(last)
        shutil.copytree(folder, out)
        with monkeypatch.context() as patch:
            stop_after(patch, last)
            with suppress(rw.RankwiseError):
                rw.save(other, another, out)
        found = rw.load(out)
        seen.append(same(found, other, example))
        assert seen[-1] or same(found, small, example)
    assert seen == sorted(seen)
    assert seen[0] is False
    assert seen[1:] == [True] * 7


def stop_after(patch: pytest.MonkeyPatch, renames: int) -> None:
    """Every rename after so many fails, as if the process had ended."""
    done = []
    rename = os.replace

    def counted(part: Any, path: Any) -> None:
        if len(done) >= renames:
            raise OSError("the machine stopped")
        done.append(path)
        rename(part, path)

    patch.setattr(os, "replace", counted)
