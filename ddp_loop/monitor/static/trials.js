// What the table and the pictures of the results know of a run, and the columns that these have.

import { groupOf } from "./charts.js";
import { Searched } from "./query.js";
import { byName, duration, number, titled } from "./words.js";

const MOST_METRICS = 24;
export const FAILED = new Set(["failed", "killed", "not finite", "timed out", "lost", "interrupted", "gone"]);

// A run with its values by name. Names come from users, so all are in Maps.
export class Trial {
  constructor(summary) {
    this.key = summary.key;
    this.take(summary);
  }

  take(summary) {
    this.summary = summary;
    this.parameters = new Map(Object.entries(summary.config ?? {}));
    this.last = new Map(Object.entries(summary.last ?? {}));
    this.best = new Map(Object.entries(summary.best ?? {}));
    this.status = summary.state;
    this.name = summary.name;
    this.why = summary.why ?? "";
    this.value = summary.trial?.value ?? (this.status === "not finite" ? NaN : null);
    this.isFailed = FAILED.has(this.status);
    this.canAgain = summary.trial?.can_again ?? false;
    this.searched = new Searched(summary);
  }
}

// A column: id, title, kind, of(trial) as it is sorted, exported and drawn, says(trial) as it is shown.
const column = (id, title, kind, of, says = (trial) => shown(of(trial))) => ({ id, title, kind, of, says });

// The columns of these trials, in the order of the table.
export function columnsOf(trials) {
  const parameters = new Set(), metrics = new Set();
  let objective = null, hasValue = false;
  for (const trial of trials) {
    for (const name of trial.parameters.keys()) parameters.add(name);
    for (const name of trial.last.keys()) if (isMetric(name)) metrics.add(name);
    objective ??= trial.summary.trial?.objective ?? null;
    hasValue ||= trial.summary.trial !== null && trial.summary.trial !== undefined;
  }
  const loss = metrics.delete("loss");
  return [
    column("name", hasValue ? "Trial" : "Run", "name", (trial) => trial.name),
    ...(hasValue ? [column("value", objective ? `Objective: ${titled(objective)}` : "Objective", "metric", (trial) => trial.value)] : []),
    ...(loss ? [
      column("best loss", "best loss", "metric", (trial) => trial.best.get("loss") ?? null),
      column("last loss", "loss", "metric", (trial) => trial.last.get("loss") ?? null),
    ] : []),
    ...[...metrics].slice(0, MOST_METRICS).map((name) =>
      column(`last ${name}`, titled(name), "metric", (trial) => trial.last.get(name) ?? null)),
    column("status", "Status", "status", (trial) => trial.status, statusOf),
    ...[...parameters].map((name) => column(`parameter ${name}`, name, "parameter", (trial) => trial.parameters.get(name))),
    column("time", "Time", "measure", (trial) => trial.summary.elapsed_s, (trial) => duration(trial.summary.elapsed_s)),
    column("steps", "Steps", "measure", (trial) => trial.summary.iteration),
    column("note", "Note", "note", (trial) => trial.summary.note ?? ""),
  ];
}

function isMetric(name) {
  return ["Loss", "Metrics"].includes(groupOf(name)) || name.startsWith("evaluation.") || name.includes("/");
}

function statusOf({ status, summary }) {
  const { fraction } = summary;
  const isUnderWay = status === "running" || status === "stopping";
  return isUnderWay && typeof fraction === "number" ? `${status} ${Math.floor(100 * fraction)} %` : status;
}

export function shown(value) {
  if (value === null || value === undefined || value === "") return "–";
  return typeof value === "number" ? number(value) : String(value);
}

export function isFiniteNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// Orders two values; those that are missing come last, in both directions.
export function compareValues(one, other, turn) {
  const [no, nor] = [one, other].map((value) => value === null || value === undefined || value === "" || Number.isNaN(value));
  if (no || nor) return no - nor;
  if (typeof one === "number" && typeof other === "number") return turn * (one - other);
  if (typeof one === "number" || typeof other === "number") return typeof one === "number" ? -1 : 1;
  return turn * byName(String(one), String(other));
}

// A scale over the values of an axis: {at(value)} from 0 to 1 or null, {ticks}: [value's place, label].
export function scaleOf(values, isLog) {
  const given = values.filter((value) => value !== null && value !== undefined && !Number.isNaN(value));
  if (!given.length) return { kind: "none", at: () => null, ticks: [] };
  if (given.every(isFiniteNumber)) return numeric(given, isLog);
  const names = [...new Set(given.map(String))].sort(byName);
  const places = new Map(names.map((name, at) => [name, (at + 0.5) / names.length]));
  const every = Math.ceil(names.length / 24);
  return {
    kind: "category", names,
    at: (value) => (value === null || value === undefined ? null : (places.get(String(value)) ?? null)),
    ticks: names.filter((_, at) => at % every === 0).map((name) => [places.get(name), name]),
  };
}

function numeric(given, asked) {
  let least = Infinity, most = -Infinity, above = Infinity;
  for (const value of given) {
    least = Math.min(least, value);
    most = Math.max(most, value);
    if (value > 0) above = Math.min(above, value);
  }
  const canLog = least > 0;
  const isLog = canLog && (asked ?? most / least >= 30);
  const form = isLog ? Math.log10 : (value) => value;
  let [low, high] = [form(least), form(most)];
  const room = high > low ? 0.04 * (high - low) : Math.abs(high) * 0.5 || 0.5;
  [low, high] = [low - room, high + room];
  const at = (value) => (isFiniteNumber(value) && (!isLog || value > 0) ? (form(value) - low) / (high - low) : null);
  const ticks = (isLog ? logTicks(low, high) : linearTicks(low, high)).map((value) => [at(value), number(value)]);
  const back = (place) => (isLog ? 10 ** (low + place * (high - low)) : low + place * (high - low));
  return { kind: isLog ? "log" : "linear", canLog, at, ticks, back };
}

function linearTicks(low, high) {
  const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * unit).find((one) => one >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const decades = high - low, found = [];
  const of = decades > 2 ? [1] : decades > 0.7 ? [1, 2, 5] : null;
  if (!of) return linearTicks(10 ** low, 10 ** high).filter((value) => value > 0);
  const every = Math.ceil(decades / 8);
  for (let power = Math.floor(low); power <= high; power += every) {
    for (const one of of) {
      const value = Number((one * 10 ** power).toPrecision(12));
      if (Math.log10(value) >= low && Math.log10(value) <= high) found.push(value);
    }
  }
  return found;
}

// Places of values from 0 (least) to 1 by their rank, so that one huge value does not hide the others.
export function ranksOf(values) {
  const sorted = [...new Set(values.filter(isFiniteNumber))].sort((one, other) => one - other);
  const places = new Map(sorted.map((value, at) => [value, sorted.length > 1 ? at / (sorted.length - 1) : 0]));
  return (value) => places.get(value) ?? null;
}

export function mixed(place) {
  return `color-mix(in oklab, var(--scale-1) ${(100 * place).toFixed(1)}%, var(--scale-0))`;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(kind, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  if (text !== null) made.textContent = text;
  return made;
}

export function html(kind, properties = {}, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}
