// Every run with everything it says about itself; then the page is drawn for the first time.

const RUNS = Array.from({ length: DATA.rows.n }, (_, i) => i);
const seconds = (row) => {
  if (value(row, "seconds", "all") !== null) return value(row, "seconds", "all");
  const known = DATA.rows.columns.filter((c) => c.k[0] === "seconds").map((c) => value(row, ...c.k)).filter((v) => typeof v === "number");
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
};
const haystack = (row) => ["cell", "label", "model", "data", "status", "error"].map((key) => value(row, key) ?? "").join("\n").toLowerCase();

function drawRuns() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = words.length ? RUNS.filter((row) => words.every((word) => haystack(row).includes(word))) : RUNS;
  const failed = RUNS.filter((row) => value(row, "status") === "failed").length;
  $("runs-note").textContent = `${number(RUNS.length)} runs, ${failed ? `${number(failed)} of them failed` : "none failed"}. A run's name opens its settings, seed, versions, machine and timings.`;
  const score = (when) => (row) => value(row, when, "miou") ?? value(row, when, "top1");
  const figure = (title, get, digits) => ({ title, sort: get, show: (row) => number(get(row), digits) });
  const several = DATA.panels.length > 1;
  const columns = [
    { title: "run", text: true, sort: nameOf, show: (row) => el("button", { type: "button", class: "link", onclick: () => showRows(nameOf(row), [row]) }, nameOf(row)) },
    ...(several ? [{ title: "network", text: true, sort: (r) => value(r, "model"), show: (r) => String(value(r, "model") ?? "–") }] : []),
    { title: "method", text: true, sort: (row) => value(row, "label"), show: (row) => String(value(row, "label") ?? value(row, "method") ?? "–") },
    { title: "asked", sort: (row) => value(row, "asked"), csv: [["asked to keep", (row) => value(row, "asked")], ["of", (row) => value(row, "unit")]], show: (row) => (value(row, "asked") === null ? "–" : `${value(row, "asked")} ${value(row, "unit") ?? ""}`) },
    figure("CR-P", (row) => value(row, "CR-P"), 2),
    figure("CR-F", (row) => value(row, "CR-F"), 2),
    figure("original", score("reference"), 2),
    figure("compressed", score("compressed"), 2),
    figure("retrained", score("retrained"), 2),
    { title: "seed", sort: (row) => value(row, "seed"), show: (row) => String(value(row, "seed") ?? "–") },
    figure("seconds", seconds, 1),
  ];
  if (failed) {
    const said = (row) => (value(row, "status") === "failed" ? `failed: ${value(row, "error") ?? "no reason given"}` : String(value(row, "status")));
    columns.splice(1, 0, { title: "status", text: true, sort: said, show: (row) => el("span", { class: value(row, "status") === "failed" ? "failed" : "muted" }, said(row)) });
  }
  const first = failed ? 1 : null; // what failed comes first
  sortable($("runs-table"), { caption: "Every run", file: "runs", columns, rows, page: 25, first, descending: Boolean(failed) });
}

let waiting = 0;
$("find").addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(drawRuns, 120);
});
$("made").textContent = madeBy(DATA.made);
$("title").textContent = DATA.title;
if (DATA.panels.length) {
  startCurves();
  startExplorer();
} else {
  $("headline").textContent = "No run has finished: there is nothing to compare yet.";
  for (const part of document.querySelectorAll(".controls, #trade-off, #within, #explorer")) part.hidden = true;
}
anchors();
const asked = follow();
refresh();
drawRuns();
asked?.scrollIntoView();
