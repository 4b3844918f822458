// One plan at a time: a slider over budgets, what became of every layer, and plan.json with the command that replays it.

const explorer = { shelf: 0, at: 0 };
const shelf = () => panel()?.shelves[explorer.shelf];

/** The plan with this number as `rankwise compress` wrote it. The same as `pack.unpack` in Python. */
function unpack(number) {
  const { heads, forms, settings, plans } = DATA.book;
  const packed = plans[number];
  const layers = packed.layers.map(([head, form, ...values]) => {
    const entry = {};
    let next = 0;
    for (const [key, inner] of forms[form]) {
      if (inner !== null) entry[key] = Object.fromEntries(inner.map((k) => [k, values[next++]]));
      else entry[key] = Object.hasOwn(heads[head], key) ? heads[head][key] : values[next++];
    }
    return entry;
  });
  const whole = { ...packed.rest, layers, settings: settings[packed.settings] };
  return Object.fromEntries(packed.keys.map((key) => [key, whole[key]]));
}
const plan = () => unpack(shelf().plans[explorer.at]);

function shelfName(one) {
  const [units, modes] = ["unit", "mode"].map((key) => new Set(panel().shelves.map((s) => s[key])).size);
  return one.label + (units > 1 ? `, ${one.unit} budget` : "") + (modes > 1 ? `, ${one.mode}` : "");
}

const layers = layersView($("layers"), $("untouched"), () => ({
  spectra: panel().spectra === null || panel().spectra === undefined ? null : DATA.spectra[panel().spectra],
  macs: panel().macs ?? {},
}));

function drawTotals(body, row) {
  const parts = [total("Parameters", "removed (CR-P)", body.before.params, body.after.params)];
  if (body.before.macs) parts.push(total("Multiply-adds", "removed (CR-F)", body.before.macs, body.after.macs));
  const latency = body.search?.latency;
  if (latency) parts.push(total(latency.measured ? "Time, predicted; measured is below" : "Time, predicted", "removed", latency.before, latency.after, milliseconds));
  if (latency?.measured) parts.at(-1).append(el("div", { class: "muted" }, `measured: ${number(latency.measured, 3)} of the original's time`));
  const metric = panel().metric;
  const scores = ["reference", "compressed", "retrained"].map((when) => value(row, when, metric));
  const said = ["original", "compressed", "retrained"].map((name, i) => [name, scores[i]]).filter(([, v]) => v !== null);
  parts.push(el("div", { class: "total" }, el("dt", {}, `${METRIC[metric]}, measured`), el("dd", {},
    el("span", { class: "big" }, percent(said.at(-1)[1], 2)), el("div", { class: "muted" }, said.map(([name, v]) => `${name} ${number(v, 2)}`).join(" → ")))));
  $("totals").replaceChildren(...parts);
}

/** How to build this plan again: with the weights that it was made for, and with data where it was fitted to them. */
function drawCommand(body, row) {
  const weights = value(row, "weights");
  const from = weights === null ? "FILE" : quoted(`${DATA.folder}/${weights}`);
  const data = body.search?.inputs === "calibration" ? ` --data ${quoted(String(value(row, "data")))}` : "";
  const images = data && value(row, "calibrate") ? ` --calibrate ${value(row, "calibrate")}` : "";
  $("command").textContent = `rankwise compress ${quoted(body.model)} --weights ${from} --plan plan.json${data}${images} --out out/`;
  $("command-note").textContent = weights === null ? "FILE holds the weights of the network that was compressed." : "";
}

function drawPlan() {
  const one = shelf();
  const row = one.rows[explorer.at];
  const body = plan();
  const keep = value(row, "asked");
  const said = keep === null ? "no budget" : `keep ${number(100 * keep, 1)} % of ${one.unit}`;
  $("budget-text").textContent = said;
  $("budget").setAttribute("aria-valuetext", said);
  $("measured").onclick = () => showRows(`${shelfName(one)}: ${nameOf(row)}`, [row]);
  drawCommand(body, row);
  drawTotals(body, row);
  layers.draw(body);
}

function drawExplorer() {
  const shelves = panel()?.shelves ?? [];
  $("explorer-body").hidden = !shelves.length;
  if (!shelves.length) return void ($("explorer-note").textContent = "These results hold no plans.");
  explorer.shelf = Math.min(explorer.shelf, shelves.length - 1);
  const one = shelf();
  options($("shelf"), shelves.map((s, i) => [i, shelfName(s)]), explorer.shelf);
  explorer.at = Math.min(explorer.at, one.plans.length - 1);
  $("budget").max = one.plans.length - 1;
  $("budget").value = explorer.at;
  const some = one.plans.length < one.of ? ` ${one.plans.length} of ${number(one.of)} budgets are in this file, evenly spaced, to keep it small.` : "";
  $("explorer-note").textContent = `Choose a method and a budget; a layer's name shows its spectra. The pale part of a bar is the original, the full part what remains.${some}`;
  drawPlan();
}

function startExplorer() {
  const first = panel().shelves[0];
  explorer.at = first ? Math.floor((first.plans.length - 1) / 3) : 0;
  $("budget").addEventListener("input", (event) => {
    explorer.at = Number(event.target.value);
    drawPlan();
  });
  $("shelf").addEventListener("change", (event) => {
    const asked = value(shelf().rows[explorer.at], "asked");
    explorer.shelf = Number(event.target.value);
    // Stay at the budget, or as near to it as this method has one.
    const gaps = shelf().rows.map((row) => Math.abs((value(row, "asked") ?? 0) - (asked ?? 0)));
    explorer.at = gaps.indexOf(Math.min(...gaps));
    drawExplorer();
  });
  $("download").addEventListener("click", () => download("plan.json", JSON.stringify(plan(), null, 1) + "\n", "application/json"));
  $("layers-csv").replaceWith(csvButton("layers", layers.table, "the layers"));
  drawers.push(drawExplorer);
}
choices.push({
  write(params) {
    params.set("method", explorer.shelf);
    params.set("budget", explorer.at);
  },
  read(params) {
    const [one, at] = ["method", "budget"].map((key) => Number(params.get(key) ?? NaN));
    const shelves = panel()?.shelves ?? [];
    if (Number.isInteger(one) && one >= 0 && one < shelves.length) explorer.shelf = one;
    if (Number.isInteger(at) && at >= 0 && at < (shelf()?.plans.length ?? 0)) explorer.at = at;
  },
});
