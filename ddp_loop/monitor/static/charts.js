// One picture per metric: the curves of all shown runs over their steps, and the points of evaluations.

import { grouped, named, number } from "./words.js";

const uPlot = globalThis.uPlot;
const FEW = 3; // runs whose values fit above a chart
const TALL = 280, LOW = 190, APART = 22; // pixels: heights, and from one epoch's mark to the next
const FOLLOWED = ["mousemove", "mouseleave"]; // with more events, dragging in one picture would zoom all
const FILTERS = { pub: (type) => FOLLOWED.includes(type), sub: (type) => FOLLOWED.includes(type) };
const OWN_GROUPS = { loss: "Loss", learning_rate: "Optimizer", gradient_norm: "Optimizer", weight: "Steps",
  skipped: "Steps", unused_samples: "Steps", unused_samples_at_least: "Steps", samples: null };

export function groupOf(name) {
  if (Object.hasOwn(OWN_GROUPS, name)) return OWN_GROUPS[name];
  const place = name.indexOf("/");
  return place > 0 ? named(name.slice(0, place)) : "Metrics";
}

// A value by a name from a run's files, which may be that of a property that every object has.
function own(values, name) {
  return values && Object.hasOwn(values, name) ? values[name] : undefined;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  constructor(name, template, asks) {
    this.name = name;
    this.asks = asks; // zoom(first, last), view(), point(key), pointed()
    this.figure = template.content.firstElementChild.cloneNode(true);
    this.figure.dataset.metric = name;
    this.figure.querySelector(".title").textContent = named(name);
    this.values = this.figure.querySelector(".values");
    this.holder = this.figure.querySelector(".plot");
    this.height = name === "loss" ? TALL : LOW;
    if (name === "loss") this.figure.classList.add("wide");
    this.form = "";
    this.pointed = this.standing = null; // the key of the run whose curves are to stand out, and do
    this.figure.addEventListener("keydown", (event) => this.onKey(event));
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

  // runs: [{key, name, colour, dash, curves}], curves as the monitor sends them.
  show(runs, { log, marks }) {
    this.log = log;
    const marked = runs.find(({ key }) => key === this.asks.pointed()) ?? runs[0];
    this.marks = marks ? (marked?.curves.epochs ?? []) : [];
    this.runs = runs;
    this.lines = [];
    const tables = [];
    for (const run of runs) {
      const { x, evaluated_x: at } = run.curves;
      const [curve, smooth, evaluated, logged] = ["curves", "smoothed", "evaluated", "logged"].map((of) => own(run.curves[of], this.name));
      if (curve) {
        tables.push([x, this.drawable(curve), ...(smooth ? [this.drawable(smooth)] : [])]);
        this.lines.push({ run, kind: smooth ? "faint" : "line", single: x.length < 2 });
        if (smooth) this.lines.push({ run, kind: "smooth", single: x.length < 2 });
      }
      if (evaluated) {
        tables.push([at, this.drawable(evaluated)]);
        this.lines.push({ run, kind: "evaluated" });
      }
      if (logged) { // beside a curve of the same name as points
        tables.push([logged[0], this.drawable(logged[1])]);
        this.lines.push(curve || evaluated ? { run, kind: "evaluated", logged: true } : { run, kind: "line", single: logged[0].length < 2 });
      }
    }
    const data = tables.length ? uPlot.join(tables) : [[]];
    const form = JSON.stringify([log, this.lines.map(({ run, kind, single }) => [run.colour, run.dash.length, kind, single])]);
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
        this.plot.setScale("x", { min: first, max: Math.max(last, first + 1) });
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
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, sync: { key: "steps", filters: FILTERS },
        points: { size: 6 }, focus: { prox: -1 } },
      scales: {
        x: { time: false, range: (_, low, high) => this.asks.view() ?? [low ?? 0, Math.max(high ?? 1, (low ?? 0) + 1)] },
        y: this.log ? { distr: 3 } : {},
      },
      axes: [
        { ...axis, grid: { show: false }, size: 26, values: (_, ticks) => ticks.map((one) => (Number.isInteger(one) ? grouped(one) : "")) },
        { ...axis, grid: inside, size: 54, values: (_, ticks) => ticks.map((one) => (one === null ? "" : number(one))) },
      ],
      series: [{}, ...this.lines.map((line) => series(line))],
      hooks: {
        drawClear: [(plot) => this.drawMarks(plot)],
        setCursor: [() => this.tell()],
        setSelect: [(plot) => this.onSelect(plot)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.asks.zoom(null))],
      },
    };
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = colour("--mark");
    ctx.fillStyle = colour("--quiet");
    ctx.font = `${10 * scale}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.lineWidth = scale;
    ctx.setLineDash([2 * scale, 3 * scale]);
    const places = this.marks.map(([, step]) => Math.round(plot.valToPos(step, "x", true)));
    const gap = (places.at(-1) - places[0]) / Math.max(1, places.length - 1) || Infinity;
    const lines = Math.ceil((APART * scale) / gap) || 1; // epochs per mark
    this.marks.forEach(([epoch], at) => {
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
    if (!this.plot) return;
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

  // The values at the cursor, or the last ones; of many runs only those of the one that is pointed at.
  tell() {
    const { plot } = this;
    if (!plot) return;
    const x = plot.data[0];
    const there = plot.cursor.idx < x.length ? (plot.cursor.idx ?? null) : null; // a zoom may have left fewer steps
    const parts = [];
    let said = "";
    const many = this.runs.length > FEW;
    const near = many ? this.nearest() : null;
    if (near) this.asks.point(near);
    const pointed = many ? this.asks.pointed() : null;
    if (many && !pointed) {
      const part = Object.assign(document.createElement("span"), { textContent: `${this.runs.length} runs` });
      parts.push(part);
      said = `, ${part.textContent}`;
    }
    this.lines.forEach((line, place) => {
      if (line.kind === "faint" || (many && line.run.key !== pointed)) return;
      const values = plot.data[place + 1];
      let at = there ?? x.length - 1;
      while (at >= 0 && values[at] === undefined) at -= 1;
      if (at < 0) return;
      const part = document.createElement("span");
      part.className = line.kind;
      part.style.setProperty("--run", line.run.colour);
      part.textContent = many && line.kind !== "evaluated" ? `${line.run.name}: ${number(values[at])}` : number(values[at]);
      part.title = line.kind === "evaluated" ? `${line.run.name}, ${line.logged ? "logged" : "evaluated"}` : line.run.name;
      parts.push(part);
      said += `, ${part.title}: ${number(values[at])}`;
    });
    const step = document.createElement("span");
    step.className = "step";
    step.textContent = x.length ? `step ${grouped(x[there ?? x.length - 1])}` : "no rows";
    this.values.replaceChildren(...parts, step);
    this.figure.setAttribute("aria-label", `${named(this.name)}${said}, ${step.textContent}`);
    const drawn = plot.data.slice(1).map((values) => values.findLastIndex((value) => value !== undefined));
    this.figure.dataset.last = JSON.stringify(
      drawn.map((at, line) => (at < 0 ? null : [x[at], plot.data[line + 1][at]])),
    );
    this.figure.dataset.scale = plot.scales.y.distr === 3 ? "log" : "linear";
    this.figure.dataset.points = String(x.length);
    this.figure.dataset.standing = this.standing ?? "";
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
