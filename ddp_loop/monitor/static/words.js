// The format of numbers and times, and what a run is judged by.

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "nan";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (Number.isInteger(value)) return grouped(value);
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

export function grouped(value) {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (parts[0] === 0) parts.shift();
  const days = parts.length === 3 ? Math.floor(parts[0] / 24) : 0;
  if (days) parts[0] %= 24;
  const clock = parts.map((part, place) => (place ? String(part).padStart(2, "0") : part)).join(":");
  return days ? `${days} d ${clock}` : clock;
}

// Several durations in one unit, that of the first.
export function times(...seconds) {
  const [unit, scale] = seconds[0] >= 1 ? ["s", 1] : seconds[0] >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${seconds.map((one) => String(Number((one * scale).toPrecision(3)))).join(" + ")} ${unit}`;
}

export function memory(mib) {
  if (mib === null || mib === undefined) return "";
  return mib >= 1024 ? `${number(mib / 1024)} GiB` : `${Math.round(mib)} MiB`;
}

export const LOSSES = ["evaluation.loss", "loss"]; // runs are judged by the first one that any of them has

// The name of a value, as `ddp_loop runs` has it.
export function titled(name) {
  return name.replace(/^evaluation\./, "eval ");
}

export function named(name) {
  return name.replaceAll("_", " ").split("/").pop();
}

const MOST_NAMES = 5; // in a message
const PARTS = /(\d+(?:\.\d+)?(?:e[+-]?\d+)?)/i;
const collator = new Intl.Collator("en");

// The order of names in which numbers are, also as decimals: lr0.03 before lr0.1, and run2 before run10.
export function byName(one, other) {
  const [first, second] = [one, other].map((name) => name.split(PARTS));
  for (let at = 0; at < Math.min(first.length, second.length); at += 1) {
    const order = at % 2 ? first[at] - second[at] : collator.compare(first[at], second[at]);
    if (order) return order;
  }
  return first.length - second.length || collator.compare(one, other);
}

// The objective of a trial, or the loss: the last value.
export function valueOf({ trial, last }) {
  const name = trial?.objective ?? ("loss" in last ? "loss" : (Object.keys(last)[0] ?? "loss"));
  return { name, value: trial?.value ?? (Object.hasOwn(last, name) ? last[name] : null) };
}

// A summary in which a last value that is not finite, which JSON cannot have, is NaN.
export function withNan(summary) {
  for (const [name, value] of Object.entries(summary.last)) summary.last[name] = value ?? NaN;
  return summary;
}

// Some names as a text that has an end.
export function few(names) {
  const rest = names.length - MOST_NAMES;
  return `${names.slice(0, MOST_NAMES).join(", ")}${rest > 0 ? ` and ${grouped(rest)} more` : ""}`;
}

export function isUnderWay({ state }) {
  return ["running", "stopping"].includes(state);
}

export function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// Says on a button what it does, and to those who hear the page to what.
export function label(button, text, name) {
  write(button, text);
  button.setAttribute("aria-label", `${text} ${name}`);
}
