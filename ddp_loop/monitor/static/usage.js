// Processor, memory and GPU of a run's ranks: a chart for each measure, with a line for each rank.

import { Chart, colour } from "./charts.js";
import { memory, number } from "./words.js";

const BETWEEN_MS = 5000; // ranks write a line every 5 s
const COLOURS = 20; // in page.css
const percent = (value) => `${number(Math.round(value))} %`;
const MEASURES = [
  ["processor_percent", "Processor, % of one core", percent],
  ["memory_mib", "Memory", memory],
  ["gpu_percent", "GPU, %", percent],
  ["gpu_memory_mib", "GPU memory", memory],
];

export class Usage {
  // asks: wire
  constructor(place, asks) {
    this.asks = asks;
    this.key = null;
    this.place = place;
    this.charts = new Map(); // measure -> Chart
    this.ranks = [];
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
    for (const chart of this.charts.values()) chart.remove();
    this.charts.clear();
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
      const lines = this.ranks.filter((rank) => rank[measure]).map((rank) => lineOf(measure, rank));
      if (lines.length) this.chart(measure, { title, says }).show(lines, { log: false, axis: "time", marks: false });
    }
  }

  chart(measure, how) {
    if (!this.charts.has(measure)) {
      let pointed = null;
      const point = (key) => {
        if (key === pointed) return;
        pointed = key;
        chart.tell();
      };
      const asks = { zoom() {}, view: () => null, point, pointed: () => pointed };
      const chart = new Chart(measure, document.getElementById("chart"), asks, { ...how, what: "ranks" });
      this.charts.set(measure, chart);
      this.place.append(chart.figure);
      chart.isNear = true;
    }
    return this.charts.get(measure);
  }
}

// The use of a rank, as a chart has the curves of a run.
function lineOf(measure, { rank, elapsed_s: x, [measure]: values }) {
  const curves = { axis: "time", x, steps: x, curves: { [measure]: values } };
  return { key: rank, name: `rank ${rank}`, colour: colour(`--run-${rank % COLOURS}`), dash: [], parts: new Map([[measure, { curves }]]) };
}
