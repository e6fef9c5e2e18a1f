// The page: a card for each run, the curves in groups, and Stop.

import { Chart, groupOf } from "./charts.js";
import { duration, grouped, memory, number, times } from "./words.js";
import { Wire, takeToken } from "./wire.js";

const element = (id) => document.getElementById(id);
const PALETTE = 6; // colours of runs in page.css
const GROUPS = ["Loss", "Metrics"]; // in this order, before the others
const BETWEEN_MS = 900; // between two requests for the curves of a run

const token = takeToken();
const wire = new Wire(token);
const runs = new Map(); // key -> {summary, card, colour, curves, asked, reading, read}
const charts = new Map(); // metric -> Chart
let zoomed = null; // [first, last] step, or all
let stopping = null; // the run of the dialog

// -- runs ---------------------------------------------------------------------------------------------------

function takeState(state) {
  for (const summary of state.runs) {
    const run = runs.get(summary.key) ?? newRun(summary.key);
    run.summary = summary;
    showCard(run);
  }
  const first = state.runs[0];
  const far = first?.fraction === null || first === undefined ? "" : `${Math.floor(100 * first.fraction)} % `;
  document.title = first ? `${far}${first.key} · ${first.state}` : "Runs";
  element("runs").classList.toggle("several", runs.size > 1);
  readCurves();
}

function newRun(key) {
  const card = element("run").content.firstElementChild.cloneNode(true);
  const place = runs.size % PALETTE;
  const run = { key, card, place, curves: null, asked: "", reading: false, read: 0 };
  card.dataset.run = key;
  card.style.setProperty("--run", `var(--run-${place})`);
  card.querySelector(".name").textContent = key;
  card.querySelector(".show").addEventListener("change", draw);
  card.querySelector(".stop").addEventListener("click", () => askToStop(run));
  element("runs").append(card);
  runs.set(key, run);
  return run;
}

function showCard({ card, summary }) {
  const find = (name) => card.querySelector(name);
  card.dataset.state = summary.state;
  write(find(".says"), summary.says);
  write(find(".why"), summary.why ? (summary.state === "failed" ? summary.why : `Asked by: ${summary.why}`) : "");
  const bar = find("progress");
  find(".progress").hidden = summary.fraction === null;
  bar.value = summary.fraction ?? 0;
  write(find(".percent"), summary.fraction === null ? "" : `${Math.floor(100 * summary.fraction)} %`);
  showFacts(find(".facts"), summary);
  showRanks(find(".ranks"), summary.by_rank);
  showProfile(find(".profile"), summary.profile);
  showLines(find(".problems"), summary.problems);
  find(".continue").hidden = !summary.continue;
  write(find(".continue code"), summary.continue ?? "");
  write(find(".folder"), summary.folder);
  const stop = find(".stop");
  stop.hidden = !["running", "stopping"].includes(summary.state);
  stop.disabled = !summary.can_stop;
  write(stop, summary.state === "stopping" ? "Stopping…" : "Stop");
  if (stopping?.card === card && !summary.can_stop) closeDialog();
}

function showFacts(list, said) {
  const of = (part, whole) => (whole ? `${grouped(part)} of ${grouped(whole)}` : grouped(part));
  const facts = [
    ["Step", of(said.iteration, said.steps)],
    ["Epoch", said.epoch === null ? null : of(said.epoch, said.epochs)],
    ["Elapsed", said.elapsed_s === null ? null : duration(said.elapsed_s)],
    ["Remaining", said.remaining_s === null ? null : duration(said.remaining_s)],
    ["Ranks", said.ranks],
    ["Device", said.device],
    ["Samples/s", said.samples_per_s === null ? null : number(Number(said.samples_per_s.toPrecision(3)))],
    ["Checkpoint", said.checkpoint],
  ].filter(([, value]) => value !== null);
  if (list.children.length !== facts.length || facts.some(([name], at) => list.children[at].dataset.fact !== name)) {
    list.replaceChildren(...facts.map(([name]) => {
      const row = document.createElement("div");
      row.dataset.fact = name;
      row.append(document.createElement("dt"), document.createElement("dd"));
      row.firstChild.textContent = name;
      return row;
    }));
  }
  facts.forEach(([, value], at) => write(list.children[at].lastChild, String(value)));
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

function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
  if (place.matches(".why")) place.hidden = !text;
}

// -- curves -------------------------------------------------------------------------------------------------

function wanted(summary) {
  const points = Math.min(2000, Math.max(300, 2 * Math.round(element("groups").clientWidth || 600)));
  const [first, last] = zoomed ?? [0, 10 ** 12];
  const asked = new URLSearchParams({
    points, smoothing: element("smoothing").value,
    first: Math.max(0, Math.floor(first)), last: Math.max(0, Math.ceil(last)),
  });
  return { path: `/api/runs/${encodeURIComponent(summary.key)}/curves?${asked}`, version: summary.version };
}

