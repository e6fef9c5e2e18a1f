// A parameter against a metric, a mark for each trial.

import { html, isFiniteNumber, mixed, scaleOf, shown, svg } from "./trials.js";
import { byName } from "./words.js";

const TALL = 320, MARGIN = { left: 62, right: 16, top: 12, bottom: 44 }, STRIP = 20; // pixels
const NEAR = 18; // pixels from the pointer to a mark
const COLOURS = 20; // of categories, in page.css

export class Scatter {
  // asks: pick(key), isPicked(key)
  constructor(place, asks) {
    this.asks = asks;
    this.marks = []; // {trial, x, y, item}
    this.columns = [];
    this.trials = [];
    this.at = -1; // the mark that is named
    this.selects = new Map();
    const tools = html("div", { className: "picture-tools" });
    for (const [name, label] of [["x", "X"], ["y", "Y"], ["colour", "Colour"]]) {
      const select = html("select", { className: `scatter-${name}` });
      select.addEventListener("change", () => this.draw());
      this.selects.set(name, select);
      tools.append(html("label", { textContent: `${label} ` }, select));
    }
    this.logs = new Map();
    for (const [name, label] of [["x", "log X"], ["y", "log Y"]]) {
      const box = html("input", { type: "checkbox", className: `log-${name}`, indeterminate: true });
      box.addEventListener("change", () => this.draw());
      this.logs.set(name, box);
      tools.append(html("label", { className: "tick" }, box, ` ${label}`));
    }
    this.canvas = svg("svg", { class: "scatter", tabindex: 0, role: "group" });
    this.tip = html("div", { className: "tip", hidden: true });
    this.tip.setAttribute("role", "status");
    this.legend = html("p", { className: "legend" });
    this.says = html("p", { className: "picture-says" });
    this.frame = html("div", { className: "picture-frame" }, this.canvas, this.tip);
    place.append(tools, this.frame, this.legend, this.says);
    this.canvas.addEventListener("pointermove", (event) => this.name(this.nearest(event)));
    this.canvas.addEventListener("pointerleave", () => this.name(-1));
    this.canvas.addEventListener("click", (event) => this.choose(this.nearest(event)));
    this.canvas.addEventListener("blur", () => this.name(-1));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  // Shows these trials; columns are those of the table.
  show(trials, columns) {
    this.trials = trials;
    this.columns = columns;
    const parameters = columns.filter(({ kind }) => kind === "parameter");
    const metrics = columns.filter(({ kind }) => kind === "metric");
    const time = columns.filter(({ id }) => id === "time");
    offer(this.selects.get("x"), [...parameters, ...metrics, ...time]);
    offer(this.selects.get("y"), [...metrics, ...time]);
    offer(this.selects.get("colour"), [...columns.filter(({ id }) => id === "status"), ...parameters, ...metrics]);
    this.draw();
  }

  column(name) {
    const id = this.selects.get(name).value;
    return this.columns.find((one) => one.id === id);
  }

  draw() {
    const [x, y, colour] = ["x", "y", "colour"].map((name) => this.column(name));
    const wide = this.frame.clientWidth;
    if (!x || !y || !colour || wide < 80) return this.canvas.replaceChildren();
    const sound = this.trials.filter((trial) => !trial.isFailed);
    const basis = sound.some((trial) => isFiniteNumber(y.of(trial))) ? sound : this.trials;
    const across = this.scale("x", this.trials.map(x.of)), up = this.scale("y", basis.map(y.of));
    const missing = this.trials.filter((trial) => up.at(y.of(trial)) === null);
    const strip = missing.length ? STRIP : 0;
    const area = { left: MARGIN.left, right: wide - MARGIN.right, top: MARGIN.top, bottom: TALL - MARGIN.bottom - strip };
    this.canvas.setAttribute("width", wide);
    this.canvas.setAttribute("height", TALL);
    this.canvas.setAttribute("aria-label", `${y.title} against ${x.title}: ${this.trials.length} trials. Arrows move, Enter picks.`);
    const paint = painter(colour, this.trials);
    const parts = [...frame(area, across, up, x.title, y.title, strip)];
    this.marks = [];
    let unplaced = 0, without = 0, below = 0;
    for (const trial of this.trials) {
      const place = across.at(x.of(trial)), height = up.at(y.of(trial));
      if (place === null) {
        unplaced += 1;
        continue;
      }
      const left = area.left + place * (area.right - area.left) + (across.kind === "category" ? spread(trial.key) * 14 : 0);
      if (height === null && isFiniteNumber(y.of(trial))) below += 1;
      else if (height === null) without += 1;
      const clipped = height === null ? null : Math.min(1, Math.max(0, height));
      const top = clipped === null ? area.bottom + strip / 2 + 2 : area.bottom - clipped * (area.bottom - area.top);
      const isCross = trial.isFailed || clipped !== height || clipped === null;
      const item = mark(trial, left, top, isCross);
      paint(item, trial, isCross);
      if (this.asks.isPicked(trial.key)) item.classList.add("picked");
      this.marks.push({ trial, x: left, y: top, item });
      parts.push(item);
    }
    this.ring = svg("circle", { class: "ring", r: 9, visibility: "hidden" });
    const [picked, others] = [true, false].map((on) => parts.filter((one) => one.classList.contains("picked") === on));
    this.canvas.replaceChildren(...others, ...picked, this.ring);
    this.legend.replaceChildren(...paint.legend());
    const told = [];
    if (without) told.push(`${without} without a finite ${y.title}: on the lower edge.`);
    if (below) told.push(`${below} below the logarithmic scale: on the lower edge.`);
    if (unplaced) told.push(`${unplaced} without ${x.title}: left out.`);
    if (basis !== this.trials && basis.length < this.trials.length) told.push("Crosses failed; the scale leaves them out.");
    this.says.textContent = told.join(" ");
    this.at = -1;
    this.tip.hidden = true;
  }

  scale(name, values) {
    const box = this.logs.get(name);
    const scale = scaleOf(values, box.indeterminate ? undefined : box.checked);
    box.disabled = !scale.canLog;
    if (box.indeterminate && scale.kind !== "none") box.checked = scale.kind === "log";
    box.indeterminate = box.indeterminate && !scale.canLog;
    return scale;
  }

  nearest(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    let found = -1, least = NEAR ** 2;
    this.marks.forEach((mark, at) => {
      const far = (mark.x - x) ** 2 + (mark.y - y) ** 2;
      if (far <= least) [found, least] = [at, far];
    });
    return found;
  }

  name(at) {
    this.at = at;
    const mark = this.marks[at];
    this.tip.hidden = !mark;
    this.ring?.setAttribute("visibility", mark ? "visible" : "hidden");
    if (!mark) return;
    this.ring.setAttribute("cx", mark.x);
    this.ring.setAttribute("cy", mark.y);
    const [x, y, colour] = ["x", "y", "colour"].map((one) => this.column(one));
    const lines = new Map([[x.title, x.says(mark.trial)], [y.title, y.says(mark.trial)], [colour.title, colour.says(mark.trial)]]);
    const head = html("strong", { textContent: mark.trial.name });
    this.tip.replaceChildren(head, ...[...lines].map(([title, text]) => html("span", { textContent: `${title} ${text}` })));
    const wide = this.frame.clientWidth;
    this.tip.style.left = `${Math.max(0, Math.min(mark.x + 12, wide - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${Math.max(0, mark.y - this.tip.offsetHeight - 10)}px`;
  }

  choose(at) {
    if (this.marks[at]) this.asks.pick(this.marks[at].trial.key);
  }

  // Shows which trials are picked, without drawing anew.
  paint() {
    for (const { trial, item } of this.marks) item.classList.toggle("picked", this.asks.isPicked(trial.key));
  }

  onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && this.marks.length) {
      const order = this.marks.map((_, at) => at).sort((one, other) => this.marks[one].x - this.marks[other].x);
      const place = order.indexOf(this.at);
      this.name(order[place < 0 ? (step > 0 ? 0 : order.length - 1) : Math.min(order.length - 1, Math.max(0, place + step))]);
    } else if (event.key === "Enter" || event.key === " ") this.choose(this.at);
    else return;
    event.preventDefault();
  }
}

