// The panels of a run's card, one of which is open: console, usage, texts, images, tables. Continue is beside Stop.

import { Matrix } from "./confusion.js";
import { Console } from "./console.js";
import { Images, Texts } from "./logged.js";
import { html } from "./trials.js";
import { Usage } from "./usage.js";
import { grouped, isUnderWay, write } from "./words.js";

class Tables {
  constructor(place, asks) {
    this.matrix = new Matrix(html("div", { className: "matrix-place" }), asks, false);
    place.append(this.matrix.place);
  }

  show(key, tables, _, said) {
    const trial = { key, name: said.name, summary: said };
    if (key === this.key && tables.join("\n") === this.names) return this.matrix.refresh(new Map([[key, trial]]));
    [this.key, this.names] = [key, tables.join("\n")];
    return this.matrix.open(trial, false);
  }

  hide() {
    this.key = null;
    this.matrix.close();
  }
}

const KINDS = [ // name, title, its part of the card, how many there are
  ["console", "Console", Console, (said) => said.console?.length, (said) => said.console, false],
  ["usage", "Processor and memory", Usage, (said) => said.usage, (said) => said.usage, false],
  ["texts", "Texts", Texts, (said) => said.texts, (said) => said.texts, true],
  ["images", "Images", Images, (said) => said.images, (said) => said.images, true],
  ["tables", "Tables", Tables, (said) => said.tables?.length, (said) => said.tables, true],
];

export class Panels {
  // asks: wire, notice(text)
  constructor(place, asks) {
    this.asks = asks;
    this.opened = null;
    this.bar = html("div", { className: "panel-bar" });
    this.parts = new Map();
    place.append(this.bar);
    for (const [name, title, Kind, , , counts] of KINDS) {
      const button = html("button", { type: "button", hidden: true });
      const body = html("section", { className: "panel", hidden: true, id: `panel-${name}` });
      button.dataset.panel = body.dataset.panel = name;
      body.setAttribute("aria-label", title);
      button.setAttribute("aria-controls", body.id);
      button.setAttribute("aria-expanded", "false");
      button.addEventListener("click", () => this.open(this.opened === name ? null : name));
      this.bar.append(button);
      place.append(body);
      this.parts.set(name, { button, body, title, Kind, counts, panel: null });
    }
    this.place = place;
  }

  // said: the card's summary and details.
  show(said) {
    this.said = said;
    let any = false;
    for (const [name, title, , many, , counts] of KINDS) {
      const { button } = this.parts.get(name);
      const there = many(said) || 0;
      any ||= there > 0;
      button.hidden = !there;
      write(button, counts ? `${title} (${grouped(there)})` : title);
    }
    this.place.hidden = !any;
    this.fill();
  }

  open(name) {
    this.opened = name;
    this.fill();
  }

  hide() {
    this.said = null;
    this.fill();
  }

  fill() {
    for (const [name, , , many, of] of KINDS) {
      const part = this.parts.get(name);
      const isOpen = this.said !== null && this.opened === name && many(this.said) > 0;
      part.button.setAttribute("aria-expanded", String(isOpen));
      part.body.hidden = !isOpen;
      if (isOpen) {
        part.panel ??= new part.Kind(part.body, this.asks);
        part.panel.show(this.said.key, of(this.said), isUnderWay(this.said), this.said);
      } else part.panel?.hide();
    }
  }
}