// Requests outdated curves, of each run at most about once a second, unless the page is hidden.
async function readCurves() {
  if (document.hidden) return;
  await Promise.all([...runs.values()].map(async (run) => {
    const { path, version } = wanted(run.summary);
    const asks = `${version} ${path}`;
    if (run.reading || run.asked === asks) return;
    const isOther = !run.asked.endsWith(path); // the user changed something: request at once
    const wait = run.read + BETWEEN_MS - performance.now();
    if (!isOther && wait > 0) {
      clearTimeout(run.later);
      run.later = setTimeout(readCurves, wait);
      return;
    }
    run.reading = true;
    run.read = performance.now();
    try {
      run.curves = await wire.read(path);
      run.asked = asks;
      draw();
    } catch {
      // The stream reports the monitor's state, and calls this again.
    } finally {
      run.reading = false;
    }
    if (wanted(run.summary).path !== path) readCurves();
  }));
}

function draw() {
  const shown = [...runs.values()].filter((run) => run.curves && run.card.querySelector(".show").checked);
  const names = new Set(shown.flatMap(({ curves }) => [...Object.keys(curves.curves), ...Object.keys(curves.evaluated)]));
  const style = getComputedStyle(document.documentElement);
  const drawn = shown.map(({ key, place, curves }) => ({
    key, curves, colour: style.getPropertyValue(`--run-${place}`).trim(),
  }));
  for (const [name, chart] of charts) {
    if (names.has(name) || !shown.length) continue;
    chart.remove();
    charts.delete(name);
  }
  for (const name of names) {
    if (charts.has(name) || groupOf(name) === null) continue;
    const chart = new Chart(name, element("chart"), { zoom, view: () => zoomed });
    charts.set(name, chart);
    groupElement(groupOf(name)).querySelector(".grid").append(chart.figure);
  }
  for (const group of document.querySelectorAll(".group")) {
    if (!group.querySelector(".chart")) group.remove();
  }
  const choices = { log: document.querySelector("[name=scale]:checked").value === "log", marks: element("marks").checked };
  for (const chart of charts.values()) chart.show(drawn, choices);
  element("controls").hidden = charts.size === 0;
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
  const after = [...element("groups").children].find((one) => rank(one.firstChild.textContent) > rank(name));
  element("groups").insertBefore(group, after ?? null);
  return group;
}

function zoom(first, last) {
  zoomed = first === null || last - first < 2 ? null : [Math.max(0, first), last];
  element("whole").hidden = zoomed === null;
  draw();
  readCurves();
}

// -- Stop ---------------------------------------------------------------------------------------------------

function askToStop(run) {
  stopping = run;
  element("confirm-title").textContent = `Stop ${run.key}?`;
  element("confirm").showModal();
}

function closeDialog() {
  stopping = null;
  element("confirm").close();
}

async function reallyStop() {
  const run = stopping;
  closeDialog();
  if (!run) return;
  run.card.querySelector(".stop").disabled = true;
  write(run.card.querySelector(".stop"), "Stopping…");
  try {
    await wire.post(`/api/runs/${encodeURIComponent(run.key)}/stop`);
    notice("");
  } catch (error) {
    notice(`${run.key} was not asked to stop: ${error.message}`);
    showCard(run);
  }
}

// -- the rest -----------------------------------------------------------------------------------------------

function notice(text) {
  element("notice").textContent = text;
  element("notice").hidden = !text;
}

function showLink(link, why) {
  const words = { live: "live", lost: "connection lost, trying again…", refused: "not connected" };
  element("link").dataset.link = link;
  write(element("link"), words[link]);
  document.body.classList.toggle("stale", link !== "live");
  if (link === "refused") notice(why);
}

element("smoothing").addEventListener("change", readCurves);
element("marks").addEventListener("change", draw);
element("whole").addEventListener("click", () => zoom(null));
element("keep").addEventListener("click", closeDialog);
element("really").addEventListener("click", reallyStop);
element("confirm").addEventListener("cancel", () => { stopping = null; });
for (const one of document.querySelectorAll("[name=scale]")) one.addEventListener("change", draw);
document.addEventListener("visibilitychange", readCurves);
addEventListener("hashchange", () => location.reload());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts.values()) chart.form = "";
  draw();
});

if (token) {
  wire.follow(takeState, showLink);
} else {
  showLink("refused", "This page needs the whole link that the monitor printed, with the token after #.");
}
