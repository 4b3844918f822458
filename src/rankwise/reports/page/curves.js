// The choice of network and stage, the charts, and the table of what can be removed for a loss of δ.

const METRIC = { top1: "top-1", miou: "mean IoU" };
const CUT = { params: "CR-P", macs: "CR-F" };
const REMOVED = { params: "CR-P", macs: "CR-F", latency: "time removed" };
const THINGS = { params: "parameters", macs: "multiply-adds", latency: "time" };
const FLOORS = [[2, "losses up to 2 points"], [5, "losses up to 5 points"], [20, "losses up to 20 points"], [0, "all results"]];
const below = (floor) => (floor ? lines().flatMap((line) => line.points).filter((p) => p.change[0] < -floor).length : 0);
/** Unless somebody chose: down to 5 points, or everything where no result is that good. */
function floorShown() {
  if (state.floor !== null) return state.floor;
  return lines().some((line) => line.points.some((p) => p.change[0] >= -5)) ? 5 : 0;
}
/** What was measured somewhere in this stage; time only where it was. */
const drawnUnits = () => Object.keys(THINGS).filter((unit) => unit !== "latency" || lines().some((line) => line.points.some((p) => p.cut.latency)));

const unitsOf = () => [...new Set(panel().stages.flatMap((s) => s.lines.map((line) => line.unit)))];
function chooseUnit() {
  const units = unitsOf();
  if (units.length < 2) state.asked = "";
  else if (!units.includes(state.asked)) state.asked = units.includes("params") ? "params" : units[0];
}

function drawChoice() {
  options($("panel"), DATA.panels.map((p, i) => [i, p.title]), state.panel);
  $("panel").parentElement.hidden = DATA.panels.length < 2;
  segments($("stage"), panel().stages.map((s, i) => [i, s.title]), state.stage, (i) => {
    state.stage = i;
    refresh();
  });
  const units = unitsOf();
  $("asked-field").hidden = units.length < 2;
  segments($("asked"), [...units.map((unit) => [unit, unit]), ["", "any"]], state.asked, (unit) => {
    state.asked = unit;
    refresh();
  });
  const p = panel();
  const seeds = new Set(lines().flatMap((line) => line.points.flatMap((q) => q.rows.map((row) => value(row, "seed") ?? value(row, "repeat"))))).size;
  const images = p.n === null ? "" : ` on ${number(p.n)} images`;
  $("facts").replaceChildren(
    ...(DATA.panels.length > 1 ? [] : [el("strong", {}, p.title), " · "]),
    `original ${METRIC[p.metric]} ${spread(p.reference, (v) => percent(v, 2))}${images} · 1 network, ${number(seeds)} ${seeds === 1 ? "seed" : "seeds"}`
  );
}

/** The widest gap that the table shows, in one sentence. */
function drawHeadline() {
  for (const [d, delta] of DATA.deltas.entries()) {
    const ranked = lines()
      .filter((line) => line.delta.params[d] !== null)
      .map((line) => [line.points[line.delta.params[d]].cut.params[0], line])
      .filter(([cut]) => cut > 0)
      .sort((a, b) => b[0] - a[0]);
    if (!ranked.length || (delta < 0.5 && DATA.deltas.length > 1)) continue;
    const [[cut, best], second] = ranked;
    const when = stage().when === "retrained" ? "After retraining" : "Without retraining";
    const equal = second && percent(second[0]) === percent(cut);
    const than = !second ? "" : equal ? `; so does ${titleOf(second[1])}` : `; next is ${titleOf(second[1])} with ${percent(second[0])}`;
    $("headline").replaceChildren(
      `${when}, `, el("strong", {}, titleOf(best)), ` removes `, el("strong", {}, percent(cut)),
      ` of the parameters for at most ${number(delta, 1)} ${delta === 1 ? "point" : "points"} of ${METRIC[panel().metric]}${than}.`
    );
    return;
  }
  $("headline").textContent = `No method stays within ${number(DATA.deltas.at(-1), 1)} points of the original here.`;
}

