// Tables that can be sorted by every column, and turned over where they are long; and the dialog.

/**
 * columns: {title, sort(row) → number, text or null, show(row) → node or text, text: left-aligned, more: small print}.
 * Empty values are last in both directions.
 */
function sortable(host, { columns, rows, caption, first = null, descending = false, page = 0 }) {
  let [by, down, from] = [first, descending, 0];
  const head = el("tr");
  const body = el("tbody");
  const turn = el("div", { class: "turn" });
  const grid = el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, head), body);
  const region = el("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption }, grid);
  host.replaceChildren(region, turn);
  let sorted = rows;

  function order() {
    if (by === null) return void (sorted = rows);
    const keyed = rows.map((row) => [columns[by].sort(row), row]);
    const sign = down ? -1 : 1;
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    });
    sorted = keyed.map(([, row]) => row);
  }
  function drawHead() {
    head.replaceChildren(
      ...columns.map((column, i) => {
        const way = i !== by ? "none" : down ? "descending" : "ascending";
        const button = el("button", { type: "button", onclick: () => sortBy(i) }, column.title, el("span", { class: "arrow", "aria-hidden": "true" }));
        return el("th", { scope: "col", "aria-sort": way, class: column.text ? "text" : null }, button);
      })
    );
  }
  function drawBody() {
    const shown = page ? sorted.slice(from, from + page) : sorted;
    body.replaceChildren(
      ...shown.map((row) =>
        el("tr", {}, ...columns.map((column, i) => el(i ? "td" : "th", { scope: i ? null : "row", class: column.text ? "text" : null }, column.show(row))))
      )
    );
    if (!page || rows.length <= page) return void turn.replaceChildren();
    const go = (to) => () => {
      from = to;
      drawBody();
    };
    turn.replaceChildren(
      el("button", { type: "button", class: "quiet", disabled: from === 0, onclick: go(Math.max(0, from - page)) }, "← Before"),
      el("span", { "aria-live": "polite" }, `${number(from + 1)}–${number(Math.min(from + page, rows.length))} of ${number(rows.length)}`),
      el("button", { type: "button", class: "quiet", disabled: from + page >= rows.length, onclick: go(from + page) }, "After →")
    );
  }
  function sortBy(i) {
    down = i === by ? !down : !columns[i].text; // numbers: the largest first
    [by, from] = [i, 0];
    order();
    drawHead();
    drawBody();
    head.children[i].firstChild.focus();
  }
  order();
  drawHead();
  drawBody();
}

// Provenance: everything that the rows behind a number say about themselves.
const GROUPS = [
  ["Scores", ["reference", "compressed", "retrained"]],
  ["Where it comes from", ["seed", "provenance"]],
  ["Seconds", ["seconds"]],
  ["Run", null], // whatever is in no other group
  ["Settings", ["settings"]],
];
const UNSAID = ["format", "kind"];
function facts(entries) {
  const lines = entries.flatMap(([key, v]) => [el("dt", {}, key), el("dd", {}, typeof v === "object" ? JSON.stringify(v) : typeof v === "number" ? String(v) : v)]);
  return el("dl", { class: "facts-list" }, ...lines);
}
function rowDetails(row) {
  const grouped = new Set([...UNSAID, ...GROUPS.flatMap(([, keys]) => keys ?? [])]);
  const known = DATA.rows.columns.map((c) => [c.k, value(row, ...c.k)]).filter(([, v]) => v !== null);
  const parts = [];
  if (value(row, "error") !== null) parts.push(el("p", { class: "failed" }, String(value(row, "error"))));
  for (const [title, keys] of GROUPS) {
    const belongs = (key) => (keys ? keys.includes(key) : !grouped.has(key));
    const long = title === "Scores" || title === "Run";
    let mine = known.filter(([k]) => belongs(k[0])).map(([k, v]) => [long ? k.join(" · ") : k.at(-1), v]);
    if (title === "Settings" && mine.length) mine = Object.entries(mine[0][1] ?? {});
    if (mine.length) parts.push(el("h3", {}, title), facts(mine));
  }
  return parts;
}
const nameOf = (row) => String(value(row, "cell") ?? `row ${row + 1}`);
function showRows(title, rows) {
  $("dialog-title").textContent = title;
  const note = rows.length > 1 ? `Mean and sample standard deviation over ${rows.length} runs:` : "One run.";
  $("dialog-body").replaceChildren(
    el("p", { class: "note" }, note),
    ...(rows.length === 1
      ? rowDetails(rows[0])
      : rows.map((row) => el("details", {}, el("summary", {}, nameOf(row)), ...rowDetails(row))))
  );
  $("dialog").showModal();
}
$("dialog-close").addEventListener("click", () => $("dialog").close());
$("dialog").addEventListener("click", (event) => event.target === $("dialog") && $("dialog").close());
