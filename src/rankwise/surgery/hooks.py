"""Hooks on modules, hung and taken down in this one place: look at calls, replace what goes in or what comes out.

    with watching(model, after={"conv1": lambda call: print(call.output.shape)}):
        model(images)

`forward.run_until` runs a network under hooks and stops early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Seen(NamedTuple):
    """One call of a module. `output` is None where the module has not run yet.

    A tuple and not a dataclass: it is made within the time that `timing.clock` measures, and is made faster.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def given(self) -> Tensor:
        """The input: the first argument by position, or the first keyword argument where there is none."""
        found: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return found


Look = Callable[[Seen], Tensor | None]  # a tensor replaces the input (before) or the output (after) of the call
Looks = Mapping[str, Look]  # by name of the module; "" is the network itself


@contextmanager
def watching(model: nn.Module, after: Looks | None = None, before: Looks | None = None) -> Iterator[None]:
    """With these callbacks before and after every call of the named modules.

    A module that is called twice is looked at twice. Two names of one module are two callbacks, in the order of the
    mapping; the second one sees what the first one put in place. All hooks are gone afterwards, whatever was raised,
    also where a name is unknown and only some of them were hung.
    """
    with ExitStack() as hung:
        for name, look in (before or {}).items():
            hook = model.get_submodule(name).register_forward_pre_hook(_entering(look), with_kwargs=True)
            hung.callback(hook.remove)
        for name, look in (after or {}).items():
            hook = model.get_submodule(name).register_forward_hook(_leaving(look), with_kwargs=True)
            hung.callback(hook.remove)
        yield


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _entering(look: Look) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Arguments | None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        new = look(Seen(module, args, kwargs))
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): new})

    return hook


def _leaving(look: Look) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Tensor | None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        return look(Seen(module, args, kwargs, output))

    return hook