// A method can be hidden (click), lit (hover or focus), or shown alone (double click).
function drawLegend() {
  const chips = lines().map((line) => {
    const flip = (event) => {
      if (event.shiftKey) return alone(line.name);
      if (!state.hidden.delete(line.name)) state.hidden.add(line.name);
      drawCharts();
      markLegend();
    };
    const lit = () => light(line.name);
    const props = { onclick: flip, ondblclick: () => alone(line.name), onmouseenter: lit, onmouseleave: () => light(null), onfocus: lit, onblur: () => light(null) };
    return el("button", { type: "button", class: "chip", "data-name": line.name, title: "Click: hide or show. Double click, or shift and click: this method alone.", ...props }, swatch(line.label), titleOf(line));
  });
  const all = () => {
    const none = state.hidden.size === 0;
    state.hidden = new Set(none ? lines().map((line) => line.name) : []);
    drawCharts();
    markLegend();
  };
  $("legend").replaceChildren(...chips, el("button", { type: "button", class: "chip plain", onclick: all }));
  markLegend();
}
function markLegend() {
  for (const chip of $("legend").querySelectorAll("[data-name]")) chip.setAttribute("aria-pressed", String(!state.hidden.has(chip.dataset.name)));
  $("legend").querySelector(".plain").textContent = state.hidden.size ? "Show all" : "Hide all";
}
/** Only this method; all of them if it is alone already. */
function alone(name) {
  const others = lines().map((line) => line.name).filter((other) => other !== name);
  const isAlone = !state.hidden.has(name) && others.every((other) => state.hidden.has(other));
  state.hidden = new Set(isAlone ? [] : others);
  drawCharts();
  markLegend();
}
let lighted = null;
/** One method in full colour and the others pale, in all charts and in the legend. */
function light(name) {
  if (name === lighted || (name !== null && state.hidden.has(name))) return;
  lighted = name;
  for (const unit of drawnUnits()) {
    const host = $(`chart-${unit}`);
    if (host.data?.length) Plotly.restyle(host, { opacity: host.data.map((trace) => (name === null || trace.meta === name ? 1 : 0.1)) });
  }
  for (const chip of $("legend").querySelectorAll("[data-name]")) chip.classList.toggle("pale", name !== null && chip.dataset.name !== name);
}

const tell = (line, point) =>
  [
    `<b>${plain(titleOf(line))}</b>`,
    `${METRIC[panel().metric]} ${spread(point.score, (v) => percent(v, 3))}`,
    `change ${spread(point.change, (v) => signed(v, 3))} points`,
    ...Object.keys(THINGS).filter((u) => point.cut[u]).map((u) => `${REMOVED[u]} ${spread(point.cut[u], (v) => percent(v, 3))}`),
    `${point.asked === null ? "no budget" : `asked to keep ${point.asked} of ${plain(line.unit)}`}; ${point.rows.length} ${point.rows.length === 1 ? "run" : "runs"}`,
  ].join("<br>");

function traces(unit) {
  const found = [];
  for (const line of lines().filter((l) => !state.hidden.has(l.name))) {
    const points = line.points.filter((p) => p.cut[unit] !== null);
    const x = points.map((p) => p.cut[unit][0]);
    const y = points.map((p) => p[state.vertical][0]);
    const tint = colour(line.label);
    const [low, high] = [0, 1].map((i) => points.map((p) => p.band[state.vertical][i]));
    if (high.some((top, i) => top > low[i])) {
      found.push({ meta: line.name, x: [...x, ...x.slice().reverse()], y: [...high, ...low.slice().reverse()], fill: "toself", fillcolor: tint + (lines().length > 6 ? "14" : "20"), line: { width: 0 }, mode: "lines", hoverinfo: "skip", type: "scatter" });
    }
    found.push({
      meta: line.name, x, y, type: "scatter", mode: "lines+markers", name: plain(titleOf(line)),
      line: { color: tint, width: 2, dash: dashOf(line) },
      marker: { symbol: LOOK.get(line.label).marker, size: 9, color: tint, line: { color: ink("surface"), width: 0.5 } },
      hoverinfo: "text", hovertext: points.map((p) => tell(line, p)),
      customdata: points.map((p) => [titleOf(line), p.asked, p.rows, line.name]),
    });
  }
  return [...found, ...published(unit)];
}

