// What became of every layer of one plan beside the original: decision, error, costs, and its spectra on demand.

/** Plans of format 1 called them groups; they are embedded as they were written. */
const slicesOf = (entry) => entry.slices ?? entry.groups;
const decided = (entry) => !("reason" in entry);

/** Outputs and inputs of a module before it was narrowed. */
function widths(entry) {
  const [first, second] = entry.shape;
  const alone = entry.filters !== null && second === 1 && JSON.stringify(entry.filters) === JSON.stringify(entry.channels);
  if (entry.shape.length === 1 || alone) return [first, first];
  return entry.kind === "Conv1D" || entry.kind.startsWith("ConvTranspose") ? [second, first] : [first, second];
}

/** The decision for an entry in a few words; filters are no ranks, so they have a sentence of their own. */
function narrowing(entry) {
  const [outputs, inputs] = widths(entry);
  const kept = [["filters", entry.filters, outputs], ["channels", entry.shape.length > 1 ? entry.channels : null, inputs]];
  return `keeps ${kept.filter(([, list]) => list).map(([what, list, of]) => `${list.length} of ${of} ${what}`).join(" and ")}`;
}

/** The measure that the search looked at, or the energy that is lost. */
function measureOf(body) {
  const asked = body.settings?.error;
  const has = (m) => body.layers.some((e) => e.error && Object.hasOwn(e.error, m));
  return has(asked) ? asked : has("energy") ? "energy" : Object.keys(body.layers.find((e) => e.error)?.error ?? {})[0] ?? "";
}
const errorText = (error) => (error === undefined ? "–" : error !== 0 && error < 0.001 ? error.toExponential(1).replace("-", "−") : number(error, 3));

/** A bar whose track is the original and whose fill is what remains, on the scale of the largest layer. */
function bar(title) {
  const fill = el("div", { class: "fill" });
  const track = el("div", { class: "track" }, fill);
  const text = el("span", { class: "bar-text" });
  const cell = el("div", { class: "bars", role: "cell", "data-title": title }, track, text);
  cell.update = (before, after, most, show = number) => {
    const known = before !== null && before !== undefined;
    cell.classList.toggle("empty", !before);
    track.style.width = before ? `${Math.max(0.6, (100 * before) / most)}%` : "0";
    fill.style.width = before ? `${Math.min(100, (100 * after) / before)}%` : "0";
    text.textContent = known ? (after === before ? show(before) : `${show(after)} of ${show(before)}`) : "–";
  };
  return cell;
}
const milliseconds = (seconds) => `${number(1000 * seconds, 1000 * seconds < 10 ? 2 : 1)} ms`;

/**
 * A view of one plan after the other in `host`. `about()` gives {spectra: {layer: {fold: …}} or null, macs: {layer: number}}:
 * what is known of the network beside the plan.
 */
