// The tab Results: a table of the runs with their parameters and results, pictures of these, and requests to sweeps.
//
// The page makes one Results when the first run with parameters is there, with a section and the page's
//   wire, open(key), only(keys), colour(key), notice(text), stop(key), toCurves()
// While the tab is open, it calls results.show(runs, {order}) after each event and each change of the list: runs maps
// keys to summaries, order has the keys that the list's search finds.

import { Matrix } from "./confusion.js";
import { asCsv, save } from "./downloads.js";
import { Parallel } from "./parallel.js";
import { parse } from "./query.js";
import { Scatter } from "./scatter.js";
import { SweepLines } from "./sweeps.js";
import { Trial, columnsOf, compareValues, html } from "./trials.js";
import { grouped, titled, write } from "./words.js";

const MOST_NOTE = 500;
const WIDTHS = new Map([["parameter", 96], ["status", 128], ["metric", 96], ["measure", 76], ["note", 220]]);
const LETTER = 9, MOST_WIDTH = 180; // pixels: of a letter of a title, of a column that grows with its title
const NAME = 130, BESIDE = 42; // pixels: of the column of names at least, and in it beside a name
const PICTURES_MS = 120; // after the last key of the filter

export class Results {
  constructor(place, page) {
    this.page = page;
    this.trials = new Map(); // key -> Trial
    this.rows = new Map(); // key -> {line, cells, box, swatch, stop, table}
    this.columns = [];
    this.order = [];
    this.shown = []; // trials in the order of the table
    this.picked = new Set();
    this.notes = new Map(); // key -> a note on its way to the monitor
    this.sorted = { id: null, turn: 1 };
    this.editing = null;
    this.build(place);
  }

  build(place) {
    const asks = { pick: (key) => this.pick(key, !this.picked.has(key)), isPicked: (key) => this.picked.has(key) };
    const sweeps = html("div", { className: "sweeps" });
    this.sweeps = new SweepLines(sweeps, { ...this.page, trials: this.trials });
    this.sweeps.refresh(); // when the tab opens, their lines are there, and do not move the table
    this.filter = html("input", { type: "search", className: "filter", autocomplete: "off", spellcheck: false,
      placeholder: 'rate=0.1 loss<0.5 status=failed "a word"' });
    this.filter.setAttribute("aria-label", "Filter the table");
    this.count = html("p", { className: "count" });
    this.count.setAttribute("role", "status");
    this.curves = html("button", { type: "button", className: "to-curves", disabled: true });
    this.none = html("button", { type: "button", className: "pick-none", textContent: "Pick none", hidden: true });
    this.csv = html("button", { type: "button", className: "to-csv", textContent: "Export CSV" });
    this.wrong = html("p", { className: "picture-says filter-says" });
    this.wrong.setAttribute("role", "status");
    const matrix = html("section", { className: "picture matrix-place", hidden: true });
    this.matrix = new Matrix(matrix, this.page);
    const scatter = picture("Scatter"), parallel = picture("Parallel coordinates");
    this.scatter = new Scatter(scatter.lastChild, asks);
    this.parallel = new Parallel(parallel.lastChild, { ...asks, brushed: () => this.arrange() });
    this.head = withRole("row", html("tr"));
    this.body = withRole("rowgroup", html("tbody"));
    this.table = withRole("table", html("table", { className: "trials" }, withRole("rowgroup", html("thead", {}, this.head)), this.body));
    const frame = html("div", { className: "table-frame", tabIndex: 0 }, this.table);
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Table of results");
    const tools = html("div", { className: "results-tools" }, this.filter, this.count, this.curves, this.none, this.csv);
    place.append(sweeps, tools, this.wrong, html("div", { className: "pictures" }, scatter, parallel), matrix, frame);
    this.filter.addEventListener("input", () => this.arrange());
    this.curves.addEventListener("click", () => {
      this.page.only(this.order.filter((key) => this.picked.has(key)));
      this.page.toCurves();
    });
    this.none.addEventListener("click", () => {
      this.picked.clear();
      this.paintPicks();
    });
    this.csv.addEventListener("click", () => this.export());
    this.body.addEventListener("click", (event) => this.onClick(event));
    this.body.addEventListener("change", (event) => {
      if (event.target.matches(".pick-one")) this.pick(keyOf(event.target), event.target.checked);
    });
  }

