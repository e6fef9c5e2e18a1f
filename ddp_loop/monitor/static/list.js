// The list of runs: a line each, which changes only where its run does; order and search.

import { Searched, parse } from "./query.js";
import { byName, grouped, isUnderWay, number, titled, valueOf, write } from "./words.js";

const element = (id) => document.getElementById(id);
const STATES = ["running", "stopping", "starting", "waiting", "missing", "interrupted", "done", "pruned", "stopped", "left",
  "failed", "killed", "lost", "not finite", "timed out", "gone"]; // in this order
const FIELDS = {
  name: () => null,
  state: ({ state }) => STATES.indexOf(state),
  value: (summary) => finite(valueOf(summary).value),
  began: ({ began }) => began,
};

export class List {
  // asks: template, runs, open(key), choose(key, on), only(keys), point(key), arranged(), edit(key), hide(key, on), hidden
  constructor(asks) {
    this.asks = asks;
    this.lines = new Map(); // key -> {item, parts, searched, rank, summary}
    this.sequence = []; // keys in the order of the list
    this.order = []; // those that the search finds
    this.opened = null;
    this.showsHidden = false;
    this.values = new Map(); // parameter -> its first value
    this.varied = new Set(); // parameters in which runs differ
    this.place = element("lines");
    element("search").addEventListener("input", () => this.arrange());
    element("sort").addEventListener("change", () => this.arrange());
    element("turn").addEventListener("click", () => {
      const turned = element("turn").getAttribute("aria-pressed") !== "true";
      element("turn").setAttribute("aria-pressed", String(turned));
      this.arrange();
    });
    element("only").addEventListener("click", () => asks.only(this.order));
    element("none").addEventListener("click", () => asks.only([]));
    element("show-hidden").addEventListener("click", () => {
      this.showsHidden = !this.showsHidden;
      this.arrange();
    });
    this.place.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const key = button.closest(".line").dataset.run;
      if (button.matches(".open")) asks.open(key);
      else if (button.matches(".edit")) asks.edit(key);
      else if (button.matches(".more")) {
        const isOpen = button.closest(".line").classList.toggle("acting");
        button.setAttribute("aria-expanded", String(isOpen));
      }
      else asks.hide(key, !this.isHidden(key));
    });
    for (const [kind, key] of [["mouseover", true], ["mouseleave", false], ["focusin", true], ["focusout", false]]) {
      this.place.addEventListener(kind, (event) => asks.point(key ? event.target.closest(".line")?.dataset.run ?? null : null));
    }
    this.place.addEventListener("change", (event) => {
      asks.choose(event.target.closest(".line").dataset.run, event.target.checked);
    });
  }

  take(changed, gone) {
    for (const key of gone) {
      this.lines.get(key)?.item.remove();
      this.lines.delete(key);
    }
    const wanted = element("sort").value;
    let isOther = gone.length > 0;
    for (const summary of changed) {
      const line = this.lines.get(summary.key) ?? this.newLine(summary.key);
      const rank = FIELDS[wanted](summary);
      const searched = new Searched(summary);
      isOther ||= rank !== line.rank || searched.text !== line.searched?.text;
      Object.assign(line, { summary, searched, rank });
    }
    const isVaried = this.vary(changed);
    for (const line of isVaried ? this.lines.values() : changed.map(({ key }) => this.lines.get(key))) {
      show(line, this.varied);
    }
    if (isOther || element("search").value) this.arrange();
    else this.asks.arranged();
  }

  newLine(key) {
    const item = this.asks.template.content.firstElementChild.cloneNode(true);
    const find = (name) => item.querySelector(name);
    const names = [".show", ".open", ".name", ".value", ".state", ".parameters", ".bar", ".bar i", ".edit", ".hide", ".more"];
    const parts = Object.fromEntries(names.map((name) => [name, find(name)]));
    item.dataset.run = key;
    this.lines.set(key, { item, parts });
    return this.lines.get(key);
  }

  // Finds the parameters in which runs differ, and returns whether there are more now.
  vary(changed) {
    const before = this.varied.size;
    for (const { config } of changed) {
      for (const [name, value] of Object.entries(config)) {
        if (!this.values.has(name)) this.values.set(name, value);
        else if (this.values.get(name) !== value) this.varied.add(name);
      }
    }
    return this.varied.size > before;
  }

  isHidden(key) {
    return this.asks.hidden.has(this.lines.get(key).summary);
  }

  // Sorts the lines, and shows those that the search finds.
  arrange() {
    const by = element("sort").value;
    const turn = element("turn").getAttribute("aria-pressed") === "true" ? -1 : 1;
    const lines = [...this.lines.values()];
    for (const line of lines) line.rank = FIELDS[by](line.summary);
    lines.sort((one, other) => (by === "name" ? isUnderWay(other.summary) - isUnderWay(one.summary) : 0) || compare(one, other, turn));
    const { test, says } = parse(element("search").value, lines.map(({ searched }) => searched));
    const hidden = new Set(lines.filter(({ summary }) => this.asks.hidden.has(summary)));
    if (!hidden.size) this.showsHidden = false;
    const listed = this.showsHidden ? lines : lines.filter((line) => !hidden.has(line));
    const found = new Set(listed.filter(({ searched }) => test(searched)));
    const sequence = lines.map(({ summary }) => summary.key);
    if (sequence.some((key, at) => key !== this.sequence[at]) || sequence.length !== this.sequence.length) {
      let next = this.place.firstElementChild;
      for (const { item } of lines) {
        if (item === next) next = next.nextElementSibling;
        else this.place.insertBefore(item, next);
      }
    }
    this.sequence = sequence;
    for (const line of lines) {
      const { item, parts, summary } = line, is = hidden.has(line);
      item.hidden = !found.has(line);
      item.classList.toggle("put-away", is);
      write(parts[".hide"], is ? "Show" : "Hide");
      const says = `${is ? "Show" : "Hide"} ${summary.name}`;
      if (parts[".hide"].getAttribute("aria-label") !== says) parts[".hide"].setAttribute("aria-label", says);
    }
    const button = element("show-hidden");
    button.hidden = !hidden.size;
    button.setAttribute("aria-pressed", String(this.showsHidden));
    write(button, `${this.showsHidden ? "Without" : "Show"} hidden (${grouped(hidden.size)})`);
    this.order = lines.filter((line) => found.has(line)).map(({ summary }) => summary.key);
    const all = `${grouped(listed.length)} runs`;
    write(element("of-value"), titled(valueOf(lines[0]?.summary ?? { last: {} }).name));
    const clears = found.size || !listed.length ? "" : "Empty the search to see all.";
    const count = found.size === listed.length ? all : `${grouped(found.size)} of ${all}`;
    write(element("count"), [count, [says, clears].filter(Boolean).join(" ")].filter(Boolean).join(". "));
    const states = new Map(STATES.map((state) => [state, 0]));
    for (const { summary } of listed) states.set(summary.state, (states.get(summary.state) ?? 0) + 1);
    write(element("states"), [...states].filter(([, many]) => many).map(([state, many]) => `${grouped(many)} ${state}`).join(" · "));
    element("only").disabled = found.size === 0;
    this.asks.arranged();
  }

  // Shows which runs are drawn, and in which colours.
  paint(curves) {
    for (const [key, { item, parts }] of this.lines) {
      const on = curves.chosen.has(key), colour = curves.place(key);
      if (parts[".show"].checked !== on) parts[".show"].checked = on;
      const form = colour === null ? "" : `${colour}`;
      if (item.dataset.place === form) continue;
      item.dataset.place = form;
      curves.dress(item, key);
    }
  }

  mark(key) {
    for (const one of [this.opened, key]) {
      this.lines.get(one)?.parts[".open"].setAttribute("aria-expanded", String(one === key));
    }
    this.opened = key;
  }

  focus(key) {
    this.lines.get(key)?.parts[".open"].focus();
  }
}

