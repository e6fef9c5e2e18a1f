// The page: where its parts meet, the tabs, and Stop.

import { Card } from "./card.js";
import { Curves } from "./curves.js";
import { Header } from "./header.js";
import { Legend } from "./legend.js";
import { List } from "./list.js";
import { Hidden, Naming } from "./naming.js";
import * as tab from "./results.js";
import { View } from "./view.js";
import { few, withNan } from "./words.js";
import { Wire, takeToken } from "./wire.js";

const element = (id) => document.getElementById(id);

const token = takeToken();
const wire = new Wire(token);
const runs = new Map(); // key -> summary
let opened = null; // the key of the card, of several runs
let stopping = null; // the key of the dialog
let results = null;
let isVanished = false; // whether no folder that was shown is there
const view = new View(() => ({
  runs: curves.isOwnChoice ? [...curves.chosen] : null, open: opened, tab: element("results").hidden ? "curves" : "results", zoom: curves.zoomed,
  turned: [...curves.turned],
}));

const header = new Header({ open });
const naming = new Naming({ wire, notice });
const edit = (key) => naming.open(runs.get(key));
const hidden = new Hidden();
const card = new Card(element("run"), element("card"), { wire, stop: askToStop, edit, close: () => open(null), notice });
const legend = new Legend(element("legend"), { open, point: (key) => curves.point(key, true) });
const curves = new Curves({
  wire, template: element("chart"), changed: onChosen, notice, legend,
  isHidden: (summary) => runs.size > 1 && hidden.has(summary),
});
const list = new List({
  template: element("line"), open, runs,
  choose: (key, on) => curves.choose(key, on),
  only: (keys) => curves.only(keys),
  point: (key) => curves.point(key, true),
  arranged: showResults,
  edit, hide, hidden,
});

// -- runs ---------------------------------------------------------------------------------------------------

function takeEvent(event) {
  const gone = event.all ? missing(event.runs) : event.removed;
  const lost = gone.includes(opened) ? runs.get(opened) : null;
  for (const key of gone) runs.delete(key);
  for (const summary of event.runs) runs.set(summary.key, withNan(summary));
  showVanished(event.folders, gone.length > 0, lost);
  const several = runs.size > 1;
  if (!several || !runs.has(opened)) opened = null;
  document.body.classList.toggle("several", several);
  element("list").hidden = element("unfold").hidden = !several;
  const asked = view.isRestored ? null : view.asked(runs);
  if (asked) restore(asked);
  curves.take(runs, event.runs);
  list.take(event.runs, gone);
  list.paint(curves);
  showCard(event.runs);
  header.show(runs, event.folders);
  showTabs();
  if (asked?.tab === "results" && !element("tabs").hidden) choose("results");
}

// Shows the runs, the card and the part of the axis that the link asks for.
function restore({ runs: keys, open: key, missing: names, zoom, turned, wrong }) {
  if (keys) curves.preselect(keys);
  if (key && runs.size > 1) {
    opened = key;
    curves.opened = key;
  }
  curves.zoomed = zoom;
  element("whole").hidden = zoom === null;
  curves.turned = new Set(turned);
  const missing = names.length ? `The link names runs that are not here: ${few(names)}.` : "";
  const unknown = wrong.length ? `The link asks for what the page does not have: ${few(wrong)}.` : "";
  if (missing || unknown) notice(`${missing} ${unknown}`.trim());
}

// Says so where the folder, or the run of the open card, is gone.
function showVanished(folders, hasLost, lost) {
  const isEmpty = [...runs.values()].every(({ state }) => state === "missing" || state === "gone");
  if (isEmpty && hasLost) notice(`${folders.join(", ")} was removed. Its runs appear here again when it is back.`);
  else if (lost) notice(`${lost.name} is gone: its folder ${lost.folder} was removed.`);
  else if (isVanished && !isEmpty) notice("");
  isVanished = isEmpty;
}

function missing(summaries) {
  const there = new Set(summaries.map(({ key }) => key));
  return [...runs.keys()].filter((key) => !there.has(key));
}

