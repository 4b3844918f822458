"""Hooks: what callbacks see, what they may replace, and that nothing is left on the network."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.surgery.forward import run_until
from rankwise.surgery.hooks import Look, Seen, watching

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """a, then b twice (once by keyword), then c; b has a second name. May raise, and may catch what is raised."""

    def __init__(self, fails: bool = False, catches: type[BaseException] | tuple[()] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.again = self.b
        self.fails, self.catches = fails, catches

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.b(input=self.b(self.a(x)))
        except self.catches:
            return x
        if self.fails:
            raise ValueError("no")
        out: Tensor = self.c(x)
        return out


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def noting(log: list[str], *names: str, mark: str = "") -> dict[str, Look]:
    def note(name: str, _: Seen) -> None:
        log.append(mark + name)

    return {name: partial(note, name) for name in names}


def both(log: list[str], *names: str) -> tuple[dict[str, Look], dict[str, Look]]:
    return noting(log, *names, mark=">"), noting(log, *names, mark="<")


def never() -> bool:
    return False


def test_callbacks_are_called_in_the_order_of_the_calls() -> None:
    log: list[str] = []
    model = Net()
    with watching(model, *both(log, "c", "", "a", "b")):  # not in the order in which they were asked for
        model(X)
    assert log == ["<", "<a", ">a", "<b", ">b", "<b", ">b", "<c", ">c", ">"]


def test_a_call_is_seen_as_it_was() -> None:
    """By position or by keyword; before and after; and the output is the network's own tensor."""
    model, seen, early = Net(), [], []
    looks: tuple[dict[str, Look], dict[str, Look]] = {"b": seen.append}, {"b": early.append}
    with watching(model, *looks):
        model(X)
    first, second = seen
    assert (len(first.args), list(first.kwargs)) == (1, [])
    assert (len(second.args), list(second.kwargs)) == (0, ["input"])
    assert second.given is first.output
    assert all(call.module is model.b and torch.equal(call.output, model.b(call.given)) for call in (first, second))
    assert [call.given is then.given for call, then in zip(early, seen, strict=True)] == [True, True]
    assert [call.output for call in early] == [None, None]


def test_two_names_of_a_module_are_two_callbacks() -> None:
    log: list[str] = []
    model = Net()
    with watching(model, noting(log, "again", "b")):
        model(X)
    assert log == ["again", "b", "again", "b"]


def test_what_a_callback_returns_takes_the_place_of_the_output() -> None:
    """Twice on one module: the second sees what the first put there, and the network goes on with the last."""
    model, log = Net(), []

    def plus(number: float, call: Seen) -> Tensor:
        log.append(call.output)
        return call.output + number  # type: ignore[no-any-return]

    with watching(model, {"again": partial(plus, 1.0), "b": partial(plus, 10.0)}):
        given = model(X)
    wanted = model.c(model.b(model.b(model.a(X)) + 11) + 11)
    assert torch.allclose(given, wanted)
    assert torch.equal(log[1], log[0] + 1)
    assert torch.allclose(model(X), model.c(model.b(model.b(model.a(X)))))


def test_what_a_callback_returns_takes_the_place_of_the_input() -> None:
    """By position and by keyword alike, and other arguments stay."""
    model = Net()
    with watching(model, before={"b": lambda call: torch.zeros_like(call.given)}):
        given = model(X)
    assert torch.equal(given, model.c(model.b(torch.zeros(4, 3))))

    up = nn.Sequential(nn.ConvTranspose1d(1, 1, 3, stride=2))
    x = torch.ones(1, 1, 5)
    with watching(up, before={"0": lambda call: 2 * call.given}):
        assert torch.equal(up[0](x, [12]), up[0](x, output_size=[12]))
        assert up[0](x, [12]).shape[-1] == 12
        assert torch.equal(up[0](input=x, output_size=[12]), up[0](x, [12]))
        doubled = up[0](x, [12])
    assert torch.equal(doubled, up[0](2 * x, [12]))