/** Whether a published entry was retrained as the stage was; one that does not say belongs to every stage. */
function ofStage(entry) {
  const { when, share } = stage();
  if (entry.share === undefined || entry.share === null) return true;
  if (when === "compressed" || entry.share === 0) return (when === "compressed") === (entry.share === 0);
  return share === null || Math.abs(share - entry.share) < 0.01;
}
/** Points that the paper reports for the chosen network, hollow. A method that is here too has its colour. */
function published(unit) {
  const bare = (text) => text.toLowerCase().replace(/[^a-z0-9+]/g, "");
  const entries = DATA.paper.filter((e) => `${e.network}, ${e.data}` === state.published && ofStage(e) && e[CUT[unit]] !== null && e.delta_top1 !== null);
  return [...new Set(entries.map((e) => e.method))].map((method, i) => {
    const mine = entries.filter((e) => e.method === method).sort((a, b) => a[CUT[unit]] - b[CUT[unit]]);
    const label = DATA.labels.find((entry) => bare(entry.label) === bare(method));
    const tint = label ? colour(label.label) : ink("muted");
    const symbols = Object.keys(DATA.shapes);
    const symbol = label ? label.marker : symbols[symbols.length - 1 - (i % symbols.length)];
    const base = state.vertical === "score" ? panel().reference[0] : 0;
    return {
      meta: label ? label.label : null, x: mine.map((e) => e[CUT[unit]]), y: mine.map((e) => base + e.delta_top1), type: "scatter", mode: "lines+markers",
      line: { color: tint, width: 1, dash: "dot" }, marker: { symbol: `${symbol}-open`, size: 11, color: tint, line: { width: 2 } },
      hoverinfo: "text",
      hovertext: mine.map((e) => `<b>${plain(method)}, published</b><br>change ${signed(e.delta_top1)} points<br>CR-P ${percent(e["CR-P"], 2)} · CR-F ${percent(e["CR-F"], 2)}<br>${plain(e.network)}, ${plain(e.data)}; ${plain(e.table)}`),
    };
  });
}

/** From nothing removed to a little beyond the last point in the frame: the rest of the axis would be empty. */
function across(unit, floor) {
  if (!floor) return {};
  const seen = lines().flatMap((line) => line.points).filter((p) => p.cut[unit] && p.change[0] >= -floor).map((p) => p.cut[unit][0]);
  return seen.length ? { range: [Math.min(0, ...seen) - 2, Math.min(102, Math.max(...seen) + 12)] } : {};
}

function drawCharts() {
  const base = state.vertical === "score" ? panel().reference[0] : 0;
  const floor = floorShown();
  lighted = null;
  options($("floor"), FLOORS, floor);
  $("figure-latency").hidden = !drawnUnits().includes("latency");
  $("figure-latency").parentElement.classList.toggle("three", drawnUnits().length > 2);
  for (const unit of drawnUnits()) {
    const range = floor ? { range: [base - 1.04 * floor, base + 0.15 * floor] } : {};
    const title = state.vertical === "score" ? DATA.metrics[panel().metric] : `change in ${METRIC[panel().metric]} (points)`;
    const shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: base, y1: base, line: { color: ink("muted"), width: 1, dash: "dot" } }];
    const host = $(`chart-${unit}`);
    Plotly.react(host, traces(unit), layout({ height: innerWidth < 700 ? 320 : 400, xaxis: { title: { text: DATA.axes[unit], standoff: 8 }, ...across(unit, floor) }, yaxis: { title: { text: title, standoff: 8 }, ...range }, shapes }), CURVES);
    host.setAttribute("aria-label", `${title} against ${THINGS[unit]} removed, ${lines().length} methods; all points are in the table below`);
    listen(host);
  }
  const repeated = lines().some((line) => line.points.some((p) => p.rows.length > 1));
  const sentences = [
    "The dotted line is the original network.",
    repeated ? "Bands are one sample standard deviation over seeds, cut off at 0 and 100 %." : "One run for each point.",
    TOUCH ? "A tap on a method hides it, a double tap shows it alone; a tap on a point opens the runs behind it." : "Hover over a method to light it; double click shows it alone. A click on a point opens the runs behind it.",
    drawnUnits().includes("latency") && lines().some((line) => line.points.some((p) => p.cut.latency?.[0] < 0)) ? "Left of 0 in the chart of time, a network is slower than the original." : "",
    below(floor) ? `Below the frame: ${number(below(floor))} points, in “all results”.` : "",
  ];
  $("bands").textContent = sentences.filter(Boolean).join(" ");
}

