// Files that the page gives its user: all values of a chart as CSV, and the chart as PNG.

const LINE = 18, EDGE = 12, SWATCH = 14; // of a picture's head, in pixels

// A spreadsheet takes a text that begins with one of = + - @ for a formula.
export function inCsv(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(String(value)) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function asCsv(lines) {
  return `${lines.map((line) => line.map(inCsv).join(",")).join("\r\n")}\r\n`;
}

export function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// A metric's name as that of a file.
function fileOf(metric, ending) {
  return `${metric.replace(/[^\w.-]+/g, "-").replace(/^[.-]+/, "").slice(0, 80) || "chart"}.${ending}`;
}

// Saves all rows of a metric of these runs, whatever part of them is drawn.
export async function saveCsv(metric, runs, wire) {
  const lines = [["run", "kind", "step", "epoch", "seconds", metric]];
  for (const { key, name } of runs) {
    for (const [kind, { steps, epochs, seconds, values }] of Object.entries(await valuesOf(key, metric, wire))) {
      steps.forEach((step, at) => lines.push([name, kind, step, epochs[at], seconds[at], values[at]]));
    }
  }
  save(new Blob([asCsv(lines)], { type: "text/csv" }), fileOf(metric, "csv"));
}

async function valuesOf(key, metric, wire) {
  const path = `/api/runs/${encodeURIComponent(key)}/values?${new URLSearchParams({ name: metric })}`;
  for (;;) {
    const { found, is_behind: isBehind } = await wire.read(path);
    if (!isBehind) return found;
  }
}

// Saves the picture as it is drawn, below its title and the names of its runs: [{name, colour, dash}].
export function savePng(metric, title, runs, canvas, { ground, ink }) {
  const scale = devicePixelRatio, width = canvas.width / scale;
  const picture = document.createElement("canvas"), pen = picture.getContext("2d");
  const font = (weight, size) => `${weight} ${size}px system-ui, sans-serif`;
  pen.font = font(400, 12);
  const most = width - 2 * EDGE, lengthOf = (text) => pen.measureText(text).width;
  const short = runs.map((run) => ({ ...run, name: fitted(run.name, most - SWATCH - 6, lengthOf) }));
  const names = placed(short, most, lengthOf);
  const head = 2 * EDGE + LINE * (1 + (names.at(-1)?.line ?? 0));
  [picture.width, picture.height] = [canvas.width, canvas.height + Math.round(head * scale)];
  pen.scale(scale, scale);
  pen.fillStyle = ground;
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.textBaseline = "middle";
  pen.fillStyle = ink;
  pen.font = font(600, 14);
  pen.fillText(fitted(title, most, lengthOf), EDGE, EDGE + LINE / 2);
  pen.font = font(400, 12);
  for (const { name, colour, dash, left, line } of names) {
    const top = EDGE + LINE * (line + 0.5);
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(EDGE + left, top);
    pen.lineTo(EDGE + left + SWATCH, top);
    pen.stroke();
    pen.fillText(name, EDGE + left + SWATCH + 6, top);
  }
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.drawImage(canvas, 0, Math.round(head * scale));
  picture.toBlob((blob) => save(blob, fileOf(metric, "png")), "image/png");
}

// A text, or as much of its beginning as fits.
export function fitted(text, width, lengthOf) {
  if (lengthOf(text) <= width) return text;
  const letters = [...text];
  const part = (count) => `${letters.slice(0, count).join("")}…`;
  let low = 0, high = letters.length; // letters that fit, and that may
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (lengthOf(part(middle)) <= width) low = middle;
    else high = middle - 1;
  }
  return part(low);
}

// Breaks the names into lines, which are counted from 1: the title is above them.
function placed(runs, width, lengthOf) {
  let left = 0, line = 1;
  return runs.map((run) => {
    const wide = SWATCH + 6 + lengthOf(run.name) + EDGE;
    if (left > 0 && left + wide > width) [left, line] = [0, line + 1];
    const place = { ...run, left, line };
    left += wide;
    return place;
  });
}