function compare(one, other, turn) {
  const [first, second] = [one.rank, other.rank];
  if (first !== second) {
    if (first === null || first === undefined) return 1;
    if (second === null || second === undefined) return -1;
    return turn * (first - second);
  }
  return turn * byName(one.summary.name, other.summary.name);
}

function show({ item, parts, summary }, varied) {
  const { name, path, state, fraction, config, note } = summary;
  const shown = valueOf(summary);
  item.dataset.state = state;
  write(parts[".name"], name);
  parts[".name"].title = path;
  parts[".edit"].setAttribute("aria-label", `Rename ${name}`);
  parts[".more"].setAttribute("aria-label", `Rename or hide ${name}`);
  write(parts[".value"], shown.value === null ? "" : number(shown.value));
  parts[".value"].title = titled(shown.name);
  const far = fraction !== null && fraction < 1 ? ` ${Math.floor(100 * fraction)} %` : "";
  write(parts[".state"], `${state}${far}`);
  const parameters = Object.entries(config).filter(([key]) => varied.has(key)).map(([key, value]) => `${key}=${short(value)}`);
  write(parts[".parameters"], [...(note ? [note] : []), ...parameters].join(" "));
  parts[".parameters"].title = Object.entries(config).map(([key, value]) => `${key}=${value}`).join("\n");
  parts[".show"].setAttribute("aria-label", `Draw ${name}`);
  parts[".bar"].classList.toggle("under-way", isUnderWay(summary) && fraction !== null);
  parts[".bar i"].style.transform = `scaleX(${fraction ?? 0})`;
}

function finite(value) {
  return Number.isFinite(value) ? value : null;
}

// A float with the digits that tell runs apart; other values as they are. The title has all digits.
function short(value) {
  return typeof value === "number" && !Number.isInteger(value) ? number(value) : value;
}
