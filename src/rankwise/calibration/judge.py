"""Judging a network on inputs that it was not fitted to: is recovery kept, and was the plan's prediction right?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from rankwise.calibration.answers import change_of
from rankwise.calibration.influence import Influence
from rankwise.calibration.inputs import Inputs
from rankwise.planning.plan import Plan

OFF = 2.0  # a prediction is off if it is by this factor
FEW = 1.5  # a change on new inputs that is so many times that on fitted ones: there were too few of them
LEAST = 3  # new inputs, to say so
LITTLE = 1e-3  # changes of the outputs below this share of their variance worry nobody


def variance_in(influence: Mapping[str, Influence]) -> float:
    """The variance of the network's outputs, which is the same for all layers."""
    return next((one.variance for one in influence.values()), 0.0)


def keep_if_better_(
    small: nn.Module, model: nn.Module, inputs: Inputs, variance: float, work: Callable[[], object]
) -> bool:
    """Do some work on `small`; undo it, and say False, if its outputs are then farther from the original's.

    Without inputs that are held out for this question the work is kept.
    """
    if not len(inputs.check) or not variance > 0:
        work()
        return True
    before = change_of(model, small, inputs.check, variance)
    state = copy.deepcopy(small.state_dict())
    work()
    if change_of(model, small, inputs.check, variance) <= before:
        return True
    small.load_state_dict(state)
    return False


def judged(small: nn.Module, model: nn.Module, plan: Plan, inputs: Inputs, variance: float, recovered: bool) -> Plan:
    """The plan with what was measured on the last inputs, which nothing has seen, and a warning if it is far off."""
    if plan.inputs is None:  # made from the weights alone after all
        return plan
    if not len(inputs.last) or not variance > 0:
        few = f"{sum(map(len, inputs.halves))} calibration inputs are too few to hold some out"
        return plan.warned(f"{few}: the predicted change of the outputs was not measured") if inputs.real else plan
    measured = change_of(model, small, inputs.last, variance)
    fitted = change_of(model, small, inputs.fitted.first(len(inputs.last)), variance)
    return with_change(plan, inputs, measured, fitted, recovered)


def with_change(plan: Plan, inputs: Inputs, measured: float, fitted: float, recovered: bool) -> Plan:
    """The plan with changes on new inputs and on fitted ones, and a warning if its prediction is far off."""
    plan = replace(plan, search=replace(plan.search, measured=measured, fitted=fitted))
    stated, what = plan.search.stated, plan.search.of_what()
    plan = plan.warned(*_too_few(measured, fitted, inputs, what))
    if stated is None or not inputs.real or max(measured, stated) < LITTLE:
        return plan
    if measured > OFF * stated:
        return plan.warned(
            f"the plan predicts a change of the outputs of {stated:.3g} {what}, and {measured:.3g} was "
            f"measured on {len(inputs.last)} new inputs: give more calibration inputs, or a larger budget"
        )
    if recovered or stated <= OFF * measured:
        return plan
    return plan.warned(
        f"the plan predicts a change of the outputs of {stated:.3g} {what}, and only {measured:.3g} was "
        f"measured on {len(inputs.last)} new inputs: a smaller budget may do, or more calibration inputs"
    )


def _too_few(measured: float, fitted: float, inputs: Inputs, what: str) -> list[str]:
    """How many calibration inputs are enough: with fewer, a network is much closer on those that it was fitted to."""
    if not inputs.real or len(inputs.last) < LEAST or measured <= max(LITTLE, FEW * fitted):
        return []
    return [
        f"the outputs change by {fitted:.3g} {what} on inputs that the network was fitted to, and by "
        f"{measured:.3g} on new ones: {sum(map(len, inputs.halves))} calibration inputs are few for it, more will help"
    ]