function showCard(changed) {
  const several = runs.size > 1;
  const key = several ? opened : runs.keys().next().value;
  const summary = runs.get(key);
  if (!summary) return card.hide();
  if (card.key === key && !changed.includes(summary)) return card.paint(curves.colour(key), several);
  if (stopping === key && !summary.can_stop) closeDialog();
  return card.show(summary, curves.colour(key), several);
}

function open(key) {
  const before = opened;
  opened = key === opened ? null : key;
  list.mark(opened);
  curves.open(opened);
  showCard([]);
  if (opened) {
    fold(false);
    card.focus();
  } else if (before) list.focus(before);
}

function hide(key, on) {
  hidden.set(runs.get(key), on);
  if (on && opened === key) open(null);
  list.arrange();
  if (on && document.activeElement === document.body) element("show-hidden").focus(); // its line had the focus
  curves.hide(key, on);
}

// The curves that are drawn are others now.
function onChosen() {
  list.paint(curves);
  if (card.key) card.paint(curves.colour(card.key), runs.size > 1);
  showResults();
}

// -- tabs ---------------------------------------------------------------------------------------------------

function showTabs() {
  const has = tab.Results && runs.size > 1 && [...runs.values()].some(({ config }) => Object.keys(config).length);
  element("tabs").hidden = !has;
  if (!has) choose("curves");
  else if (!results) {
    results = new tab.Results(element("results"), {
      wire, open, notice,
      stop: askToStop,
      toCurves: () => choose("curves"),
      only: (keys) => curves.only(keys),
      choose: (key, on) => curves.choose(key, on),
      colour: (key) => curves.colour(key),
    });
  }
  showResults();
}

function showResults() {
  if (results && !element("results").hidden) results.show(runs, { order: list.order, chosen: curves.chosen });
}

function choose(name) {
  if (element(name).hidden === false) return;
  for (const one of ["curves", "results"]) {
    element(one).hidden = one !== name;
    element(`tab-${one}`).setAttribute("aria-selected", String(one === name));
    element(`tab-${one}`).tabIndex = one === name ? 0 : -1;
  }
  if (name === "curves") curves.draw();
  showResults();
}

for (const [name, other] of [["curves", "results"], ["results", "curves"]]) {
  element(`tab-${name}`).addEventListener("click", () => choose(name));
  element(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    choose(other);
    element(`tab-${other}`).focus();
  });
}

// -- Stop ---------------------------------------------------------------------------------------------------

function askToStop(key) {
  stopping = key;
  element("confirm-title").textContent = `Stop ${runs.get(key).name}?`;
  element("confirm").showModal();
}

function closeDialog() {
  stopping = null;
  element("confirm").close();
}

async function reallyStop() {
  const key = stopping;
  closeDialog();
  if (!key) return;
  card.expectStop(key);
  try {
    await wire.post(`/api/runs/${encodeURIComponent(key)}/stop`);
    notice("");
  } catch (error) {
    notice(`${runs.get(key)?.name ?? key} was not asked to stop: ${error.message}`);
    card.read();
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
  element("link").textContent = words[link];
  document.body.classList.toggle("stale", link !== "live");
  if (link === "refused") notice(why);
}

function fold(shown) {
  document.body.classList.toggle("unfolded", shown);
  element("unfold").setAttribute("aria-expanded", String(shown));
}

element("unfold").addEventListener("click", () => fold(!document.body.classList.contains("unfolded")));
element("keep").addEventListener("click", closeDialog);
element("really").addEventListener("click", reallyStop);
element("confirm").addEventListener("cancel", () => { stopping = null; });
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("unfolded")) {
    fold(false);
    element("unfold").focus();
  } else if (opened) open(null);
});
addEventListener("hashchange", () => location.reload());

if (token) {
  wire.follow(takeEvent, showLink);
} else {
  showLink("refused", "This page needs the whole link that the monitor printed, with the token after #.");
}
