// The horizontal axis: steps, epochs or time since the beginning, and the points of a run on it.

import { duration, grouped, number } from "./words.js";

// least: the smallest part that a zoom shows; parts: of a unit, in which the monitor takes the ends of a zoom.
const AXES = {
  step: { least: 2, parts: 1, says: (x) => `step ${grouped(x)}`, tick: (x) => (Number.isInteger(x) ? grouped(x) : "") },
  epoch: { least: 0.01, parts: 1000, says: (x) => `epoch ${number(x)}`, tick: number },
  time: { least: 0.1, parts: 1000, says: clock, tick: clock },
};

export function axisOf(name) {
  return Object.hasOwn(AXES, name) ? AXES[name] : AXES.step;
}

function clock(seconds) {
  return Math.abs(seconds) < 60 ? `${Number(seconds.toFixed(2))} s` : duration(seconds);
}

// A value by a name from a run's files, which may be that of a property that every object has.
function own(values, name) {
  return values && Object.hasOwn(values, name) ? values[name] : undefined;
}

// The lines of a metric in what the monitor sent of a run: {kind, x, y, steps}, where kind is line, faint under a
// smoothed line, smooth, or evaluated; what was logged is drawn as points where the metric has a curve too. A curve that
// stopped being finite has an end: [place on the axis, step].
export function linesOf(curves, name) {
  const [curve, smooth, evaluated, logged] = ["curves", "smoothed", "evaluated", "logged"].map((of) => own(curves[of], name));
  const { x, steps } = curves, end = own(curves.ends, name), lines = [];
  if (curve) lines.push({ kind: smooth ? "faint" : "line", x, steps, y: curve, end });
  if (curve && smooth) lines.push({ kind: "smooth", x, steps, y: smooth, end });
  if (evaluated) lines.push({ kind: "evaluated", x: curves.evaluated_x, steps: curves.evaluated_steps, y: evaluated });
  if (logged) {
    const [places, y, at] = logged;
    lines.push({ kind: curve || evaluated ? "evaluated" : "line", isLogged: true, x: places, steps: at, y });
  }
  return lines;
}

// The point of a line that is nearest to a place on the axis; of two as near, the earlier one. -1 without points.
export function nearestTo(x, place) {
  let low = 0, high = x.length; // the first point at the place or after it
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < place) low = middle + 1;
    else high = middle;
  }
  if (low === x.length) return x.length - 1;
  return low > 0 && place - x[low - 1] <= x[low] - place ? low - 1 : low;
}
