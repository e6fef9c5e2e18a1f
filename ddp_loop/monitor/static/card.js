// The card of one run: its state, facts, ranks, profile, what cannot be read, and the command that resumes it.

import { Continuing } from "./continuing.js";
import { Panels } from "./panels.js";
import { LOSSES, duration, grouped, memory, label, number, times, titled, write } from "./words.js";

const DETAILS = { why: null, remaining_s: null, samples_per_s: null, ranks: null, device: null, checkpoint: null,
  by_rank: [], profile: null, problems: [], continue: null, continuing: null,
  console: [], usage: 0, texts: 0, images: 0, tables: [] }; // until they are read

const LONG = 18; // letters of a fact that takes a line of its own

export class Card {
  // asks: wire, stop(key), edit(key), close(), notice(text)
  constructor(template, place, asks) {
    this.asks = asks;
    this.key = null;
    this.item = template.content.firstElementChild.cloneNode(true);
    this.item.hidden = true;
    place.append(this.item);
    this.panels = new Panels(this.find(".panels"), asks);
    const again = { wire: asks.wire, notice: asks.notice, read: () => this.key && this.read() };
    this.continuing = new Continuing(this.find(".go-on"), this.find(".go-on-says"), again);
    this.find(".stop").addEventListener("click", () => asks.stop(this.key));
    this.find(".edit").addEventListener("click", () => asks.edit(this.key));
    this.find(".close").addEventListener("click", () => asks.close());
  }

  find(name) {
    return this.item.querySelector(name);
  }

  hide() {
    this.key = null;
    this.item.hidden = true;
    this.panels.hide();
  }

  // Shows a run's summary at once, and the rest when it has come.
  show(summary, colour, several) {
    this.said = { ...(this.key === summary.key ? this.said : DETAILS), ...summary };
    this.key = summary.key;
    this.item.hidden = false;
    this.item.dataset.run = summary.key;
    this.paint(colour, several);
    this.fill();
    this.read();
  }

  paint(colour, several) {
    this.item.style.setProperty("--run", colour ?? "var(--mark)");
    this.find(".swatch").hidden = this.find(".close").hidden = !several;
  }

  focus() {
    this.item.scrollIntoView({ block: "nearest" });
    this.find(".close").focus({ preventScroll: true });
  }

  async read() {
    if (this.reading) {
      this.again = true;
      return;
    }
    this.reading = true;
    const key = this.key;
    try {
      const details = await this.asks.wire.read(`/api/runs/${encodeURIComponent(key)}`);
      if (this.key === key) {
        this.said = { ...this.said, ...details, last: this.said.last }; // with evaluations
        this.fill();
      }
    } catch {
      // The stream reports the monitor's state, and has this called again.
    } finally {
      this.reading = false;
    }
    if (this.again || (this.key && this.key !== key)) {
      this.again = false;
      this.read();
    }
  }

  // Stop was confirmed; the run's state says the rest.
  expectStop(key) {
    if (key !== this.key) return;
    this.find(".stop").disabled = true;
    label(this.find(".stop"), "Stopping…", this.said.name);
  }

  fill() {
    const { said } = this;
    const find = (name) => this.find(name);
    this.item.dataset.state = said.state;
    write(find(".name"), said.name);
    write(find(".says"), said.says);
    write(find(".note"), said.note ?? "");
    find(".note").hidden = !said.note;
    find(".edit").setAttribute("aria-label", `Rename ${said.name}`);
    const isError = ["failed", "killed", "not finite", "timed out"].includes(said.state);
    write(find(".why"), said.why ? (isError ? said.why : `Asked by: ${said.why}`) : "");
    find(".why").classList.toggle("traceback", isError && (said.why ?? "").includes("\n"));
    find(".why").hidden = !said.why;
    const bar = find("progress");
    find(".progress").hidden = said.fraction === null;
    bar.value = said.fraction ?? 0;
    write(find(".percent"), said.fraction === null ? "" : `${Math.floor(100 * said.fraction)} %`);
    const hasRun = said.iteration > 0 || Boolean(said.trial) || !["missing", "waiting"].includes(said.state);
    find(".edit").hidden = !hasRun;
    showFacts(find(".facts"), hasRun ? factsOf(said) : []);
    find(".config").hidden = !Object.keys(said.config).length;
    showFacts(find(".config .facts"), configOf(said.config));
    showRanks(find(".ranks"), said.by_rank);
    showProfile(find(".profile"), said.profile);
    showLines(find(".problems"), said.problems);
    find(".continue").hidden = !said.continue;
    write(find(".continue code"), said.continue ?? "");
    write(find(".folder"), said.folder);
    const stop = find(".stop");
    stop.hidden = !["running", "stopping"].includes(said.state);
    stop.disabled = !said.can_stop;
    label(stop, said.state === "stopping" ? "Stopping…" : "Stop", said.name);
    this.continuing.show(said);
    this.panels.show(said);
  }
}

