// The view in the address: axis, smoothing, scale, search, order, runs, card and tab, so that a reload and a link keep it.

const element = (id) => document.getElementById(id);
const FIELDS = ["smoothing", "axis", "search", "sort"]; // controls whose value is kept under their id
const DEFAULTS = new Map(); // as the page has them at first
const EVENTS = ["change", "input", "click", "keyup", "mouseup"]; // after which the view may be another one

export class View {
  // state(): {runs: keys or null for the usual ones, open: key or null, tab, zoom: [first, last] or null}
  constructor(state) {
    this.state = state;
    this.given = new URLSearchParams(location.search);
    for (const id of FIELDS) {
      const control = element(id), value = this.given.get(id);
      DEFAULTS.set(id, control.value);
      if (value !== null && (control.tagName !== "SELECT" || [...control.options].some((one) => one.value === value))) control.value = value;
    }
    if (this.given.get("scale") === "log") document.querySelector("[name=scale][value=log]").checked = true;
    if (this.given.get("marks") === "no") element("marks").checked = false;
    if (this.given.get("order") === "reverse") element("turn").setAttribute("aria-pressed", "true");
    for (const kind of EVENTS) document.addEventListener(kind, () => setTimeout(() => this.keep()));
  }

  // What the link asks for of runs, and the names among them that are not there; once.
  asked(keys) {
    const { given } = this;
    const wanted = given.has("run") ? given.getAll("run") : null, open = given.get("open");
    const zoom = (given.get("zoom") ?? "").split("~").map(Number);
    const isZoomed = given.has("zoom") && zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1];
    this.isRestored = true;
    return {
      runs: wanted?.filter((key) => keys.has(key)) ?? null,
      open: keys.has(open) ? open : null,
      missing: [...new Set([...(wanted ?? []), ...(open === null ? [] : [open])])].filter((key) => key !== "" && !keys.has(key)),
      tab: given.get("tab"),
      zoom: isZoomed ? zoom : null,
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
    const { runs, open, tab, zoom } = this.state();
    for (const key of runs ?? []) view.append("run", key);
    if (runs && !runs.length) view.append("run", ""); // none, which is not the usual choice
    if (open) view.set("open", open);
    if (tab !== "curves") view.set("tab", tab);
    if (zoom) view.set("zoom", zoom.map((one) => Number(one.toPrecision(8))).join("~"));
    const text = view.toString(), path = text ? `${location.pathname}?${text}` : location.pathname;
    if (path !== location.pathname + location.search) history.replaceState(null, "", path);
  }
}