function layersView(host, rest, about) {
  const view = { layer: null, rows: new Map(), names: "", body: null };

  function makeRow(entry) {
    const button = el("button", { type: "button", class: "layer-name", "aria-expanded": "false", onclick: () => choose(entry.name) }, entry.name);
    const cells = Object.fromEntries(["fold", "slices", "rank", "error"].map((key) => [key, el("div", { role: "cell", class: key, "data-title": key })]));
    const bars = Object.fromEntries(["params", "macs", "time"].map((key) => [key, bar(key)]));
    const shape = el("small", {}, entry.shape ? entry.shape.join("×") : entry.kind);
    const spectrum = el("div", { class: "spectrum", hidden: true });
    const row = el("div", { role: "row", class: "layer" }, el("div", { role: "rowheader", class: "name" }, button, shape), ...Object.values(cells), ...Object.values(bars));
    return { node: el("div", { role: "rowgroup", class: "layer-group" }, row, spectrum), row, button, cells, bars, spectrum };
  }

  const costs = (entry) => {
    if (decided(entry)) return [entry.before, entry.after];
    const cost = { params: entry.params, macs: entry.macs ?? about().macs[entry.name] ?? null };
    return [cost, cost];
  };

  function fillRow(row, entry, measure, most, times) {
    const { cells } = row;
    const [whole, narrow] = [!decided(entry), "filters" in entry];
    row.row.classList.toggle("whole", whole);
    row.row.classList.toggle("narrow", narrow);
    cells.fold.dataset.title = whole ? "whole" : narrow ? "decision" : "fold";
    if (whole || narrow) {
      cells.fold.textContent = whole ? entry.reason : narrowing(entry);
      for (const key of ["slices", "rank", "error"]) cells[key].textContent = "";
    } else {
      const by = entry.decomposition && entry.decomposition !== "svd" ? ` (${entry.decomposition})` : "";
      cells.fold.textContent = entry.fold + by;
      cells.slices.textContent = number(slicesOf(entry));
      cells.rank.textContent = entry.outer ? `${entry.outer}×${entry.rank}` : number(entry.rank);
      cells.error.textContent = errorText(entry.error[measure]);
    }
    const [before, after] = costs(entry);
    for (const unit of ["params", "macs"]) row.bars[unit].update(before[unit], after[unit], most[unit]);
    const time = times && Object.hasOwn(times, entry.name) ? times[entry.name] : [null, null];
    row.bars.time.update(...time, most.time, milliseconds);
  }

  function draw(body) {
    view.body = body;
    const shown = body.layers.filter((e) => decided(e) || e.reason !== DATA.other);
    const names = JSON.stringify(shown.map((e) => e.name));
    const measure = measureOf(body);
    const times = body.search?.latency?.layers ?? null;
    host.classList.toggle("timed", Boolean(times && Object.keys(times).length));
    if (names !== view.names) {
      view.names = names;
      view.rows = new Map(shown.map((entry) => [entry.name, makeRow(entry)]));
      const head = ["layer", "fold", "slices", "rank", "error", "parameters kept", "multiply-adds kept", "time"].map((title) => el("div", { role: "columnheader" }, title));
      const top = el("div", { role: "rowgroup" }, el("div", { role: "row", class: "layer head" }, ...head));
      host.replaceChildren(top, ...[...view.rows.values()].map((row) => row.node));
      if (!view.rows.has(view.layer)) view.layer = null;
    }
    host.querySelector(".head").children[4].textContent = measure ? `error (${measure})` : "error";
    const largest = (unit) => Math.max(1, ...shown.map((e) => costs(e)[0][unit] ?? 0));
    const most = { params: largest("params"), macs: largest("macs"), time: Math.max(1e-12, ...Object.values(times ?? {}).map(([before]) => before)) };
    for (const entry of shown) fillRow(view.rows.get(entry.name), entry, measure, most, times);
    const others = body.layers.filter((e) => e.reason === DATA.other);
    rest.hidden = !others.length;
    const many = others.length === 1 ? "1 other module is" : `${others.length} other modules are`;
    rest.querySelector("summary").textContent = `${many} left alone: ${number(others.reduce((sum, e) => sum + e.params, 0))} parameters`;
    rest.querySelector("ul").replaceChildren(...others.map((e) => el("li", {}, `${e.name} (${e.kind}, ${number(e.params)} parameters)`)));
    drawSpectrum();
  }

  function choose(name) {
    view.layer = view.layer === name ? null : name;
    drawSpectrum();
  }

  function drawSpectrum() {
    for (const [name, row] of view.rows) {
      const open = name === view.layer;
      row.button.setAttribute("aria-expanded", String(open));
      row.node.classList.toggle("open", open);
      if (!open && !row.spectrum.hidden) {
        row.spectrum.hidden = true;
        row.spectrum.querySelectorAll(".chart").forEach((chart) => Plotly.purge(chart));
        row.spectrum.replaceChildren();
      }
    }
    const row = view.rows.get(view.layer);
    if (!row) return;
    row.spectrum.hidden = false;
    const entry = view.body.layers.find((e) => e.name === view.layer);
    spectrumChart(row.spectrum, entry, about().spectra);
  }

  /** [head, rows] of a CSV file with every layer and module. */
  function table() {
    const measures = [...new Set(view.body.layers.flatMap((e) => Object.keys(e.error ?? {})))];
    const head = ["layer", "kind", "shape", "decision", "fold", "slices", "rank", "outer rank", ...measures.map((m) => `error (${m})`), "params before", "params after", "macs before", "macs after", "seconds before", "seconds after"];
    const times = view.body.search?.latency?.layers ?? {};
    const rows = view.body.layers.map((e) => {
      const [before, after] = costs(e);
      const decision = !decided(e) ? e.reason : "filters" in e ? narrowing(e) : e.decomposition ?? "svd";
      const errors = measures.map((m) => e.error?.[m] ?? null);
      return [e.name, e.kind, (e.shape ?? []).join("×"), decision, e.fold, slicesOf(e), e.rank, e.outer, ...errors, before.params, after.params, before.macs, after.macs, ...(Object.hasOwn(times, e.name) ? times[e.name] : [null, null])];
    });
    return [head, rows];
  }
  choices.push({
    write: (params) => view.layer !== null && params.set("layer", view.layer),
    read: (params) => params.has("layer") && (view.layer = params.get("layer")),
  });
  return { draw, table };
}

const TICKS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 0.5, 0.2].map((step) => Number((step * 10 ** -power).toPrecision(1))));
/** Singular values of a layer for every fold, with the rank that it got. */
function spectrumChart(host, entry, book) {
  const folds = book && Object.hasOwn(book, entry.name) ? book[entry.name] : null;
  if (!folds) return void host.replaceChildren(el("p", { class: "note" }, book ? "There is no spectrum of this layer in the results." : "These results hold no spectra for this network, or they were left out to keep this file small."));
  if (!host.querySelector(".chart")) {
    const rows = () => Object.entries(folds).flatMap(([fold, one]) => one.at.map((i, at) => [entry.name, fold, i, one.s[at]]));
    const give = csvButton("spectrum", () => [["layer", "fold", "i", "sigma_i / sigma_1"], rows()], `the spectra of ${entry.name}`);
    const part = host.closest("section")?.id ?? "explorer";
    host.replaceChildren(el("div", { class: "chart", role: "img" }), el("div", { class: "under" }, el("p", { class: "note" }), give, anchor(part, `the spectra of ${entry.name}`)));
  }
  const chart = host.querySelector(".chart");
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
  chart.setAttribute("aria-label", `Singular values of ${entry.name} by fold`);
  const k = slicesOf(entry);
  const slices = k > 1 ? ` ${k} slices of rank ${entry.rank} span at most ${k * entry.rank} directions: the dashed line.` : " The dashed line is the rank.";
  host.querySelector(".note").textContent = "Singular values of the whole weight for every fold, to four digits." + (kept ? slices : "");
}

/** One number before and after, with a bar. */
function total(title, cut, before, after, show = number) {
  const fill = el("div", { class: "fill" });
  fill.style.width = `${Math.min(100, (100 * after) / before)}%`;
  const more = after > before; // of time: slower than the original
  const said = more ? `${number(after / before, 2)} times the original` : `keep ${number(after / before, 4)} · ${cut} ${percent(100 * (1 - after / before), 2)}`;
  return el("div", { class: "total" }, el("dt", {}, title), el("dd", {},
    el("span", { class: "big" }, show(after)), more ? `, was ${show(before)}` : ` of ${show(before)}`, el("div", { class: "track" }, fill),
    el("span", { class: "muted" }, said)));
}
const quoted = (text) => (/^[\w.,/:+=-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`);