  // -- what is there ------------------------------------------------------------------------------------------

  show(runs, { order }) {
    this.order = order;
    const changed = [];
    for (const key of this.trials.keys()) {
      if (!runs.has(key)) this.forget(key);
    }
    for (const [key, summary] of runs) {
      const trial = this.trials.get(key);
      if (trial?.summary === summary) continue;
      if (trial) trial.take(summary);
      else this.trials.set(key, new Trial(summary));
      if (this.notes.get(key) === (summary.note ?? "")) this.notes.delete(key);
      changed.push(key);
    }
    this.setColumns();
    this.setWidths();
    for (const key of changed) this.fill(key);
    this.sweeps.refresh();
    this.matrix.refresh(this.trials);
    this.arrange();
    this.paintPicks();
  }

  forget(key) {
    this.rows.get(key)?.line.remove();
    for (const known of [this.trials, this.rows, this.picked, this.notes]) known.delete(key);
  }

  // Builds the head anew if there are other columns than before, and all rows.
  setColumns() {
    const columns = columnsOf(this.trials.values());
    const isSame = columns.length === this.columns.length && columns.every(({ id, title }, at) =>
      id === this.columns[at].id && title === this.columns[at].title);
    this.columns = columns;
    if (isSame) return;
    this.wide = 0;
    const [pick, acts] = [["pick-cell", "Pick"], ["acts", "Actions"]].map(([className, textContent]) =>
      withRole("columnheader", html("th", { className, textContent })));
    this.head.replaceChildren(pick, ...columns.map((column) => this.headOf(column)), acts);
    this.rows.clear();
    for (const key of this.trials.keys()) this.fill(key);
    this.body.replaceChildren();
  }

  // Names are whole where they fit.
  setWidths() {
    const pen = document.createElement("canvas").getContext("2d");
    const { fontWeight, fontSize, fontFamily } = getComputedStyle(this.head.querySelector(".sort"));
    pen.font = `${fontWeight} ${fontSize} ${fontFamily}`;
    const wide = Math.ceil(Math.max(NAME, ...[...this.trials.values()].map(({ name }) => BESIDE + pen.measureText(name).width)));
    if (wide === this.wide) return;
    this.wide = wide;
    const name = `clamp(${NAME}px, ${wide}px, 40vw)`;
    const sizes = ["48px", ...this.columns.map((column) => (column.id === "name" ? name : `${widthOf(column)}px`)), "130px"];
    this.table.style.minWidth = `max(100%, ${sizes.join(" + ")})`;
    const note = 1 + this.columns.findIndex(({ id }) => id === "note");
    this.table.style.setProperty("--columns", sizes.with(note, `minmax(${sizes[note]}, 1fr)`).join(" "));
  }

  headOf({ id, title, kind }) {
    const button = html("button", { type: "button", className: "sort", textContent: title, title });
    const cell = withRole("columnheader", html("th", { className: kind }, button));
    cell.scope = "col";
    cell.dataset.column = id;
    button.addEventListener("click", () => {
      const { sorted } = this;
      this.sorted = sorted.id === id ? (sorted.turn > 0 ? { id, turn: -1 } : { id: null, turn: 1 }) : { id, turn: 1 };
      this.arrange();
    });
    return cell;
  }

  // Shows what a trial's row says.
  fill(key) {
    const trial = this.trials.get(key), row = this.rows.get(key) ?? this.newRow(trial);
    this.columns.forEach((column, at) => {
      const place = row.cells[at];
      if (column.id === "note" && this.editing === key) return;
      const text = column.id === "note" ? (this.notes.get(key) ?? trial.summary.note ?? "") : column.says(trial);
      write(place, text);
      if (place.title !== text) place.title = text;
      if (column.id === "note") {
        place.classList.toggle("empty", !text);
        place.setAttribute("aria-label", `Note on ${trial.name}${text ? `: ${text}` : ""}`);
      }
      if (column.id === "status") place.title = trial.why || trial.summary.says;
    });
    row.line.dataset.state = trial.status;
    row.stop.hidden = !trial.summary.can_stop;
    row.table.hidden = !trial.summary.tables?.length;
  }