/** A click on a point opens its runs, a double click shows its method alone: so a click waits for a second one.
 * A double click beside the points undoes a zoom. Plotly would do that on a point too, and move it away from under the pointer. */
const PATIENCE = 280;
const CURVES = { ...CONFIG, doubleClick: false };
function listen(host) {
  if (host.dataset.listens) return;
  host.dataset.listens = "yes";
  let waits = null;
  host.on("plotly_hover", (event) => light(event.points[0].data.meta ?? null));
  host.on("plotly_unhover", () => light(null));
  host.on("plotly_doubleclick", () => waits === null && drawCharts());
  host.on("plotly_click", (event) => {
    const found = event.points[0].customdata;
    if (!found) return;
    if (waits !== null || event.event.detail > 1) {
      clearTimeout(waits);
      waits = null;
      return alone(found[3]);
    }
    waits = setTimeout(() => {
      waits = null;
      showRows(`${found[0]}, asked to keep ${found[1]}`, found[2]);
    }, PATIENCE);
  });
}

/** [head, rows] of a CSV file with the points of all methods in a chart. */
function chartTable(unit) {
  const head = ["method", "budget in", "asked to keep", "removed (%)", "removed, deviation", `${METRIC[panel().metric]} (%)`, "deviation", "change (points)", "change, deviation", "runs"];
  const rows = lines().flatMap((line) => line.points.filter((p) => p.cut[unit]).map((p) => [line.name, line.unit, p.asked, ...p.cut[unit], ...p.score, ...p.change, p.rows.length]));
  return [head, rows];
}

function drawPoints() {
  if (!$("points").open) return;
  const rows = lines().flatMap((line) => line.points.map((point) => ({ line, point })));
  const both = (title, get) => [[title, (r) => get(r.point)?.[0] ?? null], [`${title}, deviation`, (r) => get(r.point)?.[1] ?? null]];
  const pair = (title, get, show) => ({ title, csv: both(title, get), sort: (r) => get(r.point)?.[0] ?? null, show: (r) => (get(r.point) ? spread(get(r.point), show) : "–") });
  sortable($("points").querySelector(".details-body"), {
    caption: "Points of the charts", rows, page: 50, file: "points",
    columns: [
      { title: "method", text: true, sort: (r) => r.line.name, show: (r) => named(r.line) },
      { title: "asked", sort: (r) => r.point.asked, show: (r) => String(r.point.asked ?? "–") },
      pair("CR-P", (p) => p.cut.params, (v) => percent(v, 2)),
      pair("CR-F", (p) => p.cut.macs, (v) => percent(v, 2)),
      ...(drawnUnits().includes("latency") ? [pair("time removed", (p) => p.cut.latency, (v) => percent(v, 1))] : []),
      pair(METRIC[panel().metric], (p) => p.score, (v) => percent(v, 2)),
      pair("change", (p) => p.change, (v) => signed(v, 2)),
      { title: "runs", sort: (r) => r.point.rows.length, show: (r) => el("button", { type: "button", class: "link", onclick: () => showRows(`${titleOf(r.line)}, asked to keep ${r.point.asked}`, r.point.rows) }, `${r.point.rows.length} ${r.point.rows.length === 1 ? "run" : "runs"}`) },
    ],
  });
}