function factsOf(said) {
  const of = (part, whole) => (whole ? `${grouped(part)} of ${grouped(whole)}` : grouped(part));
  const judged = [said.trial?.objective, ...LOSSES].find((name) => name && Object.hasOwn(said.last, name));
  const value = (kind, values) => [kind + titled(judged ?? ""), Object.hasOwn(values, judged) ? number(values[judged]) : null];
  return [
    ["Step", of(said.iteration, said.steps)],
    ["Epoch", said.epoch === null ? null : of(said.epoch, said.epochs)],
    ["Elapsed", said.elapsed_s === null ? null : duration(said.elapsed_s)],
    ["Remaining", said.remaining_s === null ? null : duration(said.remaining_s)],
    ["Ranks", said.ranks],
    ["Device", said.device],
    ["Samples/s", said.samples_per_s === null ? null : number(Number(said.samples_per_s.toPrecision(3)))],
    ["Checkpoint", said.checkpoint],
    value("", said.last),
    value("best ", said.best),
  ].filter(([, value]) => value !== null);
}

function configOf(config) {
  return Object.entries(config).map(([name, value]) => [name, typeof value === "number" ? number(value) : String(value)]);
}

function showFacts(list, facts) {
  if (list.children.length !== facts.length || facts.some(([name], at) => list.children[at].dataset.fact !== name)) {
    list.replaceChildren(...facts.map(([name]) => {
      const row = document.createElement("div");
      row.dataset.fact = name;
      row.append(document.createElement("dt"), document.createElement("dd"));
      row.firstChild.textContent = row.firstChild.title = name;
      return row;
    }));
  }
  facts.forEach(([name, value], at) => {
    write(list.children[at].lastChild, String(value));
    list.children[at].classList.toggle("long", Math.max(name.length, String(value).length) > LONG);
  });
}

function showRanks(block, ranks) {
  block.hidden = !ranks.length;
  const list = block.querySelector("ul");
  while (list.children.length > ranks.length) list.lastChild.remove();
  while (list.children.length < ranks.length) {
    const line = document.createElement("li");
    const [rank, bar, took, held] = ["rank", "bar", "took", "memory"].map((name) => part("span", name));
    bar.append(part("i", "own"), part("i", "waits"));
    line.append(rank, bar, took, held);
    list.append(line);
  }
  const longest = Math.max(...ranks.map((one) => one.step_s ?? 0), 1e-12);
  ranks.forEach((one, at) => {
    const find = (name) => list.children[at].querySelector(name);
    const waits = Math.min(one.wait_s ?? 0, one.step_s ?? 0), own = (one.step_s ?? 0) - waits;
    write(find(".rank"), `rank ${one.rank}`);
    find(".own").style.width = `${(100 * own) / longest}%`;
    find(".waits").style.width = `${(100 * waits) / longest}%`;
    write(find(".took"), times(own, waits));
    write(find(".memory"), memory(one.memory_mib));
  });
}

// Where a step's time goes on each rank: milliseconds, and each phase's share over all ranks.
function showProfile(block, profile) {
  block.hidden = !profile;
  if (!profile || block.dataset.profile === JSON.stringify(profile)) return;
  block.dataset.profile = JSON.stringify(profile);
  const { heading, phases, rows, hints } = profile;
  const cells = (texts, kind) => texts.map((text) => Object.assign(document.createElement(kind), { textContent: text }));
  const total = (column) => rows.reduce((sum, row) => sum + (row[column] ?? 0), 0);
  write(block.querySelector("h3"), `Milliseconds per step: ${heading ?? ""}`);
  block.querySelector("thead tr").replaceChildren(...cells(["rank", "step", ...phases], "th"));
  block.querySelector("tbody").replaceChildren(...rows.map(([rank, ...times]) => {
    const line = document.createElement("tr");
    line.append(...cells([rank, ...times.map((one) => (one === null ? "–" : (1000 * one).toFixed(2)))], "td"));
    return line;
  }));
  const shares = phases.map((_, at) => `${Math.round((100 * total(at + 2)) / Math.max(total(1), 1e-12))} %`);
  block.querySelector("tfoot tr").replaceChildren(...cells(["share", "", ...shares], "td"));
  showLines(block.querySelector("ul"), hints);
}

function showLines(list, lines) {
  list.hidden = !lines.length;
  if (list.dataset.lines === JSON.stringify(lines)) return;
  list.dataset.lines = JSON.stringify(lines);
  list.replaceChildren(...lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
}

function part(kind, name) {
  return Object.assign(document.createElement(kind), { className: name });
}
