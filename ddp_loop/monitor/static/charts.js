// One picture per metric: the curves of all shown runs over their steps, and the points of evaluations.

import { axisOf, linesOf, nearestTo } from "./axis.js";
import { savePng } from "./downloads.js";
import { Tip } from "./legend.js";
import { grouped, named, number } from "./words.js";

const uPlot = globalThis.uPlot;
const FEW = 3; // runs whose values fit above a chart
const TALL = 280, LOW = 190, APART = 22; // pixels: heights, and from one epoch's mark to the next
const FOLLOWED = ["mousemove", "mouseleave"]; // with more events, dragging in one picture would zoom all
const FILTERS = { pub: (type) => FOLLOWED.includes(type), sub: (type) => FOLLOWED.includes(type) };
const OWN_GROUPS = { loss: "Loss", learning_rate: "Optimizer", gradient_norm: "Optimizer", weight: "Steps",
  skipped: "Steps", unused_samples: "Steps", unused_samples_at_least: "Steps", samples: null };

export function groupOf(name) {
  const first = name.replace(/^loss_\d+_weight$/, "weight").replace(/_\d+$/, ""); // loss_2 is of a step's second pass
  for (const one of [name, first]) if (Object.hasOwn(OWN_GROUPS, one)) return OWN_GROUPS[one];
  const place = name.indexOf("/");
  return place > 0 ? named(name.slice(0, place)) : "Metrics";
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  // title: above the chart; says(value): a value as text; what: the lines are, runs or ranks
  constructor(name, template, asks, { title = named(name), says = number, what = "runs" } = {}) {
    Object.assign(this, { name, title, says, what });
    this.asks = asks; // zoom(first, last), view(), point(key), pointed(), save(runs), turn()
    this.figure = template.content.firstElementChild.cloneNode(true);
    this.figure.dataset.metric = name;
    this.figure.querySelector(".title").textContent = title;
    for (const button of this.figure.querySelectorAll(".csv, .log")) button.hidden = what !== "runs";
    this.figure.querySelector(".title").title = name;
    this.values = this.figure.querySelector(".values");
    this.holder = this.figure.querySelector(".plot");
    this.height = name === "loss" ? TALL : LOW;
    if (name === "loss") this.figure.classList.add("wide");
    this.holder.style.minHeight = `${this.height}px`; // also before it is drawn
    this.tip = new Tip(this.holder);
    this.form = "";
    this.isNear = false; // to what is seen of the page
    this.wanted = null; // draws what has come since
    this.runs = [];
    this.pointed = this.standing = null; // the key of the run whose curves are to stand out, and do
    this.figure.addEventListener("keydown", (event) => this.onKey(event));
    for (const [kind, act] of [["csv", () => this.asks.save(this.drawnRuns())], ["png", () => this.savePicture()]]) {
      const button = this.figure.querySelector(`.${kind}`);
      button.setAttribute("aria-label", `Save ${name} as ${kind.toUpperCase()}`);
      button.addEventListener("click", async () => {
        button.disabled = true;
        await act();
        button.disabled = false;
      });
    }
    this.scale = this.figure.querySelector(".log");
    this.scale.setAttribute("aria-label", `log scale of ${name}`);
    this.scale.addEventListener("click", () => this.asks.turn());
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(this.holder);
  }

  remove() {
    this.sizes.disconnect();
    this.plot?.destroy();
    this.figure.remove();
  }

  fit() {
    const width = this.holder.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  // Draws what has come since the last time.
  draw() {
    const { wanted } = this;
    this.wanted = null;
    wanted?.();
    this.point(this.pointed);
  }

  savePicture() {
    const runs = this.runs.length > 1 ? this.drawnRuns() : [];
    savePng(this.name, this.title, runs, this.plot.ctx.canvas, { ground: colour("--card"), ink: colour("--ink") });
  }

  // The runs that have this metric.
  drawnRuns() {
    return [...new Set(this.lines.map(({ run }) => run))];
  }

  // runs: [{key, name, colour, dash, curves}], curves as the monitor sends them, parts: metric -> {curves} with that metric.
  show(runs, { log, axis, marks }) {
    this.log = log;
    this.scale.setAttribute("aria-pressed", String(log));
    this.axis = axisOf(axis);
    this.hasMarks = marks;
    this.runs = runs;
    this.lines = runs.flatMap((run) => {
      const part = run.parts.get(this.name)?.curves;
      const lines = part?.axis === axis ? linesOf(part, this.name) : [];
      return lines.map((line) => ({ ...line, run, single: line.x.length < 2 }));
    });
    const tables = this.lines.map(({ x, y }) => [x, this.drawable(y)]);
    const data = tables.length ? uPlot.join(tables) : [[]];
    const form = JSON.stringify([log, axis, this.lines.map(({ run, kind, single }) => [run.colour, run.dash.length, kind, single])]);
    if (form !== this.form) {
      this.form = form;
      this.standing = null;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), data, this.holder);
      this.point(this.pointed);
    } else {
      this.plot.setData(data, false);
      this.plot.batch(() => {
        const [first, last] = this.asks.view() ?? [data[0][0] ?? 0, data[0].at(-1) ?? 1];
        this.plot.setScale("x", { min: first, max: Math.max(last, first + this.axis.least) });
      });
    }
    this.tell();
  }

  // A logarithmic scale cannot show 0 and below.
  drawable(values) {
    return this.log ? values.map((value) => (value > 0 ? value : null)) : values;
  }

  options() {
    const [ink, grid] = [colour("--quiet"), colour("--line")];
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", ticks: { show: false } };
    const inside = { stroke: grid, width: 1, filter: (plot, splits) => (this.log ? decades(plot, splits) : splits) };
    return {
      width: this.holder.clientWidth || 300,
      height: this.height,
      legend: { show: false },
      padding: [8, 22, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, sync: { key: this.what, filters: FILTERS },
        points: { size: 6 }, focus: { prox: -1 } },
      scales: {
        x: { time: false, range: (_, low, high) => this.asks.view() ?? [low ?? 0, Math.max(high ?? 1, (low ?? 0) + this.axis.least)] },
        y: this.log ? { distr: 3 } : this.what === "runs" ? {} : { range: (_, low, high) => [0, Math.max(1, 1.05 * (high ?? 1))] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 26, values: (_, ticks) => ticks.map((one) => this.axis.tick(one)) },
        { ...axis, grid: inside, size: this.what === "runs" ? 54 : 66, values: (_, ticks) => ticks.map((one) => (one === null ? "" : this.says(one))) },
      ],
      series: [{}, ...this.lines.map((line) => series(line))],
      hooks: {
        drawClear: [(plot) => this.drawMarks(plot)],
        draw: [(plot) => this.drawEnds(plot)],
        setCursor: [() => this.tell()],
        setSelect: [(plot) => this.onSelect(plot)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.asks.zoom(null))],
      },
    };
  }

  // The epochs of the few runs that are drawn, in their colours where they differ; of many, those of one.
  drawMarks(plot) {
    if (!this.hasMarks || !this.runs.length) return;
    const one = this.runs.find(({ key }) => key === this.standing) ?? this.runs[0];
    const of = this.runs.length > FEW || this.standing !== null ? [one] : this.runs;
    const kinds = new Map(); // the marks as JSON -> the first run that has them
    for (const run of of) {
      const form = JSON.stringify(run.curves.epochs);
      if (!kinds.has(form)) kinds.set(form, run);
    }
    const isCommon = kinds.size === 1 && of.length === this.runs.length;
    for (const run of kinds.values()) this.drawMarksOf(plot, run.curves.epochs, isCommon ? null : run.colour);
    this.figure.dataset.marked = JSON.stringify([...kinds.values()].map(({ key }) => key));
  }

  drawMarksOf(plot, marks, own) {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = own ?? colour("--mark");
    ctx.globalAlpha = own === null ? 1 : 0.55;
    ctx.fillStyle = own ?? colour("--quiet");
    ctx.font = `${10 * scale}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.lineWidth = scale;
    ctx.setLineDash([2 * scale, 3 * scale]);
    const places = marks.map(([, place]) => Math.round(plot.valToPos(place, "x", true)));
    const gap = (places.at(-1) - places[0]) / Math.max(1, places.length - 1) || Infinity;
    const lines = Math.ceil((APART * scale) / gap) || 1; // epochs per mark
    marks.forEach(([epoch], at) => {
      const left = places[at];
      if ((at + 1) % lines || left <= bbox.left || left > bbox.left + bbox.width) return;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      if (this.height === TALL) ctx.fillText(epoch, left - 3 * scale, bbox.top + 10 * scale);
    });
    ctx.restore();
  }

  // A cross where a curve stopped being finite, at the height of its last value.
  drawEnds(plot) {
    const { ctx, bbox } = plot, scale = devicePixelRatio;
    const ended = this.lines.filter(({ end, kind }) => end && kind !== "faint");
    ctx.save();
    ctx.lineWidth = 2 * scale;
    for (const { run, x, y, end: [place] } of ended) {
      const value = this.drawable(y).findLast((one, at) => x[at] < place && one !== null);
      const left = plot.valToPos(place, "x", true), size = 5 * scale;
      const top = value === undefined ? bbox.top + bbox.height - 2 * size : plot.valToPos(value, "y", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.strokeStyle = run.colour;
      ctx.beginPath();
      for (const side of [-size, size]) {
        ctx.moveTo(left - size, top - side);
        ctx.lineTo(left + size, top + side);
      }
      ctx.stroke();
    }
    ctx.restore();
    this.figure.dataset.ends = JSON.stringify(ended.map(({ run, end }) => [run.key, end[1]]));
  }

  onSelect(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.asks.zoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    if (width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  onKey(event) {
    const { plot } = this;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const x = plot.data[0];
    if (!x.length) return;
    const at = Math.min(plot.cursor.idx ?? x.length - 1, x.length - 1);
    const jump = Math.max(1, Math.round(x.length / (event.shiftKey ? 10 : 100)));
    const places = { ArrowLeft: at - jump, ArrowRight: at + jump, Home: 0, End: x.length - 1 };
    const { min, max } = plot.scales.x;
    if (event.key in places) {
      const place = Math.max(0, Math.min(x.length - 1, places[event.key]));
      plot.setCursor({ left: plot.valToPos(x[place], "x"), top: 10 });
    } else if (this.runs.length > FEW && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      const there = this.runs.findIndex(({ key }) => key === this.asks.pointed());
      const step = event.key === "ArrowUp" ? -1 : 1;
      this.asks.point(this.runs.at((there + step + (there < 0 && step < 0 ? 1 : 0)) % this.runs.length).key, true);
    } else if (event.key === "+" || event.key === "=") {
      const middle = x[at] ?? (min + max) / 2, width = (max - min) / 4;
      this.asks.zoom(middle - width, middle + width);
    } else if (event.key === "-") {
      this.asks.zoom(min - (max - min) / 2, max + (max - min) / 2);
    } else if (event.key === "0" || event.key === "Escape") {
      this.asks.zoom(null);
    } else return;
    event.preventDefault();
  }

  // Lets a run's curves stand out; none for null.
  point(key) {
    this.pointed = key;
    if (!this.plot || !this.isNear) return;
    if (this.standing !== key) {
      this.standing = key;
      this.plot.series.slice(1).forEach((one, place) => {
        const line = this.lines[place], usual = series(line), is = line.run.key === key;
        one.alpha = key === null || is ? usual.alpha : 0.15 * usual.alpha;
        one.width = is && usual.width ? usual.width + 1 : usual.width;
      });
      this.plot.redraw(false);
    }
    this.tell();
  }

  // The run whose curve is nearest to the cursor, if the mouse is in this chart.
  nearest() {
    const { plot } = this;
    const { idx, top } = plot.cursor;
    if (idx === null || idx === undefined || !plot.over.matches(":hover")) return null;
    let least = Infinity, found = null;
    this.lines.forEach(({ run, kind }, place) => {
      const value = plot.data[place + 1][idx];
      if (kind === "evaluated" || value === null || value === undefined) return;
      const away = Math.abs(plot.valToPos(value, "y") - top);
      if (away < least) [least, found] = [away, run.key];
    });
    return found;
  }

  // The value of each line that is nearest to the cursor, with its own step where that is another one; without a
  // cursor the last ones. Above the chart, of many runs, only those of the one that is pointed at.
  tell() {
    const { plot } = this;
    if (!plot) return;
    const x = plot.data[0];
    const there = plot.cursor.idx < x.length ? (plot.cursor.idx ?? null) : null; // a zoom may have left fewer steps
    const place = x.length ? x[there ?? x.length - 1] : null;
    const many = this.runs.length > FEW;
    const isUnder = there !== null && plot.over.matches(":hover");
    const near = many ? this.nearest() : null;
    if (near) this.asks.point(near);
    const pointed = many ? this.asks.pointed() : null;
    const values = place === null ? [] : this.lines.filter(({ kind }) => kind !== "faint").flatMap((line) => this.valueAt(line, place));
    const parts = [];
    let said = "";
    if (many && !pointed) {
      const part = Object.assign(document.createElement("span"), { textContent: `${this.runs.length} ${this.what}` });
      parts.push(part);
      said = `, ${part.textContent}`;
    }
    for (const { line, value, step, text } of values) {
      if (many && line.run.key !== pointed) continue;
      const part = document.createElement("span");
      part.className = line.kind;
      part.style.setProperty("--run", line.run.colour);
      const isNamed = (many && line.kind !== "evaluated") || this.what === "ranks";
      part.textContent = `${isNamed ? `${line.run.name}: ` : ""}${text}`;
      part.title = line.kind === "evaluated" ? `${line.run.name}, ${line.isLogged ? "logged" : "evaluated"}` : line.run.name;
      part.dataset.step = step;
      parts.push(part);
      said += `, ${part.title}: ${this.said(value)}`;
    }
    const step = document.createElement("span");
    step.className = "step";
    step.textContent = place === null ? "no rows" : this.axis.says(place);
    this.values.replaceChildren(...parts, step);
    this.figure.setAttribute("aria-label", `${this.title}${said}, ${step.textContent}`);
    if (isUnder && this.runs.length > 1) {
      const rows = values.map(({ line: { run, kind }, value, ownStep }) => (
        { name: run.name, colour: run.colour, kind, value, text: this.said(value), step: ownStep, isNear: run.key === (near ?? pointed) }));
      this.tip.show(step.textContent, rows, plot.cursor.left);
    } else this.tip.hide();
    this.figure.dataset.last = JSON.stringify(this.lines.map(({ x: places, y }) => (y.length ? [places.at(-1), y.at(-1)] : null)));
    this.figure.dataset.scale = plot.scales.y.distr === 3 ? "log" : "linear";
    this.figure.dataset.points = String(x.length);
    this.figure.dataset.standing = this.standing ?? "";
  }

  // The value of a line nearest to a place on the axis: none, or one.
  valueAt(line, place) {
    const at = nearestTo(line.x, place);
    if (at < 0) return [];
    const step = line.steps[at], value = line.y[at] ?? (step >= line.end?.[1] ? NaN : null);
    const ownStep = this.what === "runs" ? `step ${grouped(step)}` : this.axis.says(step);
    const text = this.said(value);
    return [{ line, value, step, ownStep, text: ownStep === this.axis.says(place) ? text : `${text} (${ownStep})` }];
  }

  said(value) {
    return Number.isFinite(value) ? this.says(value) : number(value);
  }
}

// On a logarithmic scale over several decades, label the powers of ten only.
function decades(plot, splits) {
  const { min, max } = plot.scales.y;
  if (!(max / min > 100)) return splits;
  return splits.map((one) => (Math.abs(Math.log10(one) - Math.round(Math.log10(one))) < 1e-9 ? one : null));
}

function series({ run, kind, single }) {
  if (kind === "evaluated") {
    const points = { show: true, size: 8, width: 2, stroke: run.colour, fill: colour("--card") };
    return { stroke: run.colour, alpha: 1, width: 0, paths: () => null, points };
  }
  const faint = kind === "faint";
  return {
    stroke: run.colour,
    alpha: faint ? 0.28 : 1,
    dash: run.dash,
    width: faint ? 1 : kind === "smooth" ? 2 : 1.5,
    points: { show: single, size: 6, fill: run.colour },
  };
}
