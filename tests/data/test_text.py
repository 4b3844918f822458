"""Text: windows for networks that predict the next token, sentences for encoders, and never a padded position."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import rankwise as rw
import tiny_language as tiny
from rankwise.calibration.activations import input_moments
from rankwise.calibration.inputs import Inputs
from rankwise.calibration.padding import without_padding
from rankwise.data.named import load_for
from rankwise.data.text import default_split, is_text
from rankwise.networks import build
from rankwise.surgery.coverage import find_layers


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("story") / "story.txt"
    path.write_text("\n".join(tiny.SENTENCE + " ".join(tiny.WORDS[i % 20 :]) for i in range(60)))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{tiny.folder(tmp_path_factory.mktemp('llama'), tiny.llama())}"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{tiny.folder(tmp_path_factory.mktemp('bert'), tiny.bert(), sentence=True)}"


def test_windows_are_the_text_in_order(story: Path, llama: str) -> None:
    network = build(llama)
    split = load_for(network, f"text:{story}", "all", 16)
    tokens = tiny.tokenizer()(story.read_text())["input_ids"]
    joined = torch.cat([row["input_ids"] for row in split.rows]).tolist()
    assert joined == tokens[: len(joined)]
    assert len(tokens) - len(joined) < 16
    assert {len(row["input_ids"]) for row in split.rows} == {16}


def test_a_single_file_is_cut_so_that_nothing_is_judged_on_its_own_calibration(story: Path, llama: str) -> None:
    network, spec = build(llama), f"text:{story}"
    parts = [load_for(network, spec, name, 16).rows for name in ("calibration", "val", "test")]
    whole = load_for(network, spec, "all", 16).rows
    assert all(abs(len(part) - s * len(whole)) <= 1 for part, s in zip(parts, (0.8, 0.1, 0.1), strict=True))
    joined = [row["input_ids"] for part in parts for row in part]
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(joined, whole, strict=True))
    assert (default_split(spec), default_split("digits")) == ("all", "test")


def test_documents_of_jsonl_and_parquet_are_the_same_text(tmp_path: Path, llama: str) -> None:
    network, texts = build(llama), ["the cat sat .", "once upon a time the dog ran to the tree ."] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"id": i, "text": t}) for i, t in enumerate(texts)))
    arrow = pytest.importorskip("pyarrow")
    (tmp_path / "table").mkdir()
    table = arrow.table({"text": texts, "id": list(range(len(texts)))})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "table" / "rows.parquet")
    found = [
        load_for(network, spec, "all", 8).rows for spec in (f"jsonl:{tmp_path}/rows.jsonl", f"parquet:{tmp_path}/table")
    ]
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(*found, strict=True))
    assert 4 in torch.cat([row["input_ids"] for row in found[0]])  # </s> between documents
    assert is_text(f"parquet:{tmp_path}/table")


def test_sentences_share_a_batch_only_with_others_of_their_length(story: Path, bert: str) -> None:
    network = build(bert)
    split = load_for(network, f"text:{story}", "all", 30)
    assert len(split) == 60
    batches = [inputs["input_ids"] for inputs, _ in split.batches(128)]
    assert sum(map(len, batches)) == 60
    assert len({batch.shape[1] for batch in batches}) == len(batches) > 1
    assert all(bool((batch[:, 0] == 2).all()) and not bool((batch == 0).any()) for batch in batches)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_never_enters_statistics(bert: str, side: str) -> None:
    """Moments of a padded batch are those of its sentences one by one."""
    network, tokens = build(bert), tiny.tokenizer(sentence=True)
    texts = ["the cat sat", "a big red dog ran", "once upon a time the bird sang on the tree"]
    tokens.padding_side = side
    padded = dict(tokens(texts, return_tensors="pt", padding=True))
    alone = [{"input_ids": torch.tensor([tokens(text)["input_ids"]])} for text in texts]
    layers = list(find_layers(network).layers)
    ours, theirs = (input_moments(network, data, layers) for data in ([padded], alone))
    for layer in layers:
        a, b = ours[layer.name], theirs[layer.name]
        assert a.count == b.count
        torch.testing.assert_close(a.covariance, b.covariance, rtol=1e-4, atol=1e-6)
    assert all(bool(batch["attention_mask"].all()) for batch in without_padding(padded))  # type: ignore[index]


def test_batches_with_names_are_joined_and_cut_by_tokens() -> None:
    some = [{"input_ids": torch.arange(n * 512).reshape(n, 512)} for n in (1, 3, 9)]
    portion = Inputs(some, "calibration").fitted
    pieces = [piece.together()["input_ids"] for piece in portion.pieces()]  # type: ignore[index,call-overload]
    assert max(map(len, pieces)) == 4  # 2,048 tokens
    assert torch.equal(torch.cat(pieces).unique(), torch.cat([t["input_ids"] for t in portion]).unique())  # type: ignore[index,call-overload]


def test_perplexity_is_that_of_the_networks_own_loss(story: Path, llama: str) -> None:
    network = build(llama)
    found = rw.evaluate(network, f"text:{story}", size=16)
    windows = torch.stack([row["input_ids"] for row in load_for(network, f"text:{story}", "all", 16).rows])
    with torch.no_grad():
        logits = network(input_ids=windows).logits
    each = torch.stack([F.cross_entropy(a[:-1], b[1:]) for a, b in zip(logits, windows, strict=True)]).double()
    assert found.n == len(windows)
    assert found.tokens == 15 * len(windows)
    assert found.loss == pytest.approx(float(each.mean()), rel=1e-6)
    assert found.loss_error == pytest.approx(float(each.std()) / math.sqrt(len(each)), rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


@pytest.mark.parametrize(
    ("spec", "split", "said"),
    [
        ("text:missing.txt", "all", "there is no file missing.txt"),
        ("text:{story}", "other", "has no split 'other': it has train, fit, calibration, val, stop, test, all"),
    ],
)
def test_what_cannot_be_read_is_said(story: Path, llama: str, spec: str, split: str, said: str) -> None:
    with pytest.raises(rw.RankwiseError, match=said):
        load_for(build(llama), spec.format(story=story), split)


def test_lengths_that_the_network_does_not_take_are_refused(story: Path, llama: str) -> None:
    with pytest.raises(rw.RankwiseError, match="from 2 to 64, which is the most"):
        load_for(build(llama), f"text:{story}", "all", 65)


def test_a_network_without_a_tokenizer_takes_no_text(story: Path) -> None:
    with pytest.raises(rw.RankwiseError, match="comes with none: give hf:FOLDER"):
        load_for(build("digits-cnn"), f"text:{story}", "all")
