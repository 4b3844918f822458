// The report of one compression. Whatever was not measured is not shown.

const PLAN = DATA.plan;
const METRIC = { top1: "top-1", top5: "top-5", miou: "mean IoU", loss: "loss", perplexity: "perplexity" };
const mainOf = (score) => (score ? (score.miou !== null && score.miou !== undefined ? "miou" : "top1") : null);
const megabytes = (bytes) => (bytes < 1e6 ? `${number(bytes / 1e3, 1)} kB` : `${number(bytes / 1e6, 2)} MB`);
const known = (value) => value !== null && value !== undefined;

/** Every number that there is before and after: {title, removed: its name for what was removed, before, after, show}. */
function measuredPairs() {
  const found = [{ title: "Parameters", removed: "removed (CR-P)", before: PLAN.before.params, after: PLAN.after.params, show: number }];
  if (PLAN.before.macs) found.push({ title: "Multiply-adds", removed: "removed (CR-F)", before: PLAN.before.macs, after: PLAN.after.macs, show: number });
  if (DATA.bytes) found.push({ title: "File of weights", removed: "removed", before: DATA.bytes.before, after: DATA.bytes.after, show: megabytes });
  if (DATA.time) found.push({ title: "Time, measured", removed: "removed", before: DATA.time.dense, after: DATA.time.small, show: milliseconds });
  return found;
}
function scorePairs() {
  const [before, after] = [DATA.scores?.before, DATA.scores?.after];
  if (!before || !after) return [];
  return Object.keys(METRIC).filter((key) => known(before[key]) && known(after[key])).map((key) => ({ key, title: METRIC[key], before: before[key], after: after[key], loss: key === "loss" || key === "perplexity" }));
}

function drawSummary() {
  const pairs = measuredPairs();
  const main = mainOf(DATA.scores?.before);
  const score = scorePairs().find((pair) => pair.key === main);
  const parts = pairs.map((pair) => total(pair.title, pair.removed, pair.before, pair.after, pair.show));
  if (score) {
    const images = DATA.scores.after.n ? ` on ${number(DATA.scores.after.n)} inputs of ${DATA.about.split}` : "";
    parts.push(el("div", { class: "total" }, el("dt", {}, `${score.title}, measured`), el("dd", {}, el("span", { class: "big" }, percent(score.after, 2)), ` was ${percent(score.before, 2)}`, el("div", { class: "muted" }, `${signed(score.after - score.before)} points${images}`))));
  }
  $("totals").replaceChildren(...parts);
  const said = [el("strong", {}, PLAN.method), " keeps ", el("strong", {}, percent((100 * PLAN.after.params) / PLAN.before.params)), " of the parameters"];
  if (PLAN.before.macs) said.push(` and ${percent((100 * PLAN.after.macs) / PLAN.before.macs)} of the multiply-adds`);
  if (score) said.push(`; ${score.title} changes by `, el("strong", {}, `${signed(score.after - score.before)} points`));
  if (DATA.time) said.push(`; it takes ${number(DATA.time.ratio, 2)} of the time`);
  $("headline").replaceChildren(...said, ".");
  const rows = [
    ...pairs.map((p) => ({ what: p.title, ...p, said: `${signed(-100 * (1 - p.after / p.before))} %`, change: -100 * (1 - p.after / p.before) })),
    ...scorePairs().map((p) => ({ what: p.title, ...p, show: (v) => (p.loss ? number(v, 4) : percent(v, 2)), said: p.loss ? signed(p.after - p.before, 4) : `${signed(p.after - p.before)} points`, change: p.after - p.before })),
  ];
  sortable($("before-after"), {
    caption: "Before and after", rows, file: "before-after",
    columns: [
      { title: "what", text: true, sort: (r) => r.what, show: (r) => r.what },
      { title: "before", sort: (r) => r.before, show: (r) => r.show(r.before) },
      { title: "after", sort: (r) => r.after, show: (r) => r.show(r.after) },
      { title: "change", sort: (r) => r.change, show: (r) => r.said },
    ],
  });
}

function drawWarnings() {
  const said = [...(PLAN.warnings ?? [])];
  if (DATA.time?.busy) said.push("The machine was busy while time was measured: measure it again with rankwise bench.");
  $("warnings").hidden = !said.length;
  $("warnings").replaceChildren(...said.map((sentence) => el("li", {}, sentence)));
}

const INPUTS = { calibration: "calibration inputs", synthetic: "synthetic inputs", noise: "smooth noise" };
function drawComparisons() {
  $("predicted").hidden = !DATA.comparisons.length;
  const show = (value, unit) => (!known(value) ? "–" : unit === "points" ? `${signed(value)} points` : readable(value));
  sortable($("comparisons"), {
    caption: "Predicted and measured", rows: DATA.comparisons, file: "predicted-and-measured",
    columns: [
      { title: "what", text: true, sort: (r) => r.what, show: (r) => r.what },
      { title: "predicted", sort: (r) => r.predicted ?? null, show: (r) => show(r.predicted, r.unit) },
      { title: "from … to", sort: (r) => r.low ?? null, csv: [["low", (r) => r.low ?? null], ["high", (r) => r.high ?? null]], show: (r) => (known(r.low) ? `${show(r.low, r.unit)} … ${show(r.high, r.unit)}` : "–") },
      { title: "measured", sort: (r) => r.measured ?? null, show: (r) => (known(r.measured) ? show(r.measured, r.unit) : "not measured") },
      { title: "on", text: true, sort: (r) => r.on, show: (r) => INPUTS[r.on] ?? r.on ?? "–" },
    ],
  });
}

