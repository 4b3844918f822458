// One plan at a time: a slider over budgets, the decision for every layer beside the original, spectra, and plan.json.

const explorer = { shelf: 0, at: 0, layer: null, rows: new Map(), names: "" };
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

/** Plans of format 1 called them groups; they are embedded as they were written. */
const slicesOf = (entry) => entry.slices ?? entry.groups;

function shelfName(one) {
  const [units, modes] = ["unit", "mode"].map((key) => new Set(panel().shelves.map((s) => s[key])).size);
  return one.label + (units > 1 ? `, ${one.unit} budget` : "") + (modes > 1 ? `, ${one.mode}` : "");
}

/** A bar whose track is the original and whose fill is what remains, on the scale of the largest layer. */
function bar() {
  const fill = el("div", { class: "fill" });
  const track = el("div", { class: "track" }, fill);
  const text = el("span", { class: "bar-text" });
  const cell = el("div", { class: "bars", role: "cell" }, track, text);
  cell.update = (before, after, most) => {
    cell.classList.toggle("empty", !before);
    track.style.width = before ? `${Math.max(0.6, (100 * before) / most)}%` : "0";
    fill.style.width = before ? `${(100 * after) / before}%` : "0";
    text.textContent = before ? `${number(after)} of ${number(before)}` : "–";
  };
  return cell;
}

function makeRow(entry) {
  const button = el("button", { type: "button", class: "layer-name", "aria-expanded": "false", onclick: () => choose(entry.name) }, entry.name);
  const cells = Object.fromEntries(["fold", "slices", "rank", "error"].map((key) => [key, el("div", { role: "cell", class: key, "data-title": key })]));
  const [params, macs] = [bar(), bar()];
  params.dataset.title = "params";
  macs.dataset.title = "macs";
  const shape = el("small", {}, (entry.shape ?? []).join("×"));
  const spectrum = el("div", { class: "spectrum", hidden: true });
  const row = el("div", { role: "row", class: "layer" }, el("div", { role: "rowheader", class: "name" }, button, shape), cells.fold, cells.slices, cells.rank, cells.error, params, macs);
  return { node: el("div", { role: "rowgroup", class: "layer-group" }, row, spectrum), row, button, cells, params, macs, spectrum };
}

/** The measure that the search looked at, or the energy that is lost. */
function measureOf(body) {
  const asked = body.settings?.error;
  const has = (m) => body.layers.some((e) => e.error && Object.hasOwn(e.error, m));
  return has(asked) ? asked : has("energy") ? "energy" : Object.keys(body.layers.find((e) => e.error)?.error ?? {})[0] ?? "";
}

function fillRow(row, entry, measure, most) {
  const { cells } = row;
  const whole = "reason" in entry;
  row.row.classList.toggle("whole", whole);
  if (whole) {
    cells.fold.textContent = entry.reason;
    for (const key of ["slices", "rank", "error"]) cells[key].textContent = "";
    row.params.update(entry.params, entry.params, most.params);
    row.macs.update(null, null, 1);
    return;
  }
  if ("filters" in entry) {
    cells.fold.textContent = "narrower";
    cells.slices.textContent = "";
    cells.rank.textContent = [["filters", entry.filters], ["channels", entry.channels]].filter(([, kept]) => kept).map(([what, kept]) => `${kept.length} ${what}`).join(", ");
    cells.error.textContent = "";
  } else {
    const by = entry.decomposition && entry.decomposition !== "svd" ? ` (${entry.decomposition})` : "";
    cells.fold.textContent = entry.fold + by;
    cells.slices.textContent = number(slicesOf(entry));
    cells.rank.textContent = entry.outer ? `${entry.outer}×${entry.rank}` : number(entry.rank);
    const error = entry.error[measure];
    cells.error.textContent = error === undefined ? "–" : error !== 0 && error < 0.001 ? error.toExponential(1) : number(error, 3);
  }
  row.params.update(entry.before.params, entry.after.params, most.params);
  row.macs.update(entry.before.macs, entry.after.macs, most.macs);
}

function drawLayers(body) {
  const shown = body.layers.filter((e) => !("reason" in e) || e.reason !== DATA.other);
  const names = JSON.stringify(shown.map((e) => e.name));
  const measure = measureOf(body);
  if (names !== explorer.names) {
    explorer.names = names;
    explorer.rows = new Map(shown.map((entry) => [entry.name, makeRow(entry)]));
    const head = ["layer", "fold", "slices", "rank", "error", "params kept", "macs kept"].map((title) => el("div", { role: "columnheader" }, title));
    const top = el("div", { role: "rowgroup" }, el("div", { role: "row", class: "layer head" }, ...head));
    $("layers").replaceChildren(top, ...[...explorer.rows.values()].map((row) => row.node));
    if (!explorer.rows.has(explorer.layer)) explorer.layer = null;
  }
  $("layers").querySelector(".head").children[4].textContent = measure ? `error (${measure})` : "error";
  const most = {
    params: Math.max(1, ...shown.map((e) => e.before?.params ?? e.params ?? 0)),
    macs: Math.max(1, ...shown.map((e) => e.before?.macs ?? 0)),
  };
  for (const entry of shown) fillRow(explorer.rows.get(entry.name), entry, measure, most);
  const rest = body.layers.filter((e) => e.reason === DATA.other);
  $("untouched").hidden = !rest.length;
  $("untouched").querySelector("summary").textContent = `${rest.length} other modules are left alone: ${number(rest.reduce((sum, e) => sum + e.params, 0))} params`;
  $("untouched").querySelector("ul").replaceChildren(...rest.map((e) => el("li", {}, `${e.name} (${e.kind}, ${number(e.params)} params)`)));
}