  newRow(trial) {
    const line = withRole("row", html("tr", { className: "trial" }));
    line.dataset.run = trial.key;
    const box = html("input", { type: "checkbox", className: "pick-one", checked: this.picked.has(trial.key) });
    box.setAttribute("aria-label", `Pick ${trial.name}`);
    const swatch = html("i", { className: "swatch" });
    const cells = this.columns.map(({ id, kind }) => {
      const cell = withRole("cell", html("td", { className: id === "status" ? "status state" : kind }));
      if (id !== "name" && id !== "note") return cell;
      const button = html("button", { type: "button", className: id === "name" ? "open-run" : "edit-note" });
      cell.append(...(id === "name" ? [swatch, button] : [button]));
      return button;
    });
    const [stop, table] = [["stop-one", "Stop"], ["show-table", "Matrix"]].map(([name, text]) => {
      const button = html("button", { type: "button", className: name, textContent: text, hidden: true });
      button.setAttribute("aria-label", `${text} ${trial.name}`);
      return button;
    });
    line.append(withRole("cell", html("td", { className: "pick-cell" }, box)),
      ...cells.map((cell) => (cell.tagName === "TD" ? cell : cell.parentElement)),
      withRole("cell", html("td", { className: "acts" }, stop, table)));
    this.rows.set(trial.key, { line, cells, box, swatch, stop, table });
    return this.rows.get(trial.key);
  }

  // -- order and filter ---------------------------------------------------------------------------------------

  // Sorts and filters the rows, in one pass over the document.
  arrange() {
    const { id, turn } = this.sorted;
    const { test, says } = parse(this.filter.value, [...this.trials.values()].map(({ searched }) => searched));
    write(this.wrong, says);
    const listed = this.order.map((key) => this.trials.get(key)).filter(Boolean);
    const found = listed.filter(({ searched }) => test(searched));
    this.shown = found.filter((trial) => this.parallel.passes(trial));
    const column = this.columns.find((one) => one.id === id);
    if (column) {
      const values = new Map(this.shown.map((trial) => [trial, column.of(trial)]));
      this.shown.sort((one, other) => compareValues(values.get(one), values.get(other), turn));
    }
    for (const cell of this.head.querySelectorAll("[data-column]")) {
      const order = cell.dataset.column !== id ? "none" : turn > 0 ? "ascending" : "descending";
      if (cell.getAttribute("aria-sort") !== order) cell.setAttribute("aria-sort", order);
    }
    if (!this.editing) this.place(this.shown.map(({ key }) => this.rows.get(key).line));
    const all = `${grouped(this.trials.size)} runs`;
    const clears = this.shown.length ? "" : ". Empty the filter, the search and the ranges to see all.";
    write(this.count, this.shown.length === this.trials.size ? all : `${grouped(this.shown.length)} of ${all}${clears}`);
    clearTimeout(this.later);
    this.found = found;
    if (this.drawn === undefined) this.draw(); // later, the table would move under a pointer
    else this.later = setTimeout(() => this.draw(), PICTURES_MS);
  }

  // Puts these lines into the table, and no others; what has the focus keeps it.
  place(lines) {
    const there = this.body.children;
    if (there.length === lines.length && lines.every((line, at) => line === there[at])) return;
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    this.body.replaceChildren(...lines);
    if (focused?.isConnected) focused.focus({ preventScroll: true });
  }

  draw() {
    const listed = this.order.map((key) => this.trials.get(key)).filter(Boolean);
    const form = JSON.stringify([this.filter.value, listed.map(({ key, summary }) => [key, summary.trial, summary.last])]);
    if (form !== this.drawn) this.parallel.show(listed, this.found, this.columns, (column) => this.isGreaterBetter(column));
    this.drawn = form;
    this.scatter.show(this.shown, this.columns);
  }

