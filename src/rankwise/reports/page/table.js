// Tables that can be sorted by every column, turned over where they are long, and taken away; facts; and the dialog.

/**
 * columns: {title, sort(row) → number, text or null, show(row) → node or text, text: left-aligned,
 *           csv: [[title, row → value], …] where the file should hold something else than the sorted value}.
 * Empty values are last in both directions.
 */
function sortable(host, { columns, rows, caption, file, first = null, descending = false, page = 0 }) {
  let [by, down, from] = [first, descending, 0];
  const head = el("tr");
  const body = el("tbody");
  const turn = el("div", { class: "turn" });
  const grid = el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, head), body);
  const fields = columns.flatMap((column) => column.csv ?? [[column.title, column.sort]]);
  const give = csvButton(file, () => [fields.map(([title]) => title), sorted.map((row) => fields.map(([, get]) => get(row)))], `the table “${caption}”`);
  host.replaceChildren(scrollable(grid, caption), el("div", { class: "under" }, give, turn));
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

/** A frame that scrolls sideways where it must; its edges fade, and a line says so, as long as there is more. */
function scrollable(grid, caption) {
  const region = el("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption }, grid);
  const cue = el("p", { class: "cue", "aria-hidden": "true", hidden: true }, "More columns: scroll sideways →");
  const frame = el("div", { class: "frame" }, region);
  const look = () => {
    const rest = region.scrollWidth - region.clientWidth - region.scrollLeft;
    frame.classList.toggle("more-right", rest > 1);
    frame.classList.toggle("more-left", region.scrollLeft > 1);
    cue.hidden = region.scrollWidth - region.clientWidth <= 1;
  };
  region.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(region);
  new ResizeObserver(look).observe(grid);
  return el("div", {}, frame, cue);
}

// Keys of rows and plans in words; a key that nobody knows is shown as it is.
const WORDS = {
  top1: "top-1 (%)", top5: "top-5 (%)", miou: "mean IoU (%)", n: "images", "CR-P": "parameters removed, CR-P (%)", "CR-F": "multiply-adds removed, CR-F (%)",
  params: "parameters", macs: "multiply-adds", asked: "asked to keep", unit: "unit of the budget", model: "network", dataset: "data set", label: "shown as",
  share: "share of the epochs retrained", epochs: "epochs retrained", compress: "to compress", score: "to score", retrain: "to retrain", train: "to train", all: "in all",
  plan: "file of the plan", spectra: "file of the spectra", weights: "file of the weights", ratio: "compressed ÷ original", measured: "measured on the network itself",
  error: "error measure", starts: "random starts", never_slower: "never slower", rank_multiple: "ranks are multiples of", retrained: "retrained",
  before: "before", after: "after", dense: "original (seconds)", small: "compressed (seconds)", load: "processes that wanted to run", inputs: "inputs looked at",
};
const wordsFor = (key) => (Object.hasOwn(WORDS, key) ? WORDS[key] : key.replace(/_/g, " "));
/** Any value of a row in words: numbers to four digits, lists with commas. */
function readable(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") {
    if (Number.isInteger(value)) return number(value);
    const size = Math.abs(value);
    if (size >= 1000) return number(value, 0);
    return (size < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(4)))).replace("-", "−");
  }
  if (Array.isArray(value)) return value.length ? value.map(readable).join(", ") : "none";
  if (typeof value === "object") return Object.entries(value).map(([k, v]) => `${wordsFor(k)} ${readable(v)}`).join(", ") || "none";
  return String(value) || "none";
}
function facts(entries) {
  return el("dl", { class: "facts-list" }, ...entries.flatMap(([key, v]) => [el("dt", {}, key), el("dd", {}, readable(v))]));
}

function openDialog(title, ...content) {
  $("dialog-title").textContent = title;
  $("dialog-body").replaceChildren(...content);
  $("dialog").showModal();
}
if ($("dialog")) {
  $("dialog-close").addEventListener("click", () => $("dialog").close());
  $("dialog").addEventListener("click", (event) => event.target === $("dialog") && $("dialog").close());
}
