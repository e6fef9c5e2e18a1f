// The view in the address: axis, smoothing, scale, search, order, runs, card and tab, so that a reload and a link keep it.

const element = (id) => document.getElementById(id);
const FIELDS = ["smoothing", "axis", "search", "sort"]; // controls whose value is kept under their id
const DEFAULTS = new Map(); // as the page has them at first
const EVENTS = ["change", "input", "click", "keyup", "mouseup"]; // after which the view may be another one

// The name of the scale that is not that of all charts; the link has the metrics that are drawn on it.
function otherScale() {
  return document.querySelector("[name=scale]:checked").value === "log" ? "linear" : "log";
}

export class View {
  // state(): {runs: keys or null for the usual ones, open: key or null, tab, zoom: [first, last] or null}
  constructor(state) {
    this.state = state;
    this.given = new URLSearchParams(location.search);
    this.wrong = []; // parts of the link that mean nothing here
    for (const id of FIELDS) {
      const control = element(id);
      DEFAULTS.set(id, control.value);
      control.value = this.one(id, control.options && [...control.options].map((one) => one.value)) ?? control.value;
    }
    if (this.one("scale", ["linear", "log"]) === "log") document.querySelector("[name=scale][value=log]").checked = true;
    if (this.one("marks", ["no"])) element("marks").checked = false;
    if (this.one("order", ["reverse"])) element("turn").setAttribute("aria-pressed", "true");
    for (const kind of EVENTS) document.addEventListener(kind, () => setTimeout(() => this.keep()));
  }

  // What the link says for a name, if it is one of the possible values.
  one(name, possible = null) {
    const value = this.given.get(name);
    if (value === null || !possible || possible.includes(value)) return value;
    this.wrong.push(`${name}=${value}`);
    return null;
  }

  // What the link asks for of runs, and the names among them that are not there; once.
  asked(keys) {
    const { given } = this;
    const wanted = given.has("run") ? given.getAll("run") : null, open = given.get("open");
    const zoom = (given.get("zoom") ?? "").split("~").map(Number);
    const isZoomed = given.has("zoom") && zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1];
    if (given.has("zoom") && !isZoomed) this.wrong.push(`zoom=${given.get("zoom")}`);
    const there = wanted?.filter((key) => keys.has(key)) ?? [];
    this.isRestored = true;
    return {
      runs: there.length || wanted?.includes("") ? there : null, // the usual ones where none of them is there
      open: keys.has(open) ? open : null,
      missing: [...new Set([...(wanted ?? []), ...(open === null ? [] : [open])])].filter((key) => key !== "" && !keys.has(key)),
      tab: this.one("tab", ["curves", "results"]),
      zoom: isZoomed ? zoom : null,
      turned: given.getAll(otherScale()),
      wrong: this.wrong,
    };
  }

  // Writes the view into the address. What is as at first is left out.
  keep() {
    if (!this.isRestored) return; // the runs of the link have not come yet
    const view = new URLSearchParams();
    for (const id of FIELDS) if (element(id).value !== DEFAULTS.get(id)) view.set(id, element(id).value);
    if (document.querySelector("[name=scale]:checked").value === "log") view.set("scale", "log");
    if (!element("marks").checked) view.set("marks", "no");
    if (element("turn").getAttribute("aria-pressed") === "true") view.set("order", "reverse");
    const { runs, open, tab, zoom, turned } = this.state();
    for (const key of runs ?? []) view.append("run", key);
    if (runs && !runs.length) view.append("run", ""); // none, which is not the usual choice
    if (open) view.set("open", open);
    if (tab !== "curves") view.set("tab", tab);
    if (zoom) view.set("zoom", zoom.map((one) => Number(one.toPrecision(8))).join("~"));
    for (const metric of turned) view.append(otherScale(), metric);
    const text = view.toString(), path = text ? `${location.pathname}?${text}` : location.pathname;
    if (path !== location.pathname + location.search) history.replaceState(null, "", path);
  }
}
