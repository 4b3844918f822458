// The choice of network and stage, the two charts, and the table of what can be removed for a loss of δ.

const METRIC = { top1: "top-1", miou: "mean IoU" };
const CUT = { params: "CR-P", macs: "CR-F" };
const THINGS = { params: "parameters", macs: "multiply-adds" };
const FLOORS = [[2, "losses up to 2 points"], [5, "losses up to 5 points"], [20, "losses up to 20 points"], [0, "all results"]];
const below = (floor) => (floor ? lines().flatMap((line) => line.points).filter((p) => p.change[0] < -floor).length : 0);
/** Unless somebody chose: the closest view that has most results. Methods that fail would press the others together. */
function floorShown() {
  if (state.floor !== null) return state.floor;
  const all = lines().flatMap((line) => line.points).length;
  return FLOORS.find(([floor]) => below(floor) <= (floor === 2 ? 0.05 : 0.25) * all)[0];
}

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
  const repeats = Math.max(0, ...lines().flatMap((line) => line.points.map((q) => q.rows.length)));
  const images = p.n === null ? "" : ` on ${number(p.n)} images`;
  $("facts").replaceChildren(
    ...(DATA.panels.length > 1 ? [] : [el("strong", {}, p.title), " · "]),
    `original ${METRIC[p.metric]} ${spread(p.reference, (v) => percent(v, 2))}${images} · ${number(repeats)} ${repeats === 1 ? "repeat" : "repeats"}`
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
    const than = second ? `; next is ${titleOf(second[1])} with ${percent(second[0])}` : "";
    $("headline").replaceChildren(
      `${when}, `, el("strong", {}, titleOf(best)), ` removes `, el("strong", {}, percent(cut)),
      ` of the parameters for at most ${number(delta, 1)} ${delta === 1 ? "point" : "points"} of ${METRIC[panel().metric]}${than}.`
    );
    return;
  }
  $("headline").textContent = `No line stays within ${number(DATA.deltas.at(-1), 1)} points of the original here.`;
}

function drawLegend() {
  const chips = lines().map((line) => {
    const on = !state.hidden.has(line.name);
    const flip = () => {
      if (!state.hidden.delete(line.name)) state.hidden.add(line.name);
      drawCharts();
      drawLegend();
      [...$("legend").children].find((c) => c.dataset.name === line.name)?.focus();
    };
    return el("button", { type: "button", class: "chip", "aria-pressed": String(on), "data-name": line.name, onclick: flip }, swatch(line), titleOf(line));
  });
  const all = () => {
    const none = state.hidden.size === 0;
    state.hidden = new Set(none ? lines().map((line) => line.name) : []);
    drawCharts();
    drawLegend();
  };
  $("legend").replaceChildren(...chips, el("button", { type: "button", class: "chip plain", onclick: all }, state.hidden.size ? "Show all" : "Hide all"));
}

const tell = (line, point) =>
  [
    `<b>${plain(titleOf(line))}</b>`,
    `${METRIC[panel().metric]} ${spread(point.score, (v) => percent(v, 3))}`,
    `change ${spread(point.change, (v) => signed(v, 3))} points`,
    ...["params", "macs"].filter((u) => point.cut[u]).map((u) => `${CUT[u]} ${spread(point.cut[u], (v) => percent(v, 3))}`),
    `${point.asked === null ? "no budget" : `asked to keep ${point.asked} of ${plain(line.unit)}`}; ${point.rows.length} ${point.rows.length === 1 ? "run" : "runs"}`,
  ].join("<br>");

