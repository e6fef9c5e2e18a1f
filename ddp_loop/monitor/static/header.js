// The head of the page: the folders that are shown, the best of their runs, and the title of the window.

import { LOSSES, isUnderWay, number, titled, write } from "./words.js";

const element = (id) => document.getElementById(id);

export class Header {
  // asks: open(key)
  constructor(asks) {
    this.best = null; // the key of a run
    element("best").addEventListener("click", () => asks.open(this.best));
  }

  show(runs, folders) {
    const all = [...runs.values()];
    write(element("folders"), folders.join(", "));
    element("folders").title = folders.join("\n");
    write(element("unfold"), `Runs (${all.length})`);
    this.showBest(all);
    const [first] = all, many = all.filter(isUnderWay).length;
    const far = typeof first?.fraction === "number" ? `${Math.floor(100 * first.fraction)} % ` : "";
    if (all.length > 1) document.title = `${many ? `${many} running · ` : ""}${all.length} runs`;
    else document.title = first ? `${far}${first.name} · ${first.state}` : "Runs";
  }

  showBest(all) {
    const { title, turn, of } = measureOf(all);
    const found = all.filter((run) => Number.isFinite(of(run)));
    const best = found.reduce((one, other) => (one && turn * of(one) <= turn * of(other) ? one : other), null);
    element("best").parentElement.hidden = best === null || all.length < 2;
    this.best = best?.key ?? null;
    if (best === null) return;
    write(element("best"), best.name);
    write(element("best-value"), `${titled(title)} ${number(of(best))}`);
  }
}

// What runs are compared by: the objective of a sweep that has them all, the eval loss, or the loss.
function measureOf(all) {
  const objectives = new Set(all.map(({ trial }) => JSON.stringify([trial?.objective, trial?.direction])));
  const trial = all[0]?.trial;
  if (objectives.size === 1 && trial?.objective) {
    return { title: trial.objective, turn: trial.direction === "maximize" ? -1 : 1, of: (run) => run.trial.value };
  }
  const name = LOSSES.find((one) => all.some(({ best }) => one in best)) ?? "loss";
  return { title: name, turn: 1, of: ({ best }) => best[name] };
}