function drawDelta() {
  const other = state.unit === "params" ? "macs" : "params";
  segments($("delta-unit"), Object.entries(CUT).map(([u, name]) => [u, `${name}, ${u}`]), state.unit, (u) => {
    state.unit = u;
    drawDelta();
  });
  $("delta-note").textContent = `The largest ${CUT[state.unit]} of each method whose mean ${METRIC[panel().metric]} is at most δ points below the original. In small print: its change in points, and its ${CUT[other]}. Bold: the best of a column.`;
  const rows = lines().map((line) => ({ line, cells: line.delta[state.unit].map((at) => (at === null ? null : line.points[at])) }));
  const cut = (row, d) => row.cells[d]?.cut[state.unit][0] ?? null;
  const best = DATA.deltas.map((_, d) => Math.max(...rows.map((row) => cut(row, d) ?? -Infinity)));
  const column = (delta, d) => ({
    title: `δ = ${number(delta, delta % 1 ? 1 : 0)} %`,
    sort: (row) => cut(row, d),
    csv: [
      [`${CUT[state.unit]} (%), δ = ${delta}`, (row) => cut(row, d)],
      [`change (points), δ = ${delta}`, (row) => row.cells[d]?.change[0] ?? null],
      [`${CUT[other]} (%), δ = ${delta}`, (row) => row.cells[d]?.cut[other]?.[0] ?? null],
    ],
    show: (row) => {
      const point = row.cells[d];
      if (point === null) return el("span", { class: "muted none", title: "No result within this loss" }, "–");
      const open = () => showRows(`${titleOf(row.line)}, δ = ${delta} %: asked to keep ${point.asked}`, point.rows);
      const small = `${signed(point.change[0])}` + (point.cut[other] ? ` · ${percent(point.cut[other][0])}` : "");
      const cell = el("button", { type: "button", class: "cell", onclick: open, title: "Where this number comes from" }, el("span", { class: cut(row, d) === best[d] ? "best" : null }, percent(cut(row, d))), el("small", {}, small));
      cell.style.setProperty("--fill", `${Math.max(0, cut(row, d))}%`);
      return cell;
    },
  });
  sortable($("delta"), {
    caption: `Largest ${CUT[state.unit]} by loss`, rows, file: `largest-${CUT[state.unit]}`, first: 2, descending: true,
    columns: [{ title: "method", text: true, sort: (r) => r.line.name, show: (r) => named(r.line) }, ...DATA.deltas.map(column)],
  });
}

function startCurves() {
  $("title").textContent = DATA.title;
  state.stage = panel().stages.length - 1;
  state.published = choosePublished();
  chooseUnit();
  $("panel").addEventListener("change", (event) => {
    state.panel = Number(event.target.value);
    state.stage = Math.min(state.stage, panel().stages.length - 1);
    state.published = choosePublished();
    chooseUnit();
    refresh();
  });
  $("floor").addEventListener("change", (event) => {
    state.floor = Number(event.target.value);
    drawCharts();
  });
  $("published").addEventListener("change", (event) => {
    state.published = event.target.value;
    drawCharts();
  });
  $("points").addEventListener("toggle", drawPoints);
  for (const unit of Object.keys(THINGS)) {
    const what = `the chart of ${THINGS[unit]}`;
    $(`figure-${unit}`).querySelector("figcaption").append(el("span", { class: "minis" }, csvButton(`points-by-${unit}`, () => chartTable(unit), what), anchor(`figure-${unit}`, what)));
  }
  drawers.push(drawChoice, drawHeadline, drawVertical, drawPublished, drawLegend, drawCharts, drawPoints, drawDelta);
}
const PUBLISHED = [...new Set(DATA.paper.map((e) => `${e.network}, ${e.data}`))];
/** The published network with the name of the panel's model (ResNet20 is resnet20), on the same data if there is any. */
function choosePublished() {
  const bare = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
  const model = bare(panel().model.split(/[:/]/).at(-1));
  const entries = DATA.paper.filter((e) => bare(e.network) === model);
  const found = entries.find((e) => bare(panel().data).includes(bare(e.data))) ?? entries[0];
  return found ? `${found.network}, ${found.data}` : "";
}
function drawPublished() {
  $("published-field").hidden = !PUBLISHED.length;
  options($("published"), [["", "none"], ...PUBLISHED.map((name) => [name, name])], state.published);
}
function drawVertical() {
  segments($("vertical"), [["score", "Accuracy"], ["change", "Change"]], state.vertical, (key) => {
    state.vertical = key;
    drawVertical();
    drawCharts();
  });
}
