// A line for each sweep: how far it is, its best trial, stop all, and run failed trials again.

import { html, isFiniteNumber, shown } from "./trials.js";
import { grouped, titled, write } from "./words.js";

const BETWEEN_MS = 2000; // between two requests for the sweeps
const MOST_ASKED = 150; // trials in one request

export class SweepLines {
  // asks: wire, notice(text), trials: key -> Trial
  constructor(place, asks) {
    this.asks = asks;
    this.place = place;
    this.lines = new Map(); // key -> {item, sweep, parts}
    this.read = -BETWEEN_MS;
    this.stopping = null;
    this.title = html("h2");
    this.says = html("p");
    const keep = html("button", { type: "button", textContent: "Keep running", autofocus: true });
    const really = html("button", { type: "button", className: "danger", textContent: "Stop all trials" });
    this.dialog = html("dialog", { className: "confirm-all" }, this.title, this.says,
      html("p", { className: "buttons" }, keep, really));
    place.append(this.dialog);
    keep.addEventListener("click", () => this.dialog.close());
    really.addEventListener("click", () => this.stop());
  }

  // Shows what changed in the trials, and requests the sweeps again if that was some time ago.
  async refresh() {
    for (const line of this.lines.values()) this.fill(line);
    const wait = this.read + BETWEEN_MS - performance.now();
    if (wait > 0) {
      clearTimeout(this.later);
      this.later = setTimeout(() => this.refresh(), wait);
      return;
    }
    if (document.body.classList.contains("stale")) return; // without a monitor; it calls again when it is back
    this.read = performance.now();
    try {
      const { sweeps } = await this.asks.wire.read("/api/sweeps");
      this.take(sweeps);
    } catch {
      // The stream reports the monitor's state, and calls this again.
    }
  }

  take(sweeps) {
    const keys = new Set(sweeps.map(({ key }) => key));
    for (const [key, { item }] of this.lines) {
      if (keys.has(key)) continue;
      item.remove();
      this.lines.delete(key);
    }
    for (const sweep of sweeps) {
      const line = this.lines.get(sweep.key) ?? this.newLine(sweep.key);
      line.sweep = sweep;
      this.fill(line);
    }
  }

  newLine(key) {
    const [name, says, missing] = [html("strong"), html("span", { className: "sweep-says" }), html("span", { className: "sweep-needs" })];
    const all = html("button", { type: "button", className: "stop stop-all", textContent: "Stop all" });
    const again = html("button", { type: "button", className: "again" });
    const line = { item: html("div", { className: "sweep" }, name, says, missing, again, all), parts: { name, says, missing, all, again } };
    all.addEventListener("click", () => this.ask(key));
    again.addEventListener("click", () => this.again(key));
    this.lines.set(key, line);
    this.place.append(line.item);
    return line;
  }

  trialsOf(sweep) {
    return sweep.runs.map((key) => this.asks.trials.get(key)).filter(Boolean);
  }

  fill({ sweep, parts, item }) {
    const trials = this.trialsOf(sweep), counts = new Map();
    for (const { status } of trials) counts.set(status, (counts.get(status) ?? 0) + 1);
    const told = [`${grouped(trials.length)}${sweep.trials === null ? "" : ` of ${grouped(sweep.trials)}`} trials`];
    told.push([...counts].map(([status, many]) => `${grouped(many)} ${status}`).join(", "));
    const best = bestOf(trials, sweep.direction);
    if (best) told.push(`best ${titled(best.summary.trial.objective ?? "value")} ${shown(best.value)} in ${best.name}`);
    item.dataset.sweep = sweep.key;
    item.title = sweep.folder;
    write(parts.name, sweep.name);
    write(parts.says, told.filter(Boolean).join(" · "));
    const failed = trials.filter((trial) => trial.canAgain).length;
    parts.again.hidden = failed === 0;
    write(parts.again, `Run ${grouped(failed)} failed again`);
    parts.all.hidden = !sweep.is_active;
    parts.all.disabled = sweep.is_stopping;
    write(parts.all, sweep.is_stopping ? "Stopping…" : "Stop all");
  }

  ask(key) {
    const { sweep } = this.lines.get(key);
    const running = this.trialsOf(sweep).filter(({ status }) => status === "running").length;
    this.stopping = key;
    this.title.textContent = `Stop all trials of ${sweep.name}?`;
    this.says.textContent = `${grouped(running)} running ${running === 1 ? "trial stops" : "trials stop"} after the current step `
      + "and save a checkpoint. Waiting trials do not begin. The sweep can be started again.";
    this.dialog.showModal();
  }

  async stop() {
    this.dialog.close();
    const line = this.lines.get(this.stopping);
    if (!line) return;
    line.parts.all.disabled = true;
    await this.request(line, "stop", "", "was not asked to stop");
  }

  async again(key) {
    const line = this.lines.get(key);
    const numbers = this.trialsOf(line.sweep).filter((trial) => trial.canAgain).map(({ summary }) => summary.trial.number);
    line.parts.again.disabled = true;
    let answer = null;
    for (let at = 0; at < numbers.length; at += MOST_ASKED) {
      const body = JSON.stringify({ trials: numbers.slice(at, at + MOST_ASKED) });
      answer = await this.request(line, "again", body, "was not asked to run trials again");
      if (!answer) break;
    }
    line.parts.again.disabled = false;
    write(line.parts.missing, !answer ? "" : answer.is_active ? `${grouped(numbers.length)} trials will run again.`
      : `${grouped(numbers.length)} trials will run again when a worker starts: python -m ddp_loop sweep work ${line.sweep.folder}`);
  }

  async request({ sweep }, what, body, failure) {
    try {
      const answer = await this.asks.wire.post(`/api/sweeps/${encodeURIComponent(sweep.key)}/${what}`, body);
      this.asks.notice("");
      return answer;
    } catch (error) {
      this.asks.notice(`${sweep.name} ${failure}: ${error.message}`);
      return null;
    } finally {
      this.read = -BETWEEN_MS;
      this.refresh();
    }
  }
}

function bestOf(trials, direction) {
  const turn = direction === "maximize" ? -1 : 1;
  let best = null;
  for (const trial of trials) {
    if (trial.isFailed || !isFiniteNumber(trial.value)) continue;
    if (best === null || turn * trial.value < turn * best.value) best = trial;
  }
  return best;
}