function drawTrials() {
  const trials = DATA.trials ?? [];
  $("tried").hidden = !trials.length;
  if (!trials.length) return;
  const drawn = trials.filter((t) => known(t.keep) && known(t.drop)).sort((a, b) => a.keep - b.keep);
  $("tried-note").textContent = `${trials.length} networks were built and measured; the smallest within the limit was kept.`;
  const look = DATA.labels[0];
  const points = { x: drawn.map((t) => 100 * t.keep), y: drawn.map((t) => -t.drop), type: "scatter", mode: "lines+markers", line: { color: look[isDark() ? "dark" : "light"], width: 2 }, marker: { size: 10, symbol: drawn.map((t) => (t.within ? look.marker : `${look.marker}-open`)) }, hovertemplate: "keeps %{x:.1f} %: %{y:+.2f}<extra></extra>" };
  Plotly.react($("chart-trials"), [points], layout({ height: 300, xaxis: { title: { text: "kept (%)", standoff: 8 } }, yaxis: { title: { text: "change", standoff: 8 } } }), CONFIG);
  $("chart-trials").setAttribute("aria-label", "Change of the metric against what was kept; the numbers are in the table below");
  sortable($("trials"), {
    caption: "Sizes that were tried", rows: trials, file: "trials",
    columns: [
      { title: "asked to keep", sort: (t) => t.asked, show: (t) => number(t.asked, 3) },
      { title: "kept", sort: (t) => t.keep, show: (t) => number(t.keep, 3) },
      { title: "change", sort: (t) => (known(t.drop) ? -t.drop : null), show: (t) => (known(t.drop) ? signed(-t.drop) : "no plan is that small") },
      { title: "within the limit", text: true, sort: (t) => String(t.within), show: (t) => (t.within ? "yes" : "no") },
    ],
  });
}

function drawCommands() {
  const folder = DATA.about.folder;
  // A name alone would build random weights: so the network as it was named, or a place for its weights.
  const model = quoted(DATA.about.model ?? (PLAN.model || "MODEL"));
  const weights = DATA.about.weights ? ` --weights ${quoted(DATA.about.weights)}` : DATA.about.model ? "" : " --weights FILE";
  const data = PLAN.search?.inputs === "calibration" && DATA.about.data ? ` --data ${quoted(DATA.about.data)}` : "";
  // A folder does not name code to run, nor the shape of an input that was given.
  const base = DATA.about.base ? ` --base ${quoted(DATA.about.base)}` : "";
  const input = DATA.about.input ? ` --input ${quoted(DATA.about.input)}` : "";
  const lines = folder
    ? [
        ["Read it in Python", `small = rankwise.load(${JSON.stringify(folder)}, model)`],
        ["Export it", `rankwise export ${quoted(folder)} --to onnx${base}${input}`],
        ["Time it", `rankwise bench ${quoted(folder)}${base}${input}`],
        ["Train it further", `rankwise retrain ${quoted(folder)} --data ${DATA.about.data ? quoted(DATA.about.data) : "D"}${base} --out retrained/`],
      ]
    : [];
  lines.push(["Build this plan again", `rankwise compress ${model}${weights}${input} --plan ${folder ? quoted(`${folder}/plan.json`) : "plan.json"}${data} --out again/`]);
  $("commands").replaceChildren(el("dl", { class: "facts-list" }, ...lines.flatMap(([title, text]) => [el("dt", {}, title), el("dd", {}, el("code", {}, text))])));
}

function drawFacts() {
  const { search = {}, settings = {} } = PLAN;
  const looked = search.inputs ? INPUTS[search.inputs] : "the weights alone";
  const run = [["method", PLAN.method], ["asked to keep", PLAN.budget], ["looked at", looked], ["command", DATA.about.command], ["weights", DATA.about.weights], ["data", DATA.about.data], ["checked", DATA.about.verified]];
  const searched = ["objective", "gap", "price", "ranks", "draws"].filter((key) => known(search[key])).map((key) => [{ objective: "what the search minimised", gap: "may be off the optimum by at most (share)", price: "error that one more unit of cost is worth", ranks: "ranks chosen by", draws: "draws for each unit of sensitivity" }[key], search[key]]);
  const parts = [["Run", run.filter(([, v]) => known(v))], ["Settings", Object.entries(settings).map(([k, v]) => [wordsFor(k), v])], ["Search", searched], ["Versions and machine", Object.entries(DATA.made).filter(([, v]) => known(v))]];
  $("facts").replaceChildren(...parts.filter(([, entries]) => entries.length).flatMap(([title, entries]) => [el("h3", {}, title), facts(entries)]));
}

const layers = layersView($("layers"), $("untouched"), () => ({ spectra: DATA.spectra, macs: {} }));
$("download").addEventListener("click", () => download("plan.json", JSON.stringify(PLAN, null, 1) + "\n", "application/json"));
$("layers-csv").replaceWith(csvButton("layers", layers.table, "the layers"));
$("title").textContent = DATA.title;
$("made").textContent = madeBy(DATA.made);
drawers.push(drawWarnings, drawSummary, drawComparisons, drawTrials, drawCommands, drawFacts, () => layers.draw(PLAN));
anchors();
const asked = follow();
refresh();
asked?.scrollIntoView();
