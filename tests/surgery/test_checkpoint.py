"""Checkpoints: what was saved comes back bit for bit, nothing is executed, and damage is one sentence."""

from __future__ import annotations

import copy
import json
import os
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rankwise as rw
from rankwise.core import files
from rankwise.surgery.checkpoint import read_plan
from sentences import check_sentence

PLAN, WEIGHTS = "plan.json", "model.safetensors"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


class Net(nn.Module):
    """Batch norm, dropout, a module used twice, and two layers that share one weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.shared = nn.Conv2d(width, width, 3, padding=1)
        self.again = self.shared
        self.drop = nn.Dropout(0.5)
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.shared(self.norm(self.first(x))).relu())
        return self.last(self.two(self.one(self.drop(x.mean((2, 3))))))


def network(width: int = 8, seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(width)


def compressed(model: nn.Module, keep: float = 0.6, **changes: Any) -> tuple[nn.Module, rw.Plan]:
    small, plan = rw.compress(model, keep=keep, **{"method": "alds+", **changes})
    assert plan.choices
    return small, plan


def outputs(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)  # dropout, where the model is in train mode
        return model(X.to(dtype))


def same_state(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small network."""
    rw.save(*compressed(network()), tmp_path / "out")
    return tmp_path / "out"


# ---- there and back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, training: bool) -> None:
    model = network().to(dtype).train(training)
    small, plan = compressed(model)
    rw.save(small, plan, tmp_path)
    again = rw.load(tmp_path, network(seed=7).to(dtype).train(training))
    assert same_state(small, again)
    assert [m.training for m in again.modules()] == [m.training for m in small.modules()]
    assert torch.equal(outputs(copy.deepcopy(small), dtype), outputs(again, dtype))
    assert sorted(p.name for p in tmp_path.iterdir()) == [WEIGHTS, PLAN]
    assert read_plan(tmp_path) == plan


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    small, plan = compressed(network())
    for i in range(4):
        rw.save(small, plan, tmp_path / str(i))
    for name in (PLAN, WEIGHTS):
        assert len({(tmp_path / str(i) / name).read_bytes() for i in range(4)}) == 1


def test_what_was_shared_is_shared_again(folder: Path) -> None:
    again = rw.load(folder, network())
    assert again.shared is again.again
    assert again.one.weight is again.two.weight
    assert isinstance(again.shared, nn.Sequential)
    stored = load_file(folder / WEIGHTS)
    assert len([k for k in stored if k.startswith(("shared.", "again."))]) == 3  # encoder, decoder and its bias: once
    assert len([k for k in stored if k in ("one.weight", "two.weight")]) == 1


def test_loading_leaves_the_given_model_untouched(folder: Path) -> None:
    model = network(seed=3)
    before = copy.deepcopy(model)
    again = rw.load(folder, model)
    assert same_state(model, before)
    assert type(model.first) is nn.Conv2d
    theirs = {p.data_ptr() for p in model.parameters()}
    assert theirs.isdisjoint(p.data_ptr() for p in again.parameters())


def test_loading_and_saving_leave_the_random_state_alone(folder: Path, tmp_path: Path) -> None:
    model = network()
    state = torch.get_rng_state()
    again = rw.load(folder, model)
    rw.save(again, read_plan(folder), tmp_path / "copy")
    assert torch.equal(torch.get_rng_state(), state)