// Offers columns in a select, and keeps the choice.
export function offer(select, columns) {
  const form = JSON.stringify(columns.map(({ id, title }) => [id, title]));
  if (select.dataset.form === form) return;
  select.dataset.form = form;
  const before = select.value;
  select.replaceChildren(...columns.map(({ id, title }) => html("option", { value: id, textContent: title })));
  if (columns.some(({ id }) => id === before)) select.value = before;
}

function* frame(area, across, up, title, other, strip) {
  for (const [place, label] of up.ticks) {
    const y = area.bottom - place * (area.bottom - area.top);
    yield svg("line", { class: "grid-line", x1: area.left, x2: area.right, y1: y, y2: y });
    yield svg("text", { class: "tick-label", x: area.left - 8, y: y + 4, "text-anchor": "end" }, label);
  }
  const room = (area.right - area.left) / Math.max(1, across.ticks.length);
  for (const [place, label] of across.ticks) {
    const x = area.left + place * (area.right - area.left);
    const letters = Math.max(3, Math.floor(room / 7));
    const short = label.length > letters ? `${label.slice(0, letters - 1)}…` : label;
    yield svg("line", { class: "grid-line", x1: x, x2: x, y1: area.top, y2: area.bottom });
    yield svg("text", { class: "tick-label", x, y: area.bottom + strip + 18, "text-anchor": "middle" }, short);
  }
  yield svg("line", { class: "axis-line", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom });
  if (strip) yield svg("text", { class: "tick-label", x: area.left - 8, y: area.bottom + strip / 2 + 6, "text-anchor": "end" }, "none");
  yield svg("text", { class: "axis-title", x: (area.left + area.right) / 2, y: TALL - 6, "text-anchor": "middle" }, title.slice(0, 60));
  const middle = (area.top + area.bottom) / 2;
  yield svg("text", { class: "axis-title", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, other.slice(0, 40));
}

// The mark of a trial, in the colour of its state.
function mark({ status }, x, y, isCross) {
  return svg("path", { class: `mark${isCross ? " cross" : ""}`, "data-state": status, d: isCross ? cross(x, y) : dot(x, y) });
}

function dot(x, y) {
  return `M${(x - 4.5).toFixed(1)} ${y.toFixed(1)}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0`;
}

function cross(x, y) {
  return `M${(x - 4).toFixed(1)} ${(y - 4).toFixed(1)}l8 8m0 -8l-8 8`;
}

// A fixed number from -1 to 1 for a key, so that trials of one category lie beside each other.
function spread(key) {
  let sum = 7;
  for (const letter of key) sum = (sum * 31 + letter.codePointAt(0)) % 1009;
  return sum / 504 - 1;
}

// How marks are coloured by a column: paint(item, trial, isCross), with paint.legend().
function painter(column, trials) {
  const entry = (text, colour) => {
    const swatch = html("i", { className: "dot" });
    swatch.style.background = colour;
    return html("span", {}, swatch, text);
  };
  if (column.id === "status") {
    const firsts = [...new Map(trials.map((trial) => [trial.status, trial])).values()];
    firsts.sort((one, other) => byName(one.status, other.status));
    const sample = svg("svg", { class: "sample", width: 12, height: 12, "aria-hidden": true });
    const legend = () => firsts.map((trial) => {
      const drawn = sample.cloneNode();
      drawn.append(mark(trial, 6, 6, trial.isFailed));
      return html("span", {}, drawn, trial.status);
    });
    return Object.assign(() => {}, { legend });
  }
  const scale = scaleOf(trials.map(column.of));
  const isCategory = scale.kind === "category";
  const index = new Map((scale.names ?? []).map((name, at) => [name, at]));
  const colourOf = (value) => {
    const place = scale.at(value);
    if (place === null) return "var(--mark)";
    return isCategory ? `var(--run-${index.get(String(value)) % COLOURS})` : mixed(place);
  };
  const paint = (item, trial, isCross) => {
    item.style[isCross ? "stroke" : "fill"] = colourOf(column.of(trial));
  };
  const legend = () => {
    const head = html("span", { textContent: `${column.title}:` });
    if (isCategory) return [head, ...scale.names.slice(0, COLOURS).map((name) => entry(name, colourOf(name)))];
    const values = trials.map(column.of).filter(isFiniteNumber);
    if (!values.length) return [head, html("span", { textContent: "no values" })];
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return [head, html("span", { textContent: shown(least) }), html("i", { className: "ramp" }), html("span", { textContent: shown(most) })];
  };
  return Object.assign(paint, { legend });
}