def wrong_name(model: Net) -> None:
    with watching(model, {"a": print, "b": print, "nobody": print, "c": print}, {"a": print}):
        raise AssertionError("nothing may run under some of the hooks")


def network_fails(model: Net) -> None:
    model.fails = True
    log: list[str] = []
    with watching(model, *both(log, "a", "b")):
        model(X)


def callback_fails(model: Net) -> None:
    def fail(_: Seen) -> None:
        raise ValueError("no")

    with watching(model, {"a": print, "b": fail}, {"c": print}):
        model(X)


def body_is_interrupted(model: Net) -> None:
    with watching(model, {"a": print}):
        raise KeyboardInterrupt


def run_fails(model: Net) -> None:
    model.fails = True
    run_until(model, X, noting([], "a", "c"), never)


@pytest.mark.parametrize("use", [wrong_name, network_fails, callback_fails, body_is_interrupted, run_fails])
def test_no_hook_is_left_where_something_fails(use: Callable[[Net], None]) -> None:
    model, log = Net(), []
    handle = model.b.register_forward_hook(lambda *_: log.append("its own"))
    before = hooks_on(model)
    with pytest.raises((AttributeError, ValueError, KeyboardInterrupt, RankwiseError)):
        use(model)
    assert hooks_on(model) == before
    model.fails = False
    log.clear()
    model(X)
    assert log == ["its own", "its own"], "hooks of the network's owner stay"
    handle.remove()


def test_no_hook_is_left_after_success_and_nested_use_ends_inside_out() -> None:
    model, outer, inner = Net(), [], []
    with watching(model, noting(outer, "b", "c"), noting(outer, "b", mark="<")):
        hung = hooks_on(model)
        with watching(model, noting(inner, "b")):
            model(X)
        assert hooks_on(model) == hung
        model(X)
    assert hooks_on(model) == 0
    assert outer == ["<b", "b", "<b", "b", "c"] * 2
    assert inner == ["b", "b"]


@pytest.mark.parametrize("catches", [(), Exception])
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_stops_as_soon_as_it_is_enough(count: int, catches: type[BaseException] | tuple[()]) -> None:
    """Nothing behind the call that was enough is run, also where the network catches exceptions."""
    model, log, later = Net(catches=catches), [], []
    with watching(model, noting(later, "c", ""), noting(later, "b")):
        left = hooks_on(model)
        run_until(model, X, noting(log, "a", "b"), lambda: log.count("b") == count)
        assert hooks_on(model) == left
    assert log == ["a"] + ["b"] * count
    assert later == ["b"] * count
    assert hooks_on(model) == 0


def test_a_run_that_is_never_enough_is_a_whole_run() -> None:
    model, log = Net(), []
    run_until(model, X, noting(log, "a", "b", "c"), never)
    assert log == ["a", "b", "b", "c"]


def test_a_run_inside_a_run_stops_itself_only() -> None:
    """The inner one ends early and the outer one goes on; what the outer one raises passes through the inner one."""
    model, other, log = Net(), Net(), []

    def run_other(_: Seen) -> None:
        run_until(other, X, noting(log, "a", "b", mark="other "), lambda: log[-1] == "other a")

    run_until(model, X, {"a": run_other, **noting(log, "b", "c")}, lambda: log[-1] == "c")
    assert log == ["other a", "b", "b", "c"]

    log.clear()
    reached = []

    def run_again(_: Seen) -> None:  # under the hook of the outer run on c
        run_until(model.c, X, noting(log, "", mark="inner"), never)
        reached.append(True)

    run_until(model, X, {"a": run_again, **noting(log, "c")}, lambda: "c" in log)
    assert log == ["c"]
    assert not reached
    assert hooks_on(model) == hooks_on(other) == 0


def test_a_run_that_stopped_keeps_no_tensor() -> None:
    """Without a collection of garbage: a traceback that is kept would keep what the network had computed."""
    model, kept = Net(), []
    gc.disable()
    try:
        run_until(model, X, {"b": lambda call: kept.append(weakref.ref(call.output))}, lambda: bool(kept))
        assert [ref() for ref in kept] == [None]
    finally:
        gc.enable()