  isGreaterBetter(column) {
    const objective = [...this.trials.values()].find((trial) => trial.summary.trial?.direction)?.summary.trial;
    const isObjective = objective && (column.id === "value" || column.title === titled(objective.objective));
    if (isObjective) return objective.direction === "maximize";
    for (const { best, last } of this.trials.values()) {
      const name = column.id.replace(/^(last|best) /, "");
      const [first, second] = [best.get(name), last.get(name)];
      if (first < second || first > second) return first > second;
    }
    return false;
  }

  // -- picks, notes, requests ---------------------------------------------------------------------------------

  pick(key, on) {
    if (on) this.picked.add(key);
    else this.picked.delete(key);
    this.paintPicks();
  }

  paintPicks() {
    for (const [key, { line, box, swatch }] of this.rows) {
      const on = this.picked.has(key), colour = this.page.colour(key) ?? "";
      if (box.checked !== on) box.checked = on;
      line.classList.toggle("picked", on);
      if (swatch.dataset.colour === colour) continue;
      swatch.dataset.colour = colour;
      swatch.style.background = colour || "transparent";
    }
    this.curves.disabled = this.picked.size === 0;
    write(this.curves, `Show curves (${this.picked.size})`);
    this.none.hidden = this.picked.size === 0;
    this.scatter.paint();
    this.parallel.paint();
  }

  onClick(event) {
    const button = event.target.closest("button");
    const key = button && keyOf(button);
    if (!key) return;
    if (button.matches(".open-run")) this.page.open(key);
    else if (button.matches(".stop-one")) this.page.stop(key);
    else if (button.matches(".show-table")) this.matrix.open(this.trials.get(key));
    else if (button.matches(".edit-note")) this.edit(key, button, this.notes.get(key) ?? this.trials.get(key).summary.note ?? "");
  }

  edit(key, button, text) {
    const input = html("input", { className: "note-input", maxLength: MOST_NOTE, value: text });
    input.setAttribute("aria-label", `Note on ${this.trials.get(key).name}`);
    this.editing = key;
    button.hidden = true;
    button.parentElement.append(input);
    input.focus();
    const end = (isSaved, isKey) => {
      if (!input.isConnected || this.editing !== key) return;
      this.editing = null;
      input.remove();
      button.hidden = false;
      if (isKey) button.focus();
      if (isSaved && input.value.trim() !== text) this.save(key, input.value.trim());
      else if (this.trials.has(key)) this.fill(key);
      this.arrange();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter", true);
    });
    input.addEventListener("blur", () => end(true, false));
  }

  async save(key, text) {
    const { name } = this.trials.get(key);
    this.notes.set(key, text);
    this.fill(key);
    try {
      await this.page.wire.post(`/api/runs/${encodeURIComponent(key)}/note`, text);
      this.page.notice("");
    } catch (error) {
      this.notes.delete(key);
      this.page.notice(`The note on ${name} was not saved: ${error.message}`);
      if (!this.trials.has(key)) return;
      this.fill(key);
      const button = this.rows.get(key).cells[this.columns.findIndex(({ id }) => id === "note")];
      if (!this.editing && button.isConnected) this.edit(key, button, text); // the text is not lost
    }
  }

  export() {
    const lines = [[...this.columns.map(({ title }) => title), "Folder"]];
    for (const trial of this.shown) lines.push([...this.columns.map((column) => column.of(trial)), trial.summary.folder]);
    save(new Blob([asCsv(lines)], { type: "text/csv" }), "results.csv");
  }
}

function picture(title) {
  const made = html("details", { className: "picture", open: true });
  made.append(html("summary", { textContent: title }), html("div"));
  return made;
}

// Rows are laid out as grids, so that those out of sight cost nothing; the roles of a table are therefore given again.
function withRole(role, element) {
  element.setAttribute("role", role);
  return element;
}

function keyOf(element) {
  return element.closest("tr")?.dataset.run;
}

function widthOf({ kind, title }) {
  return Math.max(WIDTHS.get(kind), Math.min(MOST_WIDTH, 16 + LETTER * title.length));
}
