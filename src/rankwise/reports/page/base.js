"use strict";
// What every part of the page uses. Text from the data is only ever set as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

/** el("p", {class: "note", onclick: f}, "text", node, …) */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

const formats = new Map();
function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  if (!formats.has(digits)) {
    formats.set(digits, new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return formats.get(digits).format(value).replace("-", "−");
}
const signed = (value, digits = 2) => (value > 0 ? "+" : "") + number(value, digits);
const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${number(value, digits)} %`);
/** [mean, deviation or null] → "91.73 ± 0.12" */
const spread = (pair, show) => (pair === null ? "–" : show(pair[0]) + (pair[1] === null ? "" : ` ± ${number(pair[1], 2)}`));
/** Text for plotly, which reads a little markup. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Rows are columns: a constant, positions into a list of values, or the values themselves.
const COLUMNS = new Map(DATA.rows.columns.map((column) => [column.k.join("\u0000"), column]));
function value(row, ...path) {
  const column = COLUMNS.get(path.join("\u0000"));
  if (column === undefined) return null;
  if ("c" in column) return column.c;
  return "i" in column ? column.v[column.i[row]] : column.d[row];
}

// What is chosen, and who has to know when it changes.
const state = { panel: 0, stage: 0, hidden: new Set(), vertical: "score", floor: null, published: "", unit: "params", asked: "" };
const drawers = [];
const refresh = () => drawers.forEach((draw) => draw());
const panel = () => DATA.panels[state.panel];
const stage = () => panel()?.stages[state.stage];
/** The lines that are looked at: those with a budget in the chosen unit, or all. */
const lines = () => stage().lines.filter((line) => !state.asked || line.unit === state.asked);
const titleOf = (line) => (state.asked ? line.name.replace(`, ${line.unit} budget`, "") : line.name);
const LOOK = new Map(DATA.labels.map((entry) => [entry.label, entry]));
const colour = (label) => LOOK.get(label)[isDark() ? "dark" : "light"];
const dashOf = (line) => (line.mode === "iterate" ? "longdashdot" : DATA.dashes[line.unit] ?? "solid");

/** A group of buttons of which one is pressed. `options`: [value, text] …; `choose` is told the value. */
function segments(host, options, current, choose) {
  const press = (key) => () => {
    choose(key);
    host.querySelector('[aria-pressed="true"]')?.focus(); // the buttons were made anew
  };
  host.replaceChildren(
    ...options.map(([key, text]) => el("button", { type: "button", "aria-pressed": String(key === current), onclick: press(key) }, text))
  );
}

function options(select, entries, current) {
  select.replaceChildren(...entries.map(([key, text]) => el("option", { value: key, selected: key === current }, text)));
}

// The marker shapes of plotly, in a box of 16 × 16.
const SHAPES = {
  circle: "M8 3a5 5 0 1 0 0 10a5 5 0 1 0 0-10",
  square: "M3.5 3.5h9v9h-9z",
  diamond: "M8 2l6 6-6 6-6-6z",
  "triangle-up": "M8 2.5l6 10.5h-12z",
  "triangle-down": "M8 13.5l6-10.5h-12z",
  "triangle-left": "M2.5 8l10.5-6v12z",
  x: "M4.5 2.5L8 6l3.5-3.5 2 2L10 8l3.5 3.5-2 2L8 10l-3.5 3.5-2-2L6 8 2.5 4.5z",
  cross: "M6.2 2.5h3.6v3.7h3.7v3.6H9.8v3.7H6.2V9.8H2.5V6.2h3.7z",
  star: "M8 1.5l1.9 4.3 4.6.4-3.5 3.1 1.1 4.6L8 11.5l-4.1 2.4L5 9.3 1.5 6.2l4.6-.4z",
  pentagon: "M8 2l6 4.4-2.3 7H4.3L2 6.4z",
  hexagon: "M8 2l5.2 3v6L8 14l-5.2-3V5z",
};
function swatch(line) {
  const SVG = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, v] of Object.entries({ viewBox: "0 0 16 16", class: "swatch", "aria-hidden": "true" })) svg.setAttribute(key, v);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", SHAPES[LOOK.get(line.label).marker]);
  path.setAttribute("fill", colour(line.label));
  svg.append(path);
  return svg;
}

// Light and dark: what the system prefers, until the button says otherwise.
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}
function remembered(key, fresh) {
  try {
    if (fresh !== undefined) localStorage.setItem(key, fresh);
    return localStorage.getItem(key);
  } catch {
    return null; // some browsers keep nothing for files
  }
}
const ink = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
function themeButton() {
  $("theme").textContent = isDark() ? "☀ Light" : "☾ Dark";
  $("theme").setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
}
const before = remembered("rankwise-theme");
if (before === "dark" || before === "light") root.dataset.theme = before;
$("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remembered("rankwise-theme", root.dataset.theme);
  refresh();
});
system.addEventListener("change", refresh);
drawers.push(themeButton);

/** Layout that all charts share. */
function layout(more) {
  const axis = { gridcolor: ink("line"), zerolinecolor: ink("line"), linecolor: ink("line"), ticks: "outside", tickcolor: ink("line"), title: { standoff: 8 } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 13, color: ink("ink") },
    margin: { t: 12, r: 12, b: 52, l: 64 }, // fixed: plotly's own margins draw everything two or three times
    showlegend: false,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("muted"), activecolor: ink("ink") },
    hovermode: "closest",
    hoverlabel: { align: "left", bgcolor: ink("surface"), bordercolor: ink("muted"), font: { color: ink("ink"), size: 13 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...more,
    xaxis: { ...axis, ...more.xaxis },
    yaxis: { ...axis, ...more.yaxis },
  };
}
const CONFIG = {
  displaylogo: false,
  responsive: true,
  displayModeBar: matchMedia("(pointer: coarse)").matches ? false : "hover",
  modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};
