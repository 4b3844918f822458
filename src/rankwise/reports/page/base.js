"use strict";
// What every part of the page uses. Text from the data is only ever set as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const TOUCH = matchMedia("(pointer: coarse)").matches;
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

// Who has to draw again when a choice or the colours change.
const drawers = [];
const refresh = () => drawers.forEach((draw) => draw());

const formats = new Map();
function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  if (!formats.has(digits)) {
    formats.set(digits, new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return formats.get(digits).format(value).replace(/^-(?=[0.]*$)/, "").replace("-", "−");
}
const signed = (value, digits = 2) => (value > 0 ? "+" : "") + number(value, digits);
const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${number(value, digits)} %`);
/** [mean, deviation or null] → "91.73 ± 0.12" */
const spread = (pair, show) => (pair === null ? "–" : show(pair[0]) + (pair[1] === null ? "" : ` ± ${number(pair[1], 2)}`));
/** Text for plotly, which reads a little markup. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

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
const chosenBefore = remembered("rankwise-theme");
if (chosenBefore === "dark" || chosenBefore === "light") root.dataset.theme = chosenBefore;
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
    dragmode: TOUCH ? false : "zoom",
    ...more,
    xaxis: { ...axis, ...more.xaxis },
    yaxis: { ...axis, ...more.yaxis },
  };
}
const CONFIG = {
  displaylogo: false,
  responsive: true,
  displayModeBar: TOUCH ? false : "hover",
  modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};

// Files that the page gives away, and links to its parts.
function download(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
/** One field of a CSV file. A text that a spreadsheet would compute gets an apostrophe. */
function field(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}
const csvText = (head, rows) => [head, ...rows].map((row) => row.map(field).join(",")).join("\n") + "\n";
/** `make` gives [head, rows] when it is asked for. */
function csvButton(name, make, what) {
  const give = () => download(`${name}.csv`, csvText(...make()), "text/csv");
  return el("button", { type: "button", class: "mini csv", title: "Download as CSV", "aria-label": `Download ${what} as CSV`, onclick: give }, "CSV");
}

// A link names a part of the page and what is chosen there: #within?panel=1&unit=macs
const choices = []; // {write(params), read(params)}
function address(id) {
  const params = new URLSearchParams();
  choices.forEach((one) => one.write(params));
  const said = params.toString();
  return `#${id}${said ? `?${said}` : ""}`;
}
/** A link to the part with this id; what is chosen at the time of the click goes with it. */
function anchor(id, what) {
  const link = el("a", { class: "mini", href: `#${id}`, title: "Link to this part", "aria-label": `Link to ${what}` }, "#");
  link.addEventListener("click", () => link.setAttribute("href", address(id)));
  return link;
}
function anchors() {
  for (const part of document.querySelectorAll("section[id]")) {
    const title = part.querySelector("h2");
    if (title && !title.querySelector(".mini")) title.append(" ", anchor(part.id, `“${title.textContent}”`));
  }
}
/** What an address asks for; the part it names, or null. */
function follow() {
  const [id, said] = location.hash.slice(1).split("?");
  const params = new URLSearchParams(said ?? "");
  if (said !== undefined) choices.forEach((one) => one.read(params));
  return id ? document.getElementById(id) : null;
}
addEventListener("hashchange", () => {
  const part = follow();
  if (!part) return;
  refresh();
  part.scrollIntoView();
});

/** The footer: what made this page, in words. */
function madeBy(made) {
  const { rankwise, torch, python, machine, threads, commit } = made;
  const from = commit ? ` (commit ${commit})` : "";
  return `Made by rankwise ${rankwise}${from} with torch ${torch} and Python ${python} on ${machine}, ${threads} ${threads === 1 ? "thread" : "threads"}.`;
}
