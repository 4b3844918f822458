"""From a network, a request and a budget to a plan, and from the plan to a network that can be shipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module

from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from rankwise.calibration.activations import Data, output_moments
from rankwise.calibration.agreement import Agreement
from rankwise.calibration.answers import change_of
from rankwise.calibration.distill import read_effort, recover_
from rankwise.calibration.effect_table import each_influence
from rankwise.calibration.fit import Closed, Fit, fit_closed, fit_in_order
from rankwise.calibration.inputs import NOISE, find_inputs
from rankwise.calibration.judge import judged, keep_if_better_, variance_in
from rankwise.calibration.synthetic import NoInputs
from rankwise.compression.basis import Basis, Ground, Observations, Tables, Watch, failed, make_basis, weights_alone
from rankwise.compression.request import Request
from rankwise.compression.room import check_memory
from rankwise.core.layer import Coverage
from rankwise.core.linalg import computing_on
from rankwise.data.loaders import notes_of
from rankwise.decompositions import FITTED, LOOKUPS, METRIC, OUTPUTS, TOKENS, of
from rankwise.errors import RankwiseError
from rankwise.methods import calibration, settings_for
from rankwise.planning.budget import Budget, check_sizes
from rankwise.planning.floor import check_reachable
from rankwise.planning.plan import Plan
from rankwise.planning.planner import Settings
from rankwise.pruning.filters import Filters, plan_filters
from rankwise.surgery.coverage import COMPRESSED, find_layers
from rankwise.surgery.forward import Example
from rankwise.surgery.fuse import find_norms, fuse_norms
from rankwise.surgery.layout import lay_out_
from rankwise.surgery.narrow import check_entry
from rankwise.surgery.pretrained_folder import is_pretrained
from rankwise.surgery.replace import follow, match_layers
from rankwise.surgery.trained import check_weights, weights_hash
from rankwise.timing.clock import Timing
from rankwise.timing.cost_model import measure_times
from rankwise.timing.rank_multiple import best_multiple
from rankwise.timing.tune import settle

OTHER_WEIGHTS = (
    "the plan was made for other weights than this network has: its ranks and errors are those of the others"
)


class Compression:
    """A request for one network. All that no budget changes is made once, where it is needed first.

        job = Compression(model, example, Request(method="auto"), data)
        plan = job.plan(Budget(params=0.5))        # one decision for each layer
        small, plan = job.build(plan)              # a copy of the model that follows it
        plan = job.recover_(small, plan)           # distilled from the original, if that was asked for
        small, plan = job.finish(small, plan)      # as it is shipped: norms folded, weights laid out

    `run` does all of this. `data` are inputs without labels, or the name of a data set. `watch` sees what is going on,
    `tables` may keep tables of weights and activations, `coverage` is what `find_layers` gave, if that is known.
    """

    copies = True  # of the whole network: one is made

    def __init__(
        self,
        model: nn.Module,
        example: Example | None = None,
        request: Request | None = None,
        data: Data | str | None = None,
        watch: Watch | None = None,
        tables: Tables | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        self.model, self.example, self.request = model, example, request or Request()
        self.name = self.request.name or type(model).__name__
        self._data, self._watch, self._tables, self._coverage = data, watch, tables, coverage
        self._read: object = None  # the data, where it can be read once only
        self._bases: dict[tuple[bool, bool], Basis] = {}
        self._closed: tuple[tuple[object, ...], Closed] | None = None  # of the last plan, and what it decides

    # ---- what no budget changes

    @cached_property
    def coverage(self) -> Coverage:
        """Every layer, or why not."""
        exclude = () if self.request.plan is not None else self.request.exclude
        return self._coverage or find_layers(self.model, self.example, exclude)

    @cached_property
    def settings(self) -> Settings | Filters:
        """Those of the method with the changes that were asked for; "measured" is a number here."""
        changes = dict(self.request.changes)
        if changes.get("rank_multiple") == "measured":
            how = (self.request.timing, self.coverage)
            changes["rank_multiple"] = best_multiple(self.model, self.example, *how)
        return settings_for(self.request.method, **changes)

    @cached_property
    def ground(self) -> Ground:
        """The network and what is known about it before anything is planned."""
        data: Data | None = None
        if self.request.looks_at_data:
            asked = (self.request.input, self.request.calibrate, self.coverage.macs)
            data = calibration(self._data, self.model, self.example, *asked)
        if isinstance(data, Iterator) and self.request.recovers:
            self._read = data
            data = list(data)  # distilled on what was looked at before
        return Ground(self.model, self.example, self.coverage, data, self._watch, self._tables)

    def basis(self, budget: Budget | None) -> Basis:
        """What plans for such a budget are made from. Nothing is timed unless time was asked for."""
        settings = self.settings
        assert isinstance(settings, Settings), "methods that remove filters have no table"
        timed = settings.never_slower or (budget is not None and budget.timed)
        fuse = timed and self.fuses(budget)
        if (timed, fuse) not in self._bases:
            times = None
            if timed:
                with self.ground.stage("timing") as report:
                    how = (self.request.timing, self.coverage, report)
                    times = measure_times(self.model, self.example, *how, fuse=fuse)
            self._bases[timed, fuse] = make_basis(self.ground, settings, times, self.request.is_free)
        return self._bases[timed, fuse]

    def seen(self, plan: Plan) -> Observations:
        """What building the plan needs beside the weights."""
        if self.request.plan is not None:
            return self._seen_again
        return Observations() if isinstance(self.settings, Filters) else self.basis(plan.budget).seen

    @cached_property
    def _seen_again(self) -> Observations:
        """For a plan that was read: with the inputs of the time it was made, the same as at that time."""
        plan, ground = self.plan(None), self.ground
        needs = {of(choice.option).needs for choice in plan.choices}
        if OUTPUTS in needs and ground.data is not None:
            return Observations(output_moments(self.model, ground.data, self.coverage.layers))
        if not needs & {METRIC, TOKENS}:
            return Observations()
        seed = int(plan.settings.get("seed") or 0)
        try:
            inputs = find_inputs(self.model, self.example, ground.data, self.coverage.macs, seed)
        except NoInputs:
            return Observations()  # surgery says what is missing
        if inputs.kind == NOISE != plan.inputs:
            return Observations()
        found = each_influence(self.model, inputs, self.coverage.with_embeddings(), seed)
        return Observations({}, inputs, {layer.name: one for layer, one in found})

    def check(self) -> None:
        """Refuse a network that there is nothing to do with."""
        taken = [s.name for s in self.coverage.skipped if s.reason == COMPRESSED]
        if taken:
            raise RankwiseError(
                f"the model is already compressed (layer {taken[0]!r}, for one): compress the original again, with a "
                f"smaller budget (in Python rankwise.densify multiplies pairs out)"
            )
        if not self.coverage.layers and not isinstance(self.settings, Filters):
            raise RankwiseError(
                "the model has no layer that can be decomposed: rankwise inspect says why (in Python: find_layers)"
            )

    def fuses(self, budget: Budget | None) -> bool:
        """Whether batch norms are folded at the end: for a budget in time, since it costs no accuracy."""
        if self.request.fuse is not None:
            return self.request.fuse
        if self.request.plan is not None:
            return bool(self.request.plan.fused)
        return budget is not None and budget.timed

    @cached_property
    def weights(self) -> str:
        """Which weights the network has; a plan that is made for them says so."""
        return weights_hash(self.model)

    def _check_plan(self, plan: Plan) -> Plan:
        """A plan from a file must fit the network; made for other weights, it says so."""
        match_layers(self.model, plan, self._coverage)
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for entry in plan.pruned:
            check_entry(modules.get(entry.name), entry)
        check_weights(self.model, self.coverage)
        return plan.warned(OTHER_WEIGHTS) if plan.weights not in ("", self.weights) else plan

    # ---- from a budget to a network

    def plan(self, budget: Budget | None) -> Plan:
        """One decision for each layer, never above the budget; with a latency in it, one that was timed (tune.py).

        Decompositions that read their ranks from the weights can do without a budget, and so can a plan that is made.
        """
        if self.request.plan is not None:
            return self._replayed
        self.check()
        check_sizes(budget, self.coverage)
        self._check_reachable(budget)
        check_memory(self.model, self.coverage, self.copies, self.request.is_free and self._data is not None)
        check_weights(self.model, self.coverage)
        with computing_on(self.request.device):
            plan = replace(self._plan(budget), weights=self.weights)
        return plan.warned(*notes_of(self._read or self.ground.data))

    def _check_reachable(self, budget: Budget | None) -> None:
        """Refuse a budget below the smallest that shapes allow. `auto` may come to use fitted decompositions."""
        settings = self.settings
        if isinstance(settings, Settings):
            free = self.request.is_free
            names = (*settings.decompositions, *((*FITTED, *LOOKUPS) if free else ()))
            coverage = self.coverage.with_embeddings() if free and self._data is not None else self.coverage
            check_reachable(coverage, budget, settings.selection, names, settings.rank_multiple)

    @cached_property
    def _replayed(self) -> Plan:
        assert self.request.plan is not None, "there is a plan to follow"
        return self._check_plan(self.request.plan)

    def _plan(self, budget: Budget | None) -> Plan:
        if isinstance(self.settings, Filters):
            return self._filters(self.settings, budget)
        self.basis(budget)  # before the clock runs
        if budget is None or not budget.timed:
            return self._agreed(budget)
        timing, fuse = self.request.timing or Timing(), self.fuses(budget)
        with self.ground.stage("timing the plan"):
            return settle(budget, self._planned, self.model, self.example, timing, fuse)

    def _planned(self, budget: Budget | None) -> Plan:
        return self.basis(budget).plan(budget, self.request.method, self.name)

    def _agreed(self, budget: Budget | None) -> Plan:
        """The plan, made again where its network on held-out inputs is not what it states (agreement.py)."""
        basis = self.basis(budget)
        seen, layers = basis.seen, {layer.name: layer for layer in basis.table.coverage.layers}
        if seen.inputs is None or basis.settings.error != "effect":
            return self._planned(budget)
        agreement = Agreement(self.model, layers, seen.inputs, seen.influence)
        if not agreement.possible:
            return self._planned(budget)

        def make(factors: Mapping[str, float]) -> Plan:
            return basis.corrected(factors).plan(budget, self.request.method, self.name)

        def build(plan: Plan) -> Closed:
            return fit_closed(self.model, plan, agreement.inputs, seen.influence, seen.moments, self._known)

        try:
            found = agreement.found(make, build)
        except LinAlgError:  # `build` says what becomes of it
            return self._planned(budget)
        self._closed = (found.plan.layers, found.closed)
        return found.plan

    def _filters(self, settings: Filters, budget: Budget | None) -> Plan:
        if budget is None:
            raise RankwiseError(f"{self.request.method!r} needs a budget, and none was given: for instance keep=0.4")
        plan = plan_filters(self.model, self.example, self.coverage, settings, budget, self.ground.data)
        return replace(plan, model=self.name, method=self.request.method)

    def build(self, plan: Plan) -> tuple[nn.Module, Plan]:
        """A copy of the model that follows the plan, and that plan: another one if the inputs could not be fitted."""
        with computing_on(self.request.device):
            return self._build(plan)

    def _build(self, plan: Plan) -> tuple[nn.Module, Plan]:
        seen = self.seen(plan)
        if self.request.plan is not None and seen.inputs is not None and plan.inputs != seen.inputs.kind:
            then, now = plan.inputs or "no", seen.inputs.kind
            plan = plan.warned(f"the plan was made on {then} inputs, and its layers are fitted to {now} inputs")
        if seen.inputs is None:
            return follow(self.model, plan, seen.moments, self._known), plan
        try:
            layers, closed = self._closed or ((), None)
            if closed is None or layers != plan.layers:
                closed = fit_closed(self.model, plan, seen.inputs, seen.influence, seen.moments, self._known)
            self._closed = None  # once built it is not needed again
            in_order = seen.inputs.means
            fitted = fit_in_order(self.model, closed, seen.inputs, seen.influence) if in_order else Fit(closed.network)
            change = plan.search.expected if fitted.change is None else fitted.change
            return fitted.network, replace(plan, search=replace(plan.search, expected=change))
        except LinAlgError as err:
            if self.request.plan is not None or not self.request.is_free:
                raise RankwiseError(f"the calibration data could not be fitted ({err}): give more of it") from None
            return self._without_inputs(plan.budget, err)

    @property
    def _known(self) -> Coverage | None:
        """The layers that plans of this job are about. A plan that was read may be about others: they are looked up."""
        return None if self.request.plan is not None else self.coverage

    def _without_inputs(self, budget: Budget, err: LinAlgError) -> tuple[nn.Module, Plan]:
        assert isinstance(self.settings, Settings), "auto decomposes"
        times = self.basis(budget).times
        plain = weights_alone(self.ground, self.settings, times, failed(err))
        plan = replace(plain.plan(budget, self.request.method, self.name), weights=self.weights)
        return follow(self.model, plan, plain.seen.moments, self._known), plan

    def recover_(self, small: nn.Module, plan: Plan) -> Plan:
        """So many steps, or seconds, of distillation from the original, as the request says (distill.py).

        Where inputs are held out, it is undone if it does not help on them, and the plan that is given back says so.
        """
        if not self.request.recovers:
            return plan
        seen = self.seen(plan)
        inputs = seen.inputs
        data = self.ground.data if inputs is None else inputs.fitted
        if data is None:
            raise RankwiseError(
                "recovery learns from the original network's outputs, and there are no inputs: pass data= (or --data)"
            )
        with self.ground.stage("recovery") as report:
            told = None if report is None else lambda done, total, loss: report("", done, total)
            effort = read_effort(self.request.recover)
            work = partial(recover_, small, self.model, data, effort, progress=told)
            if inputs is None:
                work()
                return plan
            variance = variance_in(seen.influence)
            if len(inputs.check):
                work = partial(work, check=partial(change_of, self.model, small, inputs.check, variance))
            if not keep_if_better_(small, self.model, inputs, variance, work):
                return plan.warned("recovery did not help on inputs that it had not seen, so it was undone")
        return plan

    def finish(self, small: nn.Module, plan: Plan) -> tuple[nn.Module, Plan]:
        """The network as it is shipped, and a plan that says so: with batch norms folded, in the layout of the plan."""
        seen = self.seen(plan)
        if seen.inputs is not None and self.request.plan is None:
            variance = variance_in(seen.influence)
            plan = judged(small, self.model, plan, seen.inputs, variance, self.request.recovers)
        if self.fuses(plan.budget):
            norms = find_norms(small, self.example)
            small = fuse_norms(small, norms)
            params = sum(p.numel() for p in small.parameters())
            plan = replace(plan, fused=norms, after=replace(plan.after, params=params))
        lay_out_(small, plan.layout)
        if is_pretrained(small):
            import_module("rankwise.hf").attach_(small, plan)
        return small, plan

    def run(self, budget: Budget | None) -> tuple[nn.Module, Plan]:
        """All of it: the finished network, and the plan that it follows."""
        small, plan = self.build(self.plan(budget))
        plan = self.recover_(small, plan)
        return self.finish(small, plan)
