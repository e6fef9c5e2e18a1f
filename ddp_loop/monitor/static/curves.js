// Which curves are drawn, in which colours: requests them, and has the charts draw them in groups.

import { axisOf } from "./axis.js";
import { Chart, groupOf } from "./charts.js";
import { saveCsv } from "./downloads.js";
import { isUnderWay, write } from "./words.js";

const element = (id) => document.getElementById(id);
const GROUPS = ["Loss", "Metrics"]; // in this order, before the others
const BETWEEN_MS = 900; // between two requests for the curves of a run
const NEAR = 900; // pixels: charts that are no farther than this from what is seen are drawn
const FIRST = 10, MOST = 50; // runs that are drawn at first, and at most
const COLOURS = 20, DASHES = [[], [8, 4], [2, 3]]; // of runs, in page.css; all colours, then all of them dashed
const PLACES = COLOURS * DASHES.length; // more than MOST
const LONGEST = 12000; // letters of the names in a request; all metrics are requested where they are more
const ALL_POINTS = 12000; // of a metric, over all runs

export class Curves {
  // asks: wire, template, changed(), notice(text), legend, isHidden(summary)
  constructor(asks) {
    this.asks = asks;
    this.runs = new Map(); // key -> {key, summary, curves, parts, asked, reading, read}; parts: metric -> {asks, curves}
    this.chosen = new Set();
    this.opened = null; // the run of the open card, which is drawn too
    this.places = new Map(); // key -> place among the colours, of the runs that are drawn
    this.isOwnChoice = false;
    this.charts = new Map(); // metric -> Chart
    this.pointed = null; // the key of the run whose values the captions show, of many
    this.took = 0; // ms to draw the charts
    this.zoomed = null; // [first, last] on the axis, or all
    this.turned = new Set(); // metrics that are drawn on the other scale than the rest
    this.near = new IntersectionObserver((seen) => this.onSeen(seen), { rootMargin: `${NEAR}px` });
    element("smoothing").addEventListener("change", () => this.read());
    element("axis").addEventListener("change", () => this.zoom(null));
    element("marks").addEventListener("change", () => this.draw());
    element("whole").addEventListener("click", () => this.zoom(null));
    for (const one of document.querySelectorAll("[name=scale]")) {
      one.addEventListener("change", () => {
        this.turned.clear();
        this.draw();
      });
    }
    document.addEventListener("visibilitychange", () => this.read());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of this.charts.values()) chart.form = "";
      this.draw();
    });
  }

  // -- choice -----------------------------------------------------------------------------------------------

  take(all, changed) {
    let isOther = false, isNamed = false;
    for (const key of this.runs.keys()) {
      if (all.has(key)) continue;
      this.runs.delete(key);
      this.chosen.delete(key);
      isOther = true;
    }
    for (const summary of changed) {
      const run = this.runs.get(summary.key);
      isOther ||= !run || isUnderWay(run.summary) !== isUnderWay(summary);
      isNamed ||= run && run.summary.name !== summary.name;
      if (run) run.summary = summary;
      else this.runs.set(summary.key, { key: summary.key, summary, curves: null, parts: new Map(), asked: "", reading: false, read: 0 });
    }
    if (isOther && !this.isOwnChoice) this.chosen = new Set(this.usual());
    if (isOther) this.onChosen();
    else {
      if (isNamed) this.draw();
      this.read();
    }
  }

  // Runs that are under way, and then the newest ones.
  usual() {
    const order = [...this.runs.values()].filter(({ summary }) => !this.asks.isHidden(summary)).sort(({ summary: one }, { summary: other }) =>
      isUnderWay(other) - isUnderWay(one) || (other.began ?? 0) - (one.began ?? 0));
    const few = new Set(order.slice(0, FIRST).map(({ key }) => key));
    return [...this.runs.keys()].filter((key) => few.has(key));
  }

  choose(key, on) {
    this.isOwnChoice = true;
    if (on) this.chosen.add(key);
    else this.chosen.delete(key);
    this.onChosen();
  }

  // A hidden run is not drawn; one that is shown again is, if the user has not chosen others.
  hide(key, on) {
    if (!this.isOwnChoice) this.chosen = new Set(this.usual());
    else if (on) this.chosen.delete(key);
    this.onChosen();
  }

  only(keys) {
    this.isOwnChoice = true;
    this.chosen = new Set(keys);
    this.onChosen();
  }

  // Chooses runs before any is drawn.
  preselect(keys) {
    this.isOwnChoice = true;
    this.chosen = new Set(keys);
  }

  // The run whose card is open is drawn for that time, also if its box is not ticked.
  open(key) {
    const before = this.drawn();
    this.opened = key;
    if (this.drawn().some((one) => !before.includes(one)) || this.drawn().length < before.length) this.onChosen();
  }

  drawn() {
    const beside = this.runs.has(this.opened) && !this.chosen.has(this.opened) ? [this.opened] : [];
    return [...beside, ...this.chosen].slice(0, MOST);
  }

  // A run's colour follows from when it began among all runs of the folder, whichever are drawn; of two with the same
  // one, of 60 or more runs, the later one takes the next that is free.
  onChosen() {
    const drawn = this.drawn();
    for (const key of this.places.keys()) {
      if (!drawn.includes(key)) this.places.delete(key);
    }
    const taken = new Set(this.places.values());
    const began = ({ key, summary }) => [summary.began ?? 0, key];
    const order = [...this.runs.values()].map(began).sort(([one, key], [other, second]) => one - other || (key < second ? -1 : 1));
    const ranks = new Map(order.map(([, key], rank) => [key, rank]));
    for (const key of drawn) {
      if (this.places.has(key)) continue;
      let place = ranks.get(key) % PLACES;
      while (taken.has(place)) place = (place + 1) % PLACES;
      taken.add(place);
      this.places.set(key, place);
    }
    const limit = element("limit");
    limit.hidden = this.runs.size < 2 || (drawn.length > 0 && this.chosen.size <= MOST);
    write(limit, this.chosen.size
      ? `The curves of ${MOST} of the ${this.chosen.size} chosen runs are drawn, which is the most.`
      : "No run is chosen. Tick runs in the list to draw their curves.");
    this.draw();
    this.read();
    this.asks.changed();
  }

  // A run's place among the colours; null where it is not drawn.
  place(key) {
    return this.places.get(key) ?? null;
  }

  colour(key) {
    return this.places.has(key) ? `var(--run-${this.places.get(key) % COLOURS})` : null;
  }

  // Gives an element a run's colour, and its kind of line.
  dress(item, key) {
    const place = this.place(key);
    item.style.setProperty("--run", this.colour(key) ?? "var(--mark)");
    item.classList.toggle("drawn", place !== null);
    for (const kind of [1, 2]) item.classList.toggle(`dash-${kind}`, Math.floor((place ?? 0) / COLOURS) === kind);
  }

  // -- requests ---------------------------------------------------------------------------------------------

  wanted({ summary }) {
    const many = Math.round(ALL_POINTS / Math.max(1, this.places.size));
    const points = Math.min(2000, many, Math.max(300, 2 * Math.round(element("groups").clientWidth || 600)));
    const axis = element("axis").value, { parts } = axisOf(axis);
    const [first, last] = this.zoomed ?? [0, 10 ** 12 / parts];
    const asked = new URLSearchParams({
      points, axis, smoothing: element("smoothing").value,
      first: Math.max(0, Math.floor(parts * first)), last: Math.max(0, Math.ceil(parts * last)),
    });
    return { path: `/api/runs/${encodeURIComponent(summary.key)}/curves?${asked}`, version: summary.version };
  }

  // The metrics of the charts that are near, which a run has as far as is known.
  namesNear({ curves }) {
    const names = [...this.charts].filter(([name, chart]) => chart.isNear && (curves?.names.includes(name) ?? true)).map(([name]) => name);
    return names.length || curves ? names : ["loss"];
  }

  // Requests outdated curves, of each run at most about once a second, unless the page is hidden; those that were not
  // near before at once.
  async read() {
    if (document.hidden) return;
    await Promise.all([...this.places.keys()].map((key) => this.readOne(this.runs.get(key))));
  }

  async readOne(run) {
    const { path, version } = this.wanted(run);
    const asks = `${version} ${path}`, isNews = run.asked !== asks;
    const near = this.namesNear(run), wanted = isNews ? near : near.filter((name) => run.parts.get(name)?.asks !== asks);
    if (run.reading || !(isNews || wanted.length)) return;
    const isOther = !isNews || !run.asked.endsWith(path); // the user changed something: request at once
    const wait = run.read + BETWEEN_MS - performance.now();
    if (!isOther && wait > 0) {
      clearTimeout(run.later);
      run.later = setTimeout(() => this.read(), wait);
      return;
    }
    run.reading = true;
    run.read = performance.now();
    let hasCome = false;
    try {
      const metrics = encodeURIComponent(JSON.stringify(wanted));
      const isAll = metrics.length > LONGEST;
      const curves = await this.asks.wire.read(isAll ? path : `${path}&metrics=${metrics}`);
      run.curves = curves;
      run.asked = curves.is_behind ? `? ${path}` : asks;
      for (const name of run.parts.keys()) if (!curves.names.includes(name)) run.parts.delete(name);
      for (const name of isAll ? curves.names : wanted) run.parts.set(name, { asks: run.asked, curves });
      hasCome = true;
      this.drawSoon();
    } catch {
      // The stream reports the monitor's state, and has this called again.
    } finally {
      run.reading = false;
    }
    if (hasCome || this.wanted(run).path !== path) this.read(); // more rows, or a chart that came near meanwhile
  }

  // -- charts -----------------------------------------------------------------------------------------------

  // What came is drawn together with what comes soon, so that drawing takes a fifth of the time at most.
  drawSoon() {
    this.soon ??= setTimeout(() => this.draw(), 4 * this.took);
  }

  draw() {
    clearTimeout(this.soon);
    this.soon = undefined;
    if (element("curves").hidden) return;
    const began = performance.now();
    queueMicrotask(() => { this.took = Math.min(250, performance.now() - began); }); // the charts draw in microtasks
    const style = getComputedStyle(document.documentElement);
    const axis = element("axis").value;
    const there = [...this.places.keys()].map((key) => this.runs.get(key)).filter((run) => run?.curves);
    const shown = there.filter(({ curves }) => curves.axis === axis);
    if (there.length && !shown.length) return; // another axis was chosen, and its curves are on their way
    const names = new Set(shown.flatMap(({ curves }) => curves.names));
    const drawn = shown.map(({ key, summary, curves, parts }) => {
      const place = this.place(key);
      const colour = style.getPropertyValue(`--run-${place % COLOURS}`).trim();
      return { key, name: summary.name, curves, parts, colour, dash: DASHES[Math.floor(place / COLOURS)] };
    });
    for (const [name, chart] of this.charts) {
      if (names.has(name) || !shown.length) continue;
      this.near.unobserve(chart.figure);
      chart.remove();
      this.charts.delete(name);
    }
    for (const name of names) {
      if (this.charts.has(name) || groupOf(name) === null) continue;
      const chart = new Chart(name, this.asks.template, {
        zoom: this.zoom.bind(this), view: () => this.zoomed, point: this.point.bind(this), pointed: () => this.pointed,
        save: (runs) => this.save(name, runs), turn: () => this.turn(name),
      });
      this.charts.set(name, chart);
      const grid = groupElement(groupOf(name)).querySelector(".grid");
      const next = [...grid.children].find((one) => one.dataset.metric > name); // one order, whichever run came first
      grid.insertBefore(chart.figure, next ?? null);
      this.near.observe(chart.figure);
    }
    for (const group of document.querySelectorAll(".group")) {
      if (!group.querySelector(".chart")) group.remove();
    }
    const log = document.querySelector("[name=scale]:checked").value === "log";
    const how = { axis, marks: element("marks").checked };
    for (const chart of this.charts.values()) {
      const hasCome = !this.places.size || drawn.some(({ parts }) => parts.get(chart.name)?.curves.axis === axis);
      chart.wanted = hasCome ? () => chart.show(drawn, { ...how, log: log !== this.turned.has(chart.name) }) : null;
      if (chart.isNear) chart.draw();
    }
    this.asks.legend.show(drawn, this.dress.bind(this));
    element("controls").hidden = this.charts.size === 0;
  }

  // Charts are drawn when they come near what is seen: a run may have 50 metrics.
  onSeen(seen) {
    for (const { target, isIntersecting } of seen) {
      const chart = this.charts.get(target.dataset.metric);
      if (chart?.figure !== target) continue;
      chart.isNear = isIntersecting;
      if (isIntersecting) chart.draw();
    }
    this.read();
  }

  // Draws a metric on the other scale.
  turn(name) {
    if (!this.turned.delete(name)) this.turned.add(name);
    this.draw();
  }

  async save(name, runs) {
    try {
      await saveCsv(name, runs, this.asks.wire);
    } catch (error) {
      this.asks.notice(`${name} was not saved: ${error.message}`);
    }
  }

  // Shows a run's values above the charts. From the list, its curves stand out too.
  point(key, standsOut = false) {
    const drawn = this.places.has(key) ? key : null;
    if (drawn === this.pointed && !standsOut && !this.standsOut) return;
    this.pointed = drawn;
    this.standsOut = standsOut && drawn !== null;
    this.pointing ??= requestAnimationFrame(() => {
      this.pointing = undefined;
      for (const chart of this.charts.values()) chart.point(this.standsOut ? this.pointed : null);
    });
  }

  zoom(first, last) {
    const { least } = axisOf(element("axis").value);
    this.zoomed = first === null || last - first < least ? null : [Math.max(0, first), last];
    element("whole").hidden = this.zoomed === null;
    this.draw();
    this.read();
  }
}

function groupElement(name) {
  const id = `group ${name}`;
  const there = element(id);
  if (there) return there;
  const group = document.createElement("section");
  group.id = id;
  group.className = "group";
  const [head, grid] = [document.createElement("h2"), document.createElement("div")];
  head.textContent = name;
  grid.className = "grid";
  group.append(head, grid);
  const rank = (title) => (GROUPS.includes(title) ? GROUPS.indexOf(title) : GROUPS.length);
  const isAfter = (title) => rank(title) > rank(name) || (rank(title) === rank(name) && title > name);
  const after = [...element("groups").children].find((one) => isAfter(one.firstChild.textContent));
  element("groups").insertBefore(group, after ?? null);
  return group;
}
