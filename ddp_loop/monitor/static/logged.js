// What a script has logged: texts, the newest first, and images, with a step to choose for each name.

import { html } from "./trials.js";
import { grouped } from "./words.js";

const MANY = 24; // names of images that are shown at once

function runPath(key, rest) {
  return `/api/runs/${encodeURIComponent(key)}/${rest}`;
}

export class Texts {
  // asks: wire, notice(text)
  constructor(place, asks) {
    this.asks = asks;
    this.key = null;
    this.choice = html("select", { className: "names" });
    this.choice.setAttribute("aria-label", "Texts named");
    this.says = html("p", { className: "panel-says", role: "status" });
    this.list = html("ol", { className: "texts" });
    this.older = html("button", { type: "button", className: "older", textContent: "Older texts", hidden: true });
    place.append(html("div", { className: "panel-tools" }, this.choice, this.says), this.list, this.older);
    this.choice.addEventListener("change", () => this.read());
    this.older.addEventListener("click", () => this.read(this.last));
  }

  show(key, many) {
    if (key === this.key && many === this.many) return;
    if (key !== this.key) {
      this.list.replaceChildren();
      this.choice.replaceChildren();
    }
    [this.key, this.many] = [key, many];
    this.read();
  }

  hide() {
    this.key = null;
  }

  async read(before = null) {
    const { key } = this;
    const asked = new URLSearchParams();
    if (this.choice.selectedIndex > 0) asked.set("name", this.choice.value);
    if (before !== null) asked.set("before", before);
    try {
      const found = await this.asks.wire.read(runPath(key, `texts?${asked}`));
      if (key !== this.key) return;
      this.fill(found, before !== null);
      if (found.is_behind) this.read(before);
    } catch (error) {
      this.says.textContent = error.message;
    }
  }

  fill({ names, texts, has_older: hasOlder, dropped, unreadable }, isOlder) {
    const chosen = this.choice.selectedIndex > 0 ? this.choice.value : null;
    this.choice.replaceChildren(
      html("option", { value: "", textContent: "all names" }),
      ...names.map(([name, many]) => html("option", { value: name, textContent: `${name} (${grouped(many)})` })),
    );
    const at = names.findIndex(([name]) => name === chosen);
    this.choice.selectedIndex = at + 1;
    const parts = [];
    if (dropped) parts.push(`the ${grouped(dropped)} oldest are left out`);
    if (unreadable) parts.push(`${grouped(unreadable)} lines cannot be read`);
    this.says.textContent = parts.join(", ");
    const items = texts.map((text) => this.item(text));
    if (isOlder) this.list.append(...items);
    else {
      const opened = new Map([...this.list.children].filter((one) => one.classList.contains("whole")).map((one) => [one.dataset.number, one]));
      this.list.replaceChildren(...items.map((one) => {
        const before = opened.get(one.dataset.number);
        return before && before.dataset.start === one.dataset.start ? before : one; // what was opened stays so
      }));
    }
    this.last = texts.at(-1)?.number ?? null;
    this.older.hidden = !hasOlder;
  }

  item({ number, name, iteration, start, letters }) {
    const body = html("pre", { textContent: start });
    const head = html("p", {}, html("b", { textContent: name }), html("span", { textContent: ` step ${grouped(iteration)}` }));
    const item = html("li", {}, head, body);
    item.dataset.number = String(number);
    item.dataset.start = start;
    if (letters > start.length) {
      body.textContent += "…";
      const more = html("button", { type: "button", textContent: `Show all ${grouped(letters)} letters` });
      more.setAttribute("aria-label", `${more.textContent} of ${name}, step ${iteration}`);
      more.addEventListener("click", () => this.open(item, body, more, number));
      item.append(more);
    }
    return item;
  }

  async open(item, body, more, number) {
    more.disabled = true;
    try {
      body.textContent = (await this.asks.wire.read(runPath(this.key, `texts?number=${number}`))).text;
      item.classList.add("whole");
      more.remove();
    } catch (error) {
      this.says.textContent = error.message;
      more.disabled = false;
    }
  }
}

