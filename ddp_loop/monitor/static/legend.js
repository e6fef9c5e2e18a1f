// The names of the runs that are drawn: above all charts, and with their values under the pointer.

import { write } from "./words.js";

const MOST_TIPS = 20; // runs in a tip

export class Legend {
  // asks: point(key or null), open(key)
  constructor(place, asks) {
    this.place = place;
    this.items = new Map(); // key -> button
    for (const [kind, is] of [["mouseover", true], ["mouseleave", false], ["focusin", true], ["focusout", false]]) {
      place.addEventListener(kind, (event) => asks.point(is ? (event.target.closest("button")?.dataset.run ?? null) : null));
    }
    place.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) asks.open(button.dataset.run);
    });
  }

  // runs: [{key, name}], dress(element, key) gives a run's colour
  show(runs, dress) {
    this.place.hidden = runs.length < 2;
    const keys = new Set(runs.map(({ key }) => key));
    for (const [key, button] of this.items) {
      if (keys.has(key)) continue;
      button.remove();
      this.items.delete(key);
    }
    let next = this.place.firstElementChild;
    for (const { key, name } of runs) {
      const button = this.items.get(key) ?? this.add(key);
      write(button.lastChild, name);
      button.title = name;
      dress(button, key);
      if (button === next) next = next.nextElementSibling;
      else this.place.insertBefore(button, next);
    }
  }

  add(key) {
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.dataset.run = key;
    button.append(Object.assign(document.createElement("i"), { className: "swatch" }), document.createElement("span"));
    this.items.set(key, button);
    return button;
  }
}

// The values of several runs at the pointer: the greatest first, each with its own step.
export class Tip {
  constructor(holder) {
    this.holder = holder;
    this.item = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    this.item.setAttribute("aria-hidden", "true"); // the chart's label has the values
    holder.append(this.item);
  }

  hide() {
    this.item.hidden = true;
  }

  // values: [{name, colour, kind, value, text, step, is_near}], left: of the pointer, in pixels from the plot's left edge
  show(head, values, left) {
    const height = ({ value }) => (Number.isFinite(value) ? value : -Infinity);
    const order = [...values].sort((one, other) => height(other) - height(one) || 0);
    const first = Math.max(0, Math.min(order.findIndex((one) => one.isNear) - MOST_TIPS / 2, order.length - MOST_TIPS));
    const rows = order.slice(first, first + MOST_TIPS).map(({ name, colour, kind, text, step, isNear }) => {
      const row = part("p", isNear ? "near" : "");
      const [swatch, said] = [part("i", kind), part("b", "", text)];
      swatch.style.setProperty("--run", colour);
      row.append(swatch, part("span", "name", name), said, part("span", "step", step));
      return row;
    });
    const more = order.length - rows.length;
    this.item.replaceChildren(part("p", "head", head), ...rows, ...(more > 0 ? [part("p", "head", `and ${more} more`)] : []));
    this.item.hidden = false;
    const wide = this.holder.clientWidth, own = this.item.offsetWidth;
    this.item.style.left = `${left < wide / 2 ? Math.min(left + 70, wide - own) : Math.max(0, left + 40 - own)}px`;
  }
}

function part(kind, name, text = "") {
  return Object.assign(document.createElement(kind), { className: name, textContent: text });
}
