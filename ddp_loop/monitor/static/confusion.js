// Tables of a run; a confusion matrix (rows: truth, columns: prediction) with the accuracy of each class.

import { html, shown } from "./trials.js";
import { grouped } from "./words.js";

export class Matrix {
  constructor(place, asks, closes = true) {
    this.asks = asks; // wire, notice(text)
    this.place = place;
    this.title = html("h2");
    this.choice = html("select", { hidden: true });
    this.choice.setAttribute("aria-label", "Table");
    const close = html("button", { type: "button", className: "close", textContent: "×", hidden: !closes });
    close.setAttribute("aria-label", "Close the table");
    this.says = html("p", { className: "picture-says" });
    this.frame = html("div", { className: "wide-frame matrix-frame", tabIndex: 0 });
    this.frame.setAttribute("role", "region");
    this.frame.setAttribute("aria-label", "Table of a run");
    place.append(html("div", { className: "matrix-head" }, this.title, this.choice, close), this.frame, this.says);
    close.addEventListener("click", () => this.close());
    this.choice.addEventListener("change", () => this.read(this.choice.value));
  }

  async open(trial, scrolls = true) {
    const tables = trial.summary.tables;
    this.trial = trial;
    this.summary = trial.summary;
    this.choice.hidden = tables.length < 2;
    this.choice.replaceChildren(...tables.map((name) => html("option", { value: name, textContent: name })));
    this.choice.value = tables.includes("confusion") ? "confusion" : tables[0];
    await this.read(this.choice.value);
    if (scrolls) this.place.scrollIntoView({ block: "nearest" });
  }

  close() {
    this.trial = null;
    this.place.hidden = true;
  }

  // Reads the table again if its run has changed.
  refresh(trials) {
    const trial = this.trial && trials.get(this.trial.key);
    if (!trial || trial.summary === this.summary) return;
    this.summary = trial.summary;
    this.read(this.choice.value);
  }

  async read(name) {
    const { trial } = this;
    try {
      const table = await this.asks.wire.read(`/api/runs/${encodeURIComponent(trial.key)}/tables/${encodeURIComponent(name)}`);
      if (this.trial !== trial) return;
      this.fill(table);
      this.place.hidden = false;
    } catch (error) {
      this.asks.notice(`${trial.name}: ${error.message}`);
    }
  }

  fill({ name, rows, columns, values, iteration }) {
    const isConfusion = rows.length > 0 && rows.length === columns.length && rows.every((label, at) => label === columns[at]);
    const title = isConfusion && name === "confusion" ? "Confusion matrix" : name;
    this.title.textContent = `${title}: ${this.trial.name}${iteration === null ? "" : `, step ${grouped(iteration)}`}`;
    const isShaded = isConfusion || values.every((row) => row.every((value) => value === null || value >= 0));
    const sums = values.map((row) => row.reduce((sum, value) => sum + Math.max(0, value ?? 0), 0));
    const head = html("tr", {}, html("th", { textContent: isConfusion ? "truth \\ predicted" : "row" }),
      ...columns.map((label) => header(label, "col")));
    if (isConfusion) head.append(header("accuracy", "col"));
    const lines = rows.map((label, at) => {
      const line = html("tr", {}, header(label, "row"));
      values[at].forEach((value, column) => {
        const share = isShaded && sums[at] > 0 ? Math.max(0, value ?? 0) / sums[at] : 0;
        const cell = html("td", { textContent: shown(value) });
        cell.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
        cell.classList.toggle("nothing", !value);
        cell.title = `${label} ${isConfusion ? "as" : "and"} ${columns[column]}: ${shown(value)}`
          + (isShaded ? ` (${(100 * share).toFixed(1)} % of the row)` : "");
        line.append(cell);
      });
      if (isConfusion) line.append(html("td", { className: "accuracy", textContent: percent(values[at][at], sums[at]) }));
      return line;
    });
    this.frame.replaceChildren(html("table", { className: "matrix" }, html("thead", {}, head), html("tbody", {}, ...lines)));
    const right = values.reduce((sum, row, at) => sum + (row[at] ?? 0), 0);
    const all = sums.reduce((sum, one) => sum + one, 0);
    this.says.textContent = isConfusion
      ? `Accuracy ${percent(right, all)}: ${shown(right)} of ${shown(all)}. Colour: the share of the row.`
      : isShaded ? "Colour: the share of the row." : "";
  }
}

function header(label, scope) {
  const made = html("th", { textContent: label, title: label });
  made.scope = scope;
  return made;
}

function percent(part, whole) {
  return whole > 0 ? `${((100 * (part ?? 0)) / whole).toFixed(1)} %` : "–";
}