// Images are fetched with the token when they come into view, and drawn on a canvas.
export class Images {
  // asks: wire
  constructor(place, asks) {
    this.asks = asks;
    this.key = null;
    this.figures = new Map(); // name -> Picture
    this.says = html("p", { className: "panel-says", role: "status" });
    this.grid = html("div", { className: "images" });
    this.more = html("button", { type: "button", className: "older", textContent: "More images", hidden: true });
    this.most = MANY;
    place.append(this.says, this.grid, this.more);
    this.more.addEventListener("click", () => {
      this.most += MANY;
      this.fill();
    });
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) target.picture.isSeen = isIntersecting;
      for (const { target } of entries) target.picture.draw();
    });
  }

  show(key, many) {
    if (key === this.key && many === this.many) return;
    if (key !== this.key) this.clear();
    [this.key, this.many] = [key, many];
    this.read();
  }

  hide() {
    this.key = null;
    this.clear();
  }

  clear() {
    this.seen.disconnect();
    this.figures.clear();
    this.grid.replaceChildren();
    this.most = MANY;
  }

  async read() {
    const { key } = this;
    try {
      const found = await this.asks.wire.read(runPath(key, "images"));
      if (key !== this.key) return;
      this.found = found;
      this.fill();
      if (found.is_behind) this.read();
    } catch (error) {
      this.says.textContent = error.message;
    }
  }

  fill() {
    const { names, left_out: leftOut, unreadable } = this.found;
    const parts = [];
    if (leftOut) parts.push(`${grouped(leftOut)} older images are left out`);
    if (unreadable) parts.push(`${grouped(unreadable)} lines cannot be read`);
    this.says.textContent = parts.join(", ");
    for (const { name, images } of names.slice(0, Math.max(this.most, this.figures.size))) {
      let picture = this.figures.get(name);
      if (!picture) {
        picture = new Picture(name, this.asks.wire, this.key);
        this.figures.set(name, picture);
        this.grid.append(picture.figure);
        this.seen.observe(picture.figure);
      }
      picture.take(images);
    }
    this.more.hidden = names.length <= this.figures.size;
  }
}

class Picture {
  constructor(name, wire, key) {
    [this.name, this.wire, this.key] = [name, wire, key];
    this.canvas = html("canvas", { hidden: true });
    this.canvas.setAttribute("role", "img");
    this.why = html("p", { className: "why", hidden: true });
    this.step = html("input", { type: "range", min: 0, hidden: true });
    this.step.setAttribute("aria-label", `Step of ${name}`);
    this.label = html("span", { className: "step" });
    const title = html("figcaption", {}, html("span", { className: "title", textContent: name }), this.label);
    this.figure = html("figure", { className: "logged-image" }, title, this.canvas, this.why, this.step);
    this.figure.dataset.name = name;
    this.figure.picture = this;
    this.images = [];
    this.step.addEventListener("input", () => this.draw());
  }

  // images: [number, step, width, height], rising.
  take(images) {
    const atEnd = Number(this.step.value) === this.images.length - 1 || !this.images.length;
    this.images = images;
    this.step.max = String(images.length - 1);
    if (atEnd) this.step.value = String(images.length - 1); // the newest one, unless another was chosen
    this.step.hidden = images.length < 2;
    this.draw();
  }

  async draw() {
    const [number, iteration] = this.images[Number(this.step.value)] ?? this.images.at(-1);
    this.label.textContent = `step ${grouped(iteration)}`;
    this.step.setAttribute("aria-valuetext", `step ${iteration}`);
    const wanted = `${number} ${iteration}`;
    if (!this.isSeen || this.drawn === wanted || this.fetching) return;
    this.fetching = true;
    let why = "";
    try {
      const file = await this.wire.file(runPath(this.key, `images/${number}`));
      const bitmap = await createImageBitmap(file);
      [this.canvas.width, this.canvas.height] = [bitmap.width, bitmap.height];
      this.canvas.getContext("2d").drawImage(bitmap, 0, 0);
      this.canvas.classList.toggle("small", bitmap.width < 200);
      this.canvas.setAttribute("aria-label", `${this.name}, step ${iteration}, ${bitmap.width} x ${bitmap.height} pixels`);
      bitmap.close();
    } catch (error) {
      why = error instanceof DOMException ? "The image file is damaged." : error.message;
    }
    this.canvas.hidden = why !== "";
    this.why.hidden = why === "";
    this.why.textContent = why;
    this.drawn = wanted;
    this.figure.dataset.drawn = String(iteration);
    this.fetching = false;
    this.draw(); // another step may have been chosen meanwhile
  }
}
