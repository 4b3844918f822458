// The rows of a study, what is chosen on the page, and how methods look.

// Rows are columns: a constant, positions into a list of values, or the values themselves.
const COLUMNS = new Map(DATA.rows.columns.map((column) => [column.k.join("\u0000"), column]));
function value(row, ...path) {
  const column = COLUMNS.get(path.join("\u0000"));
  if (column === undefined) return null;
  if ("c" in column) return column.c;
  return "i" in column ? column.v[column.i[row]] : column.d[row];
}

// What is chosen.
const state = { panel: 0, stage: 0, hidden: new Set(), vertical: "change", floor: null, published: "", unit: "params", asked: "" };
choices.push({
  write(params) {
    for (const key of ["panel", "stage", "vertical", "unit", "asked", "published"]) params.set(key, state[key]);
    if (state.floor !== null) params.set("floor", state.floor);
    if (state.hidden.size) params.set("hidden", JSON.stringify([...state.hidden]));
  },
  read(params) {
    const whole = (key, count) => {
      const value = Number(params.get(key) ?? NaN);
      return Number.isInteger(value) && value >= 0 && value < count ? value : null;
    };
    if (!DATA.panels.length) return;
    state.panel = whole("panel", DATA.panels.length) ?? state.panel;
    state.stage = whole("stage", panel().stages.length) ?? Math.min(state.stage, panel().stages.length - 1);
    state.floor = FLOORS.some(([floor]) => String(floor) === params.get("floor")) ? Number(params.get("floor")) : state.floor;
    if (["score", "change"].includes(params.get("vertical"))) state.vertical = params.get("vertical");
    if (Object.hasOwn(CUT, params.get("unit") ?? "")) state.unit = params.get("unit");
    if ([...unitsOf(), ""].includes(params.get("asked"))) state.asked = params.get("asked");
    if (PUBLISHED.includes(params.get("published")) || params.get("published") === "") state.published = params.get("published");
    try {
      const names = JSON.parse(params.get("hidden") ?? "[]");
      state.hidden = new Set(Array.isArray(names) ? names.map(String) : []);
    } catch {
      state.hidden = new Set(); // somebody wrote the address by hand
    }
  },
});
const panel = () => DATA.panels[state.panel];
const stage = () => panel()?.stages[state.stage];
/** The methods that are looked at: those with a budget in the chosen unit, or all. */
const lines = () => stage().lines.filter((line) => !state.asked || line.unit === state.asked);
const titleOf = (line) => (state.asked ? line.name.replace(`, ${line.unit} budget`, "") : line.name);
const LOOK = new Map(DATA.labels.map((entry) => [entry.label, entry]));
const colour = (label) => LOOK.get(label)[isDark() ? "dark" : "light"];
const dashOf = (line) => (line.mode === "iterate" ? "longdashdot" : DATA.dashes[line.unit] ?? "solid");


function swatch(label) {
  const SVG = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, v] of Object.entries({ viewBox: "0 0 16 16", class: "swatch", "aria-hidden": "true" })) svg.setAttribute(key, v);
  const shape = document.createElementNS(SVG, "polygon");
  shape.setAttribute("points", LOOK.get(label).corners.map(([x, y]) => `${(8 + 5.6 * x).toFixed(2)},${(8 - 5.6 * y).toFixed(2)}`).join(" "));
  shape.setAttribute("fill", colour(label));
  svg.append(shape);
  return svg;
}
const named = (line) => el("span", { class: "named" }, swatch(line.label), titleOf(line));

// Provenance: everything that the rows behind a number say about themselves.
const GROUPS = [
  ["Scores", ["reference", "compressed", "retrained"]],
  ["Size and time", ["keep", "CR-P", "CR-F", "params", "macs", "time"]],
  ["Where it comes from", ["seed", "provenance"]],
  ["Seconds that it took", ["seconds"]],
  ["Run", null], // whatever is in no other group
  ["Settings", ["settings"]],
];
const UNSAID = ["format", "kind", "cell"];
const NESTED = { reference: "original", compressed: "compressed", retrained: "retrained", keep: "kept", time: "time" };
function rowDetails(row) {
  const grouped = new Set([...UNSAID, ...GROUPS.flatMap(([, keys]) => keys ?? [])]);
  const known = DATA.rows.columns.map((c) => [c.k, value(row, ...c.k)]).filter(([, v]) => v !== null);
  const parts = [];
  if (value(row, "error") !== null) parts.push(el("p", { class: "failed" }, String(value(row, "error"))));
  for (const [title, keys] of GROUPS) {
    const belongs = (key) => (keys ? keys.includes(key) : !grouped.has(key));
    const name = ([first, ...rest]) => (Object.hasOwn(NESTED, first) ? `${NESTED[first]}: ${rest.map(wordsFor).join(" ")}` : wordsFor(rest.at(-1) ?? first));
    let mine = known.filter(([k]) => belongs(k[0])).map(([k, v]) => [name(k), v]);
    if (title === "Settings" && mine.length) mine = Object.entries(mine[0][1] ?? {}).map(([k, v]) => [wordsFor(k), v]);
    if (mine.length) parts.push(el("h3", {}, title), facts(mine));
  }
  return parts;
}
const nameOf = (row) => String(value(row, "cell") ?? `row ${row + 1}`);
function showRows(title, rows) {
  const note = rows.length > 1 ? `Mean and sample standard deviation over ${rows.length} runs:` : "One run.";
  const found = rows.length === 1 ? rowDetails(rows[0]) : rows.map((row) => el("details", {}, el("summary", {}, nameOf(row)), ...rowDetails(row)));
  openDialog(title, el("p", { class: "note" }, note), ...found);
}