function total(title, cut, before, after) {
  const fill = el("div", { class: "fill" });
  fill.style.width = `${(100 * after) / before}%`;
  return el("div", { class: "total" }, el("dt", {}, title), el("dd", {},
    el("span", { class: "big" }, number(after)), ` of ${number(before)}`, el("div", { class: "track" }, fill),
    el("span", { class: "muted" }, `keep ${number(after / before, 4)} · ${cut} ${percent(100 * (1 - after / before), 2)}`)));
}

function drawTotals(body, row) {
  const parts = [total("Parameters, predicted", "CR-P", body.before.params, body.after.params)];
  if (body.before.macs) parts.push(total("Multiply-adds, predicted", "CR-F", body.before.macs, body.after.macs));
  const metric = panel().metric;
  const scores = ["reference", "compressed", "retrained"].map((when) => value(row, when, metric));
  const said = ["original", "compressed", "retrained"].map((name, i) => [name, scores[i]]).filter(([, v]) => v !== null);
  parts.push(el("div", { class: "total" }, el("dt", {}, `${METRIC[metric]}, measured`), el("dd", {},
    el("span", { class: "big" }, percent(said.at(-1)[1], 2)), el("div", { class: "muted" }, said.map(([name, v]) => `${name} ${number(v, 2)}`).join(" → ")))));
  $("totals").replaceChildren(...parts);
}

function choose(name) {
  explorer.layer = explorer.layer === name ? null : name;
  drawSpectrum(plan());
}

const TICKS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 0.5, 0.2].map((step) => Number((step * 10 ** -power).toPrecision(1))));
function drawSpectrum(body) {
  for (const [name, row] of explorer.rows) {
    const open = name === explorer.layer;
    row.button.setAttribute("aria-expanded", String(open));
    row.node.classList.toggle("open", open);
    if (!open && !row.spectrum.hidden) {
      row.spectrum.hidden = true;
      row.spectrum.querySelectorAll(".chart").forEach((chart) => Plotly.purge(chart));
      row.spectrum.replaceChildren();
    }
  }
  const row = explorer.rows.get(explorer.layer);
  if (!row) return;
  row.spectrum.hidden = false;
  const book = panel().spectra === null || panel().spectra === undefined ? null : DATA.spectra[panel().spectra];
  const folds = book && Object.hasOwn(book, explorer.layer) ? book[explorer.layer] : null;
  if (!folds) return void row.spectrum.replaceChildren(el("p", { class: "note" }, book ? "There is no spectrum of this layer in the results." : "These results hold no spectra for this network, or they were left out to keep this file small."));
  const entry = body.layers.find((e) => e.name === explorer.layer);
  if (!row.spectrum.querySelector(".chart")) row.spectrum.replaceChildren(el("div", { class: "chart", role: "img" }), el("p", { class: "note" }));
  const chart = row.spectrum.querySelector(".chart");
  const drawn = Object.entries(folds).map(([fold, one], i) => {
    const look = DATA.looks[i % DATA.looks.length];
    const mine = fold === entry.fold;
    return {
      x: one.at, y: one.s.map((s) => Math.max(s, 1e-9)), type: "scatter", mode: one.at.length > 40 ? "lines" : "lines+markers", name: plain(fold),
      line: { color: look[isDark() ? "dark" : "light"], width: mine ? 3 : 1.5, dash: mine ? "solid" : "dot" },
      marker: { symbol: look.marker, size: 6 }, hovertemplate: "σ<sub>%{x}</sub>/σ₁ = %{y:.4g}<extra>%{fullData.name}</extra>",
    };
  });
  const kept = entry.fold && !entry.outer ? Math.min(slicesOf(entry) * entry.rank, folds[entry.fold]?.n ?? Infinity) : null;
  const line = kept && { type: "line", x0: kept, x1: kept, yref: "paper", y0: 0, y1: 1, line: { color: ink("ink"), width: 1, dash: "dash" } };
  Plotly.react(chart, drawn, layout({
    height: 280, showlegend: true, margin: { t: innerWidth < 700 ? 64 : 36, r: 12, b: 52, l: 64 }, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, shapes: line ? [line] : [],
    xaxis: { title: { text: "number i of the singular value", standoff: 8 }, rangemode: "tozero" }, yaxis: { title: { text: "σᵢ / σ₁", standoff: 8 }, type: "log", tickmode: "array", tickvals: TICKS, ticktext: TICKS.map(String) },
  }), CONFIG);
  chart.setAttribute("aria-label", `Singular values of ${explorer.layer} by fold`);
  const k = slicesOf(entry);
  const slices = k > 1 ? ` ${k} slices of rank ${entry.rank} span at most ${k * entry.rank} directions: the dashed line.` : " The dashed line is the rank.";
  row.spectrum.querySelector(".note").textContent = "Singular values of the whole weight for every fold, to four digits." + (kept ? slices : "");
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
  const quote = (text) => (/^[\w./:+-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`);
  $("command").textContent = `rankwise compress ${quote(body.model)} --plan plan.json --out out/`;
  drawTotals(body, row);
  drawLayers(body);
  drawSpectrum(body);
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

function download() {
  const text = JSON.stringify(plan(), null, 1) + "\n";
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "plan.json" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
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
    // Stay at the budget, or as near to it as this line has one.
    const gaps = shelf().rows.map((row) => Math.abs((value(row, "asked") ?? 0) - (asked ?? 0)));
    explorer.at = gaps.indexOf(Math.min(...gaps));
    drawExplorer();
  });
  $("download").addEventListener("click", download);
  drawers.push(drawExplorer);
}