function traces(unit) {
  const found = [];
  for (const line of lines().filter((l) => !state.hidden.has(l.name))) {
    const points = line.points.filter((p) => p.cut[unit] !== null);
    const x = points.map((p) => p.cut[unit][0]);
    const [y, dev] = [0, 1].map((i) => points.map((p) => p[state.vertical][i] ?? 0));
    const tint = colour(line.label);
    if (dev.some((d) => d > 0)) {
      const edge = (sign) => y.map((v, i) => v + sign * dev[i]);
      found.push({ x: [...x, ...x.slice().reverse()], y: [...edge(1), ...edge(-1).reverse()], fill: "toself", fillcolor: tint + (lines().length > 6 ? "14" : "20"), line: { width: 0 }, mode: "lines", hoverinfo: "skip", type: "scatter" });
    }
    found.push({
      x, y, type: "scatter", mode: "lines+markers", name: plain(titleOf(line)),
      line: { color: tint, width: 2, dash: dashOf(line) },
      marker: { symbol: LOOK.get(line.label).marker, size: 8, color: tint },
      hoverinfo: "text", hovertext: points.map((p) => tell(line, p)),
      customdata: points.map((p) => [titleOf(line), p.asked, p.rows]),
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
    const symbol = label ? label.marker : Object.keys(SHAPES)[10 - (i % 11)];
    const base = state.vertical === "score" ? panel().reference[0] : 0;
    return {
      x: mine.map((e) => e[CUT[unit]]), y: mine.map((e) => base + e.delta_top1), type: "scatter", mode: "lines+markers",
      line: { color: tint, width: 1, dash: "dot" }, marker: { symbol: `${symbol}-open`, size: 11, color: tint, line: { width: 2 } },
      hoverinfo: "text",
      hovertext: mine.map((e) => `<b>${plain(method)}, published</b><br>change ${signed(e.delta_top1)} points<br>CR-P ${percent(e["CR-P"], 2)} · CR-F ${percent(e["CR-F"], 2)}<br>${plain(e.network)}, ${plain(e.data)}; ${plain(e.table)}`),
    };
  });
}

function drawCharts() {
  const base = state.vertical === "score" ? panel().reference[0] : 0;
  const floor = floorShown();
  options($("floor"), FLOORS, floor);
  for (const unit of ["params", "macs"]) {
    const drawn = traces(unit);
    const range = floor ? { range: [base - 1.04 * floor, base + 0.15 * floor] } : {};
    const title = state.vertical === "score" ? DATA.metrics[panel().metric] : `change in ${METRIC[panel().metric]} (points)`;
    const original = {
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: base, y1: base, line: { color: ink("muted"), width: 1, dash: "dot" } }],
      annotations: [{ xref: "paper", x: 0, y: base, text: "original", showarrow: false, xanchor: "left", yanchor: "bottom", font: { size: 12, color: ink("muted") } }],
    };
    const host = $(`chart-${unit}`);
    Plotly.react(host, drawn, layout({ height: innerWidth < 700 ? 320 : 400, xaxis: { title: { text: DATA.axes[unit], standoff: 8 } }, yaxis: { title: { text: title, standoff: 8 }, ...range }, ...original }), CONFIG);
    host.setAttribute("aria-label", `${DATA.metrics[panel().metric]} against ${THINGS[unit]} removed, ${lines().length} lines; all points are in the table below`);
    if (!host.dataset.listens) {
      host.dataset.listens = "yes";
      host.on("plotly_click", (event) => {
        const found = event.points[0].customdata;
        if (found) showRows(`${found[0]}, asked to keep ${found[1]}`, found[2]);
      });
    }
  }
  const repeated = lines().some((line) => line.points.some((p) => p.rows.length > 1));
  $("bands").textContent = (repeated ? "Bands are one sample standard deviation over repeats. " : "One run for each point. ") + "A click on a point opens the runs behind it." + (below(floor) ? ` Below the frame: ${number(below(floor))} points, in “all results”.` : "");
}

function drawPoints() {
  if (!$("points").open) return;
  const rows = lines().flatMap((line) => line.points.map((point) => ({ line, point })));
  const pair = (title, get, show) => ({ title, sort: (r) => get(r.point)?.[0] ?? null, show: (r) => (get(r.point) ? spread(get(r.point), show) : "–") });
  sortable($("points").querySelector(".details-body"), {
    caption: "Points of the charts", rows, page: 50,
    columns: [
      { title: "line", text: true, sort: (r) => r.line.name, show: (r) => el("span", { class: "named" }, swatch(r.line), titleOf(r.line)) },
      { title: "asked", sort: (r) => r.point.asked, show: (r) => String(r.point.asked ?? "–") },
      pair("CR-P", (p) => p.cut.params, (v) => percent(v, 2)),
      pair("CR-F", (p) => p.cut.macs, (v) => percent(v, 2)),
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
  $("delta-note").textContent = `The largest ${CUT[state.unit]} of each line whose mean ${METRIC[panel().metric]} is at most δ points below the original. In small print: its change in points, and its ${CUT[other]}. Bold: the best of a column.`;
  const rows = lines().map((line) => ({ line, cells: line.delta[state.unit].map((at) => (at === null ? null : line.points[at])) }));
  const cut = (row, d) => row.cells[d]?.cut[state.unit][0] ?? null;
  const best = DATA.deltas.map((_, d) => Math.max(...rows.map((row) => cut(row, d) ?? -Infinity)));
  const column = (delta, d) => ({
    title: `δ = ${number(delta, delta % 1 ? 1 : 0)} %`,
    sort: (row) => cut(row, d),
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
    caption: `Largest ${CUT[state.unit]} by loss`, rows, first: 2, descending: true,
    columns: [{ title: "line", text: true, sort: (r) => r.line.name, show: (r) => el("span", { class: "named" }, swatch(r.line), titleOf(r.line)) }, ...DATA.deltas.map(column)],
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