def test_fine_tuned_factors_are_what_is_saved(tmp_path: Path) -> None:
    small, plan = compressed(network())
    optimiser = torch.optim.SGD(small.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        small(X).square().mean().backward()
        optimiser.step()
    rw.save(small, plan, tmp_path)
    again = rw.load(tmp_path, network())
    assert same_state(small, again)
    assert not same_state(rw.apply_plan(network(), plan), again)


def test_a_loaded_network_can_be_trained(folder: Path) -> None:
    again = rw.load(folder, network())
    again(X).sum().backward()
    assert all(p.requires_grad and p.grad is not None for p in again.parameters())


def test_a_loaded_network_can_be_made_dense_again(folder: Path) -> None:
    again = rw.load(folder, network().eval())
    dense = rw.densify(again)
    torch.testing.assert_close(outputs(dense), outputs(again), atol=1e-5, rtol=1e-4)
    assert {k: v.shape for k, v in dense.state_dict().items()} == {
        k: v.shape for k, v in network().state_dict().items()
    }
    assert isinstance(again.shared, nn.Sequential)  # densify makes a copy


def test_weights_of_the_given_model_do_not_matter(folder: Path) -> None:
    """They are about to be replaced; a model that was never initialised may hold anything."""
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    assert same_state(rw.load(folder, model), rw.load(folder, network()))


def test_another_plan_overwrites_a_folder(folder: Path) -> None:
    small, plan = compressed(network(), keep=0.45)
    assert plan != read_plan(folder)
    rw.save(small, plan, folder)
    assert read_plan(folder) == plan
    assert same_state(rw.load(folder, network()), small)


# ---- surgery ---------------------------------------------------------------------------------------------


def test_apply_plan_copies_and_apply_plan_in_place_does_not() -> None:
    model = network()
    _, plan = compressed(model)
    before = copy.deepcopy(model)
    small = rw.apply_plan(model, plan)
    assert same_state(model, before)
    assert type(model.first) is nn.Conv2d
    assert rw.apply_plan_(model, plan) is None
    assert same_state(model, small)
    assert rw.densify_(model) is None
    assert type(model.first) is nn.Conv2d


def test_compressing_twice_is_refused() -> None:
    model = network()
    small, plan = compressed(model)
    before = copy.deepcopy(small)
    assert "already compressed" in check_sentence(lambda: rw.apply_plan(small, plan))
    assert "already compressed" in check_sentence(lambda: rw.apply_plan_(small, plan))
    assert "already compressed" in check_sentence(lambda: rw.compress(small, keep=0.5))
    assert same_state(small, before)


# ---- what does not fit -----------------------------------------------------------------------------------


def test_another_network_says_what_differs(folder: Path) -> None:
    assert "(12, 3, 3, 3)" in check_sentence(lambda: rw.load(folder, network(12)))
    assert "does not have" in check_sentence(lambda: rw.load(folder, nn.Sequential(nn.Linear(3, 3))))
    message = check_sentence(lambda: rw.load(folder, network().double()))
    assert "float32" in message
    assert "float64" in message
    more = network()
    more.extra = nn.Linear(2, 2)
    assert "'extra.weight'" in check_sentence(lambda: rw.load(folder, more))
    less = network()
    less.norm = nn.Identity()
    assert "'norm." in check_sentence(lambda: rw.load(folder, less))
    wider = network()
    wider.norm = nn.BatchNorm2d(9)
    assert "(9,)" in check_sentence(lambda: rw.load(folder, wider))


def test_tensors_that_differ_are_not_loaded_into_one(tmp_path: Path) -> None:
    """The last one would win, and the network would silently be another."""
    apart = network()
    apart.two.weight = nn.Parameter(apart.two.weight.detach() + 1)
    small, plan = compressed(apart, exclude=["one", "two"])
    rw.save(small, plan, tmp_path)
    message = check_sentence(lambda: rw.load(tmp_path, network()))
    assert "'one.weight'" in message
    assert "'two.weight'" in message
    with torch.no_grad():
        small.two.weight.copy_(small.one.weight)
    rw.save(small, plan, tmp_path)
    assert same_state(rw.load(tmp_path, network()), small)


@pytest.mark.parametrize("wrong", [None, "resnet18", {}])
def test_what_is_no_network_is_refused(folder: Path, wrong: Any) -> None:
    assert "Module" in check_sentence(lambda: rw.load(folder, wrong))
    assert "Module" in check_sentence(lambda: rw.save(wrong, read_plan(folder), folder))


def test_a_network_that_does_not_follow_the_plan_is_not_saved(tmp_path: Path) -> None:
    model = network()
    small, plan = compressed(model)
    first = plan.choices[0]
    others = [entry for entry in plan.layers if entry is not first]
    _, another = compressed(model, keep=0.45)
    for network_, plan_ in [
        (model, plan),
        (small, another),
        (small, replace(plan, layers=(replace(first, rank=first.rank + 1), *others))),
        (small, replace(plan, layers=(replace(first, name="nowhere"), *others))),
        (small, replace(plan, layers=tuple(others))),  # a pair that the plan does not know could not be loaded
        (rw.densify(small), plan),
    ]:
        assert "does not follow the plan" in check_sentence(lambda n=network_, p=plan_: rw.save(n, p, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


class Remembers(nn.Linear):
    """A module that keeps more than tensors in its state dict."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 4)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_is_saved_as_a_tensor_or_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), Remembers({"step": 3}))
    small, plan = compressed(model)
    assert "'1._extra_state'" in check_sentence(lambda: rw.save(small, plan, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    small[1].extra = torch.tensor([1.0, 2.0])
    rw.save(small, plan, tmp_path / "out")
    fresh = nn.Sequential(nn.Linear(32, 32), Remembers(torch.zeros(2)))
    assert rw.load(tmp_path / "out", fresh)[1].extra.tolist() == [1.0, 2.0]


# ---- damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.9, 0.9999])
def test_truncated_weights_are_refused(folder: Path, share: float) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(share * len(data))])
    assert WEIGHTS in check_sentence(lambda: rw.load(folder, network()))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_plan_is_refused(folder: Path, share: float) -> None:
    data = (folder / PLAN).read_bytes()
    (folder / PLAN).write_bytes(data[: int(share * (len(data) - 2))])
    assert PLAN in check_sentence(lambda: rw.load(folder, network()))


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    assert WEIGHTS in check_sentence(lambda: rw.load(folder, network()))
    (folder / WEIGHTS).write_bytes(data)
    (folder / PLAN).unlink()
    assert PLAN in check_sentence(lambda: rw.load(folder, network()))
    assert "not a folder" in check_sentence(lambda: rw.load(tmp_path / "absent", network()))
    (folder / PLAN).mkdir()
    assert PLAN in check_sentence(lambda: rw.load(folder, network()))


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    small, plan = compressed(network())
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        check_sentence(lambda p=path: rw.save(small, plan, p))
        assert "not a folder" in check_sentence(lambda p=path: rw.load(p, network()))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_in_which_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, plan = compressed(network())

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    message = check_sentence(lambda: rw.save(small, plan, tmp_path / "a"))
    monkeypatch.undo()
    assert "Permission denied" in message
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Permission denied" in check_sentence(lambda: rw.save(small, plan, tmp_path / "b"))


def test_an_edited_plan_is_noticed(folder: Path) -> None:
    body = json.loads((folder / PLAN).read_bytes())
    layer = next(e for e in body["layers"] if "rank" in e)
    for change in ({"rank": layer["rank"] + 1}, {"error": {}}):
        edited = copy.deepcopy(body)
        next(e for e in edited["layers"] if "rank" in e).update(change)
        (folder / PLAN).write_text(json.dumps(edited))
        assert "do not belong together" in check_sentence(lambda: rw.load(folder, network()))
    (folder / PLAN).write_text(json.dumps(body))  # the same values, laid out differently
    assert rw.load(folder, network())


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' + "9" * 400 + "}"])
def test_a_plan_with_values_that_cannot_be_written_is_refused(folder: Path, text: str) -> None:
    body = json.loads((folder / PLAN).read_bytes()) | {"settings": "HERE"}
    (folder / PLAN).write_text(json.dumps(body).replace('"HERE"', text))
    assert PLAN in check_sentence(lambda: rw.load(folder, network()))


def test_weights_of_another_plan_are_noticed(folder: Path, tmp_path: Path) -> None:
    rw.save(*compressed(network(), keep=0.45), tmp_path / "other")
    (folder / WEIGHTS).write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
    assert "do not belong together" in check_sentence(lambda: rw.load(folder, network()))


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_foreign_weights_are_refused(folder: Path) -> None:
    tensors, known = load_file(folder / WEIGHTS), metadata(folder / WEIGHTS)
    first = next(k for k, v in tensors.items() if v.ndim)
    for changed, about in [
        (tensors, {}),
        (tensors, {"format": "pt"}),
        ({k: v for k, v in tensors.items() if k != first}, known),
        ({**tensors, "more": torch.zeros(1)}, known),
        ({**tensors, first: tensors[first].double()}, known),
        ({**tensors, first: tensors[first][:1]}, known),
    ]:
        save_file(changed, folder / WEIGHTS, metadata=about)
        assert WEIGHTS in check_sentence(lambda: rw.load(folder, network()))


json_text = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**31) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("one.weight"), inner),
    max_leaves=4,
).map(json.dumps)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=5) | json_text)
@example(text='{"two.weight": ["one.weight"]}')
@example(text='{"two.weight": {}}')
@example(text="[]")
def test_a_forged_header_is_refused_or_harmless(folder: Path, text: str) -> None:
    """Whatever stands in our header: the network as saved, or one sentence."""
    original, small = (folder / WEIGHTS).read_bytes(), rw.load(folder, network())
    plan = json.loads(metadata(folder / WEIGHTS)["rankwise"])["plan"]
    for forged in (text, f'{{"plan": {text}, "same": {{}}}}', f'{{"plan": "{plan}", "same": {text}}}'):
        save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, metadata={"rankwise": forged})
        try:
            assert same_state(rw.load(folder, network()), small)
        except rw.RankwiseError as err:
            assert "\n" not in str(err)  # noqa: PT017
        (folder / WEIGHTS).write_bytes(original)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_refused_or_another_number(data: st.DataObject, folder: Path) -> None:
    """Weights carry no checksum, but names, shapes and dtypes must still be those of the model."""
    original = (folder / WEIGHTS).read_bytes()
    content = bytearray(original)
    header = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (folder / WEIGHTS).write_bytes(content)
    try:
        rw.load(folder, network())
    except rw.RankwiseError as err:
        assert "\n" not in str(err)  # noqa: PT017
    finally:
        (folder / WEIGHTS).write_bytes(original)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", [WEIGHTS, PLAN, "model.pth", "pytorch_model.bin", "rankwise.pkl"])
@pytest.mark.parametrize("write", [lambda o: pickle.dumps(o), "torch"], ids=["pickle", "torch"])
def test_nothing_in_a_folder_is_executed(folder: Path, tmp_path: Path, name: str, write: Any) -> None:
    trap = tmp_path / "executed"
    if write == "torch":
        torch.save({"weight": Bomb(trap)}, folder / name)
    else:
        (folder / name).write_bytes(write(Bomb(trap)))
    if name in (WEIGHTS, PLAN):
        assert name in check_sentence(lambda: rw.load(folder, network()))
    else:
        assert rw.load(folder, network())
    assert not trap.exists()
    pickle.loads(pickle.dumps(Bomb(trap)))
    assert trap.exists()  # the trap works


# ---- interruptions ---------------------------------------------------------------------------------------


def interrupt(patch: pytest.MonkeyPatch, name: str, nth: int, error: type[BaseException]) -> None:
    """Let the nth call of os.`name` fail."""
    original, calls = getattr(os, name), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == nth:
            raise error(28, "No space left on device")
        return original(*args)

    patch.setattr(files.os, name, fail)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("name", ["replace", "fsync"])
@pytest.mark.parametrize("other", [False, True], ids=["same plan", "other plan"])
def test_an_interrupted_save_leaves_a_folder_that_can_be_trusted(
    folder: Path, other: bool, name: str, nth: int, error: type[BaseException]
) -> None:
    """The old network until the weights are renamed, then the new one; a second rename that fails is tried again."""
    old, old_plan = rw.load(folder, network()), read_plan(folder)
    new, plan = compressed(network(seed=5), keep=0.45) if other else (copy.deepcopy(old), read_plan(folder))
    with torch.no_grad():
        new.norm.bias += 1
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, name, nth, error)
        between = name == "replace" and nth == 2
        stops = rw.RankwiseError if error is OSError else KeyboardInterrupt
        with nullcontext() if between and error is OSError else pytest.raises(stops):
            rw.save(new, plan, folder)
    assert same_state(rw.load(folder, network()), new if between else old)
    assert read_plan(folder) == (plan if between else old_plan)
    if not between or error is OSError:
        assert sorted(p.name for p in folder.iterdir()) == [WEIGHTS, PLAN]
    rw.save(new, plan, folder)  # and what was left behind is in nobody's way
    assert same_state(rw.load(folder, network()), new)
    assert sorted(p.name for p in folder.iterdir()) == [WEIGHTS, PLAN]


def test_a_plan_that_cannot_be_written_is_refused_before_anything_is(folder: Path) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    small, plan = rw.load(folder, network()), read_plan(folder)
    for wrong in ({"x": float("nan")}, {"x": object()}, {"x": "\ud800"}):
        check_sentence(lambda w=wrong: rw.save(small, replace(plan, settings=w), folder))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


class Versioned(nn.Sequential):
    """Looks at the version that its state dict was written with, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local: dict[str, Any], *rest: Any) -> None:
        assert local.get("version") == 2
        super()._load_from_state_dict(state, prefix, local, *rest)


def test_modules_that_ask_for_their_version(tmp_path: Path) -> None:
    model = Versioned(nn.Linear(20, 20), nn.Linear(20, 20))
    small, plan = rw.compress(model, keep=0.5)
    rw.save(small, plan, tmp_path)
    x = torch.randn(3, 20)
    assert torch.equal(rw.load(tmp_path, model)(x), small(x))
