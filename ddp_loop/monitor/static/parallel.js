// Parallel coordinates: an axis for each parameter and for one metric, a line for each trial. A range on an axis filters.

import { offer } from "./scatter.js";
import { html, isFiniteNumber, mixed, ranksOf, scaleOf, svg } from "./trials.js";

const TALL = 320, TOP = 44, BOTTOM = 28, SIDE = 50, APART = 56; // pixels
const MOST_AXES = 12, MANY = 5; // more than these take the whole width

export class Parallel {
  // asks: brushed(), pick(key), isPicked(key)
  constructor(place, asks) {
    this.asks = asks;
    this.brushes = new Map(); // column's id -> {from, to} of the axis, from 0 to 1
    this.axes = []; // {column, scale, x, rect}
    this.lines = []; // {trial, item}
    this.all = [];
    this.shown = [];
    this.columns = [];
    this.metric = html("select", { className: "parallel-metric" });
    this.metric.addEventListener("change", () => this.onMetric());
    this.clear = html("button", { type: "button", textContent: "Clear ranges", hidden: true });
    this.clear.addEventListener("click", () => this.unbrush());
    this.canvas = svg("svg", { class: "parallel", role: "group", "aria-label": "Parallel coordinates" });
    this.frame = html("div", { className: "picture-frame wide-frame" }, this.canvas);
    this.says = html("p", { className: "picture-says" });
    this.legend = html("p", { className: "legend" });
    place.append(
      html("div", { className: "picture-tools" }, html("label", { textContent: "Result " }, this.metric), this.clear),
      this.frame, this.legend, this.says,
    );
    this.canvas.addEventListener("click", (event) => {
      const line = this.lines.find(({ item }) => item === event.target);
      if (line) asks.pick(line.trial.key);
    });
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  // Shows the lines of `shown`; the scales are those of all trials, so that ranges keep their meaning.
  show(all, shown, columns, isGreaterBetter) {
    Object.assign(this, { all, shown, columns, isGreaterBetter });
    offer(this.metric, columns.filter(({ kind }) => kind === "metric"));
    this.draw();
  }

  passes(trial) {
    for (const { column, scale } of this.axes) {
      const brush = this.brushes.get(column.id);
      if (!brush) continue;
      const place = scale.at(column.of(trial));
      if (place === null || place < brush.from || place > brush.to) return false;
    }
    return true;
  }

  draw() {
    const metric = this.columns.find(({ id }) => id === this.metric.value);
    const varied = this.columns.filter((column) => column.kind === "parameter" && isVaried(column, this.all));
    const wide = this.frame.clientWidth;
    this.says.textContent = "";
    this.lines = [];
    if (!metric || !varied.length || wide < 80) {
      this.axes = [];
      this.canvas.replaceChildren();
      this.says.textContent = varied.length ? "" : "No parameter has two values.";
      return;
    }
    const columns = [...varied.slice(0, MOST_AXES - 1), metric];
    this.frame.closest(".pictures").classList.toggle("stacked", columns.length > MANY);
    const width = Math.max(wide, 2 * SIDE + APART * (columns.length - 1));
    this.letters = Math.max(5, Math.floor((width - 2 * SIDE) / (columns.length - 1) / 7.5)); // of a title
    const sound = this.all.filter((trial) => !trial.isFailed);
    this.axes = columns.map((column, at) => ({
      column,
      x: SIDE + (at * (width - 2 * SIDE)) / (columns.length - 1),
      scale: scaleOf((column === metric ? sound : this.all).map(column.of)),
    }));
    for (const id of this.brushes.keys()) if (!columns.some((column) => column.id === id)) this.brushes.delete(id);
    this.canvas.setAttribute("width", width);
    this.canvas.setAttribute("height", TALL);
    const rank = ranksOf(sound.map(metric.of));
    const isTurned = this.isGreaterBetter(metric);
    const lines = this.shown.map((trial) => {
      const item = svg("path", { class: "way", d: this.way(trial) });
      const place = trial.isFailed ? null : rank(metric.of(trial));
      if (place === null) item.classList.add("none");
      else item.style.stroke = mixed(isTurned ? 1 - place : place);
      item.append(svg("title", {}, `${trial.name}: ${metric.title} ${metric.says(trial)}`));
      return { trial, item, place: place === null ? 2 : isTurned ? 1 - place : place };
    });
    this.lines = lines.sort((one, other) => other.place - one.place); // the best ones lie above
    this.canvas.replaceChildren(...this.lines.map(({ item }) => item), ...this.axes.map((axis) => this.axis(axis)));
    this.legend.replaceChildren(
      html("span", { textContent: `${metric.title}: best` }), html("i", { className: "ramp" }), html("span", { textContent: "worst" }));
    const without = this.shown.filter((trial) => !isFiniteNumber(metric.of(trial))).length;
    const failed = this.shown.filter((trial) => trial.isFailed && isFiniteNumber(metric.of(trial))).length;
    const dashed = [without && `${without} without a finite result`, failed && `${failed} that failed`].filter(Boolean).join(" and ");
    if (dashed) this.says.textContent = `${dashed}: dashed, and left out of the scale of ${metric.title}.`;
    if (varied.length >= MOST_AXES) this.says.textContent += ` ${varied.length - MOST_AXES + 1} more parameters are left out.`;
    this.paint();
  }

  way(trial) {
    const points = this.axes.map(({ column, scale, x }) => {
      const place = scale.at(column.of(trial));
      const height = place === null ? null : Math.min(1, Math.max(0, place));
      return `${x.toFixed(1)} ${(height === null ? TALL - BOTTOM + 14 : this.y(height)).toFixed(1)}`;
    });
    return `M${points.join("L")}`;
  }

  y(place) {
    return TALL - BOTTOM - place * (TALL - BOTTOM - TOP);
  }

  axis(axis) {
    const { column, scale, x } = axis;
    const group = svg("g", { class: "axis", tabindex: 0, role: "group",
      "aria-label": `${column.title}: arrows move a range, Escape clears it` });
    group.append(svg("line", { class: "axis-line", x1: x, x2: x, y1: TOP, y2: TALL - BOTTOM }));
    const isLast = axis === this.axes.at(-1);
    const letters = this.letters + ([5, -4][this.axes.length - 1 - this.axes.indexOf(axis)] ?? 0); // the last one has room
    group.append(svg("text", { class: "axis-title", x: isLast ? x + SIDE - 4 : x, y: 16, "text-anchor": isLast ? "end" : "middle" },
      column.title.length > letters ? `${column.title.slice(0, letters - 1)}…` : column.title));
    for (const [place, label] of scale.ticks) {
      const y = this.y(place);
      group.append(svg("line", { class: "axis-line", x1: x - 4, x2: x, y1: y, y2: y }));
      group.append(svg("text", { class: "tick-label on-lines", x: x - 7, y: y + 4, "text-anchor": "end" }, label.slice(0, 9)));
    }
    axis.rect = svg("rect", { class: "brush", x: x - 9, width: 18, rx: 3, y: 0, height: 0, visibility: "hidden" });
    const hit = svg("rect", { class: "hit", x: x - 16, width: 32, y: TOP - 8, height: TALL - BOTTOM - TOP + 16 });
    group.append(axis.rect, hit);
    hit.addEventListener("pointerdown", (event) => this.drag(event, column.id, hit));
    group.addEventListener("keydown", (event) => this.onKey(event, column.id));
    return group;
  }

  drag(down, id, hit) {
    down.preventDefault();
    hit.setPointerCapture(down.pointerId);
    const placeOf = (event) => {
      const y = event.clientY - this.canvas.getBoundingClientRect().top;
      return Math.min(1, Math.max(0, (TALL - BOTTOM - y) / (TALL - BOTTOM - TOP)));
    };
    const start = placeOf(down);
    this.brushes.delete(id);
    const move = (event) => {
      const now = placeOf(event);
      if (Math.abs(now - start) > 0.015) this.brush(id, Math.min(start, now), Math.max(start, now));
    };
    const end = () => {
      hit.removeEventListener("pointermove", move);
      this.brushed();
    };
    hit.addEventListener("pointermove", move);
    hit.addEventListener("pointerup", end, { once: true });
    hit.addEventListener("pointercancel", end, { once: true });
  }

  brush(id, from, to) {
    this.brushes.set(id, { from, to });
    this.brushed();
  }

  onKey(event, id) {
    const step = { ArrowUp: 0.125, ArrowDown: -0.125 }[event.key];
    const { from, to } = this.brushes.get(id) ?? { from: 0.375, to: 0.625 };
    if (step) {
      const by = Math.min(1 - to, Math.max(-from, step));
      this.brush(id, from + by, to + by);
    } else if (event.key === "Escape" && this.brushes.has(id)) {
      this.brushes.delete(id);
      this.brushed();
    } else return;
    event.preventDefault();
  }

  unbrush() {
    this.brushes.clear();
    this.brushed();
  }

  onMetric() {
    this.draw();
    this.asks.brushed();
  }

  brushed() {
    this.paint();
    this.asks.brushed();
  }

  // Shows ranges, and which lines are in them and picked, without drawing anew.
  paint() {
    this.clear.hidden = this.brushes.size === 0;
    for (const { column, rect } of this.axes) {
      const brush = this.brushes.get(column.id);
      rect.setAttribute("visibility", brush ? "visible" : "hidden");
      if (!brush) continue;
      rect.setAttribute("y", this.y(brush.to));
      rect.setAttribute("height", this.y(brush.from) - this.y(brush.to));
    }
    for (const { trial, item } of this.lines) {
      item.classList.toggle("dim", !this.passes(trial));
      item.classList.toggle("picked", this.asks.isPicked(trial.key));
    }
  }
}

function isVaried(column, trials) {
  const values = new Set();
  for (const trial of trials) {
    values.add(column.of(trial));
    if (values.size > 1) return true;
  }
  return false;
}
