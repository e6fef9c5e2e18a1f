// Processor, memory and GPU of a run's ranks: a small chart for each measure, with a line for each rank.

import { colour } from "./charts.js";
import { html } from "./trials.js";
import { duration, memory, number } from "./words.js";

const uPlot = globalThis.uPlot;
const BETWEEN_MS = 5000; // ranks write a line every 5 s
const HEIGHT = 130, COLOURS = 20, NAMED = 8; // pixels; colours in page.css; ranks with their values above a chart
const MEASURES = [
  ["processor_percent", "Processor, % of one core", (value) => `${number(Math.round(value))} %`],
  ["memory_mib", "Memory", memory],
  ["gpu_percent", "GPU, %", (value) => `${number(Math.round(value))} %`],
  ["gpu_memory_mib", "GPU memory", memory],
];

export class Usage {
  // asks: wire
  constructor(place, asks) {
    this.asks = asks;
    this.key = null;
    this.place = place;
    this.charts = new Map(); // measure -> {figure, holder, values, plot, form}
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(key, _, isUnderWay) {
    const isOther = key !== this.key;
    this.key = key;
    this.isUnderWay = isUnderWay;
    if (isOther) this.clear();
    if (isOther || !this.later) this.read();
  }

  hide() {
    this.key = null;
    clearTimeout(this.later);
    this.later = null;
    this.clear();
  }

  clear() {
    for (const { plot } of this.charts.values()) plot?.destroy();
    this.charts.clear();
    this.place.replaceChildren();
    this.ranks = [];
  }

  async read() {
    clearTimeout(this.later);
    this.later = null;
    const { key } = this;
    let isBehind = false;
    try {
      if (!document.hidden) {
        const found = await this.asks.wire.read(`/api/runs/${encodeURIComponent(key)}/usage`);
        if (key !== this.key) return;
        this.ranks = found.ranks.filter((rank) => rank.elapsed_s.length);
        isBehind = found.is_behind;
        this.draw();
      }
    } catch {
      // The stream reports the monitor's state.
    }
    if (key === this.key && (isBehind || this.isUnderWay)) {
      this.later ??= setTimeout(() => this.read(), isBehind ? 0 : BETWEEN_MS);
    }
  }

  draw() {
    for (const [measure, title, says] of MEASURES) {
      const ranks = this.ranks.filter((rank) => rank[measure]);
      if (!ranks.length) continue;
      let chart = this.charts.get(measure);
      if (!chart) {
        const values = html("span", { className: "values" }), holder = html("div", { className: "plot" });
        const head = html("figcaption", {}, html("span", { className: "title", textContent: title }), values);
        chart = { values, holder, figure: html("figure", { className: "usage-chart" }, head, holder), form: "" };
        chart.figure.dataset.measure = measure;
        this.charts.set(measure, chart);
        this.place.append(chart.figure);
      }
      this.drawOne(chart, ranks, measure, says);
    }
  }

  drawOne(chart, ranks, measure, says) {
    const data = uPlot.join(ranks.map((rank) => [rank.elapsed_s, rank[measure]]));
    const colours = ranks.map(({ rank }) => colour(`--run-${rank % COLOURS}`));
    const form = JSON.stringify([colours, colour("--line")]);
    if (form !== chart.form) {
      chart.form = form;
      chart.plot?.destroy();
      chart.plot = new uPlot(options(chart.holder.clientWidth || 280, colours, says), data, chart.holder);
    } else {
      chart.plot.setData(data);
    }
    const tell = () => {
      const at = chart.plot?.cursor.idx ?? data[0].length - 1;
      const parts = ranks.slice(0, NAMED).map(({ rank }, line) => {
        const value = valueAt(data[line + 1], at);
        const part = html("span", { className: "line", textContent: `rank ${rank}: ${value === null ? "–" : says(value)}` });
        part.style.setProperty("--run", colours[line]);
        return part;
      });
      if (ranks.length > NAMED) parts.push(html("span", { textContent: `and ${ranks.length - NAMED} more ranks` }));
      chart.values.replaceChildren(...parts, html("span", { className: "step", textContent: duration(data[0][at] ?? 0) }));
    };
    chart.plot.tell = tell;
    chart.figure.dataset.points = String(data[0].length);
    tell();
  }

  fit() {
    for (const { plot, holder } of this.charts.values()) {
      const width = holder.clientWidth;
      if (plot && width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }
}

function valueAt(values, at) {
  let place = at;
  while (place >= 0 && (values[place] === undefined || values[place] === null)) place -= 1;
  return place < 0 ? null : values[place];
}

function options(width, colours, says) {
  const axis = { stroke: colour("--quiet"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  return {
    width, height: HEIGHT, legend: { show: false }, padding: [6, 14, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(1, 1.05 * (high ?? 1))] } },
    axes: [
      { ...axis, grid: { show: false }, size: 24, values: (_, ticks) => ticks.map(duration) },
      { ...axis, grid: { stroke: colour("--line"), width: 1 }, size: 64, values: (_, ticks) => ticks.map(says) },
    ],
    series: [{}, ...colours.map((stroke) => ({ stroke, width: 1.5, spanGaps: true, points: { show: false } }))],
    hooks: { setCursor: [(plot) => plot.tell?.()] },
  };
}
