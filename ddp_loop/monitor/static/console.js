// The console output of a run's ranks: the end of a file, which grows while the run is under way, and older pieces.

import { html } from "./trials.js";
import { grouped } from "./words.js";

const BETWEEN_MS = 1000;
const MOST = 1 << 20; // bytes that are shown while the output is followed
const NEAR = 40; // pixels from the end at which the view still follows

export class Console {
  // asks: wire, notice(text)
  constructor(place, asks) {
    this.asks = asks;
    this.key = null;
    this.pieces = []; // {start, end, node}, in their order
    this.choice = html("select");
    this.choice.setAttribute("aria-label", "Output of");
    this.older = html("button", { type: "button", className: "older", textContent: "Older output", hidden: true });
    this.says = html("p", { className: "panel-says", role: "status" });
    this.text = html("pre", { className: "console-text", tabIndex: 0 });
    this.text.setAttribute("aria-label", "Console output");
    place.append(html("div", { className: "panel-tools" }, this.choice, this.older, this.says), this.text);
    this.choice.addEventListener("change", () => this.begin());
    this.older.addEventListener("click", () => this.readOlder());
  }

  show(key, names, isUnderWay) {
    const isOther = key !== this.key;
    this.key = key;
    this.isUnderWay = isUnderWay;
    const kept = isOther ? names[0] : this.choice.value;
    if ([...this.choice.options].map(({ value }) => value).join() !== names.join()) {
      this.choice.replaceChildren(...names.map((name) => html("option", { value: name, textContent: titleOf(name) })));
      this.choice.value = names.includes(kept) ? kept : names[0];
    }
    if (isOther || this.choice.value !== this.name) this.begin();
    else this.follow();
  }

  hide() {
    this.key = null;
    this.name = null;
    clearTimeout(this.later);
  }

  begin() {
    this.name = this.choice.value;
    this.pieces = [];
    this.text.replaceChildren();
    this.file = null;
    this.follow();
  }

  async ask(parameters) {
    const { key, name } = this;
    const asked = new URLSearchParams({ name, ...parameters });
    const found = await this.asks.wire.read(`/api/runs/${encodeURIComponent(key)}/console?${asked}`);
    return key === this.key && name === this.name ? found : null;
  }

  // Reads what is new, again and again while the run is under way.
  async follow() {
    clearTimeout(this.later);
    if (!this.key || this.reading) return;
    this.reading = true;
    let hasMore = false;
    try {
      const last = this.pieces.at(-1);
      const found = document.hidden ? null : await this.ask(last ? { first: last.end } : {});
      if (found && last && (found.file !== this.file || found.size < last.end)) {
        this.pieces = []; // the run has begun anew
        this.text.replaceChildren();
        hasMore = true;
      } else if (found) {
        this.file = found.file;
        this.append(found);
        hasMore = Boolean(last) && found.text !== "" && found.end < found.size;
      }
    } catch (error) {
      this.says.textContent = error.message;
    } finally {
      this.reading = false;
    }
    if (hasMore || (this.key && this.name !== this.choice.value)) this.follow();
    else if (this.key && this.isUnderWay) this.later = setTimeout(() => this.follow(), BETWEEN_MS);
  }

  append({ start, end, size, text }) {
    const { scrollTop, scrollHeight, clientHeight } = this.text;
    const atEnd = !this.pieces.length || scrollTop + clientHeight > scrollHeight - NEAR;
    if (text || !this.pieces.length) {
      const node = document.createTextNode(text);
      this.pieces.push({ start, end, node });
      this.text.append(node);
    }
    while (atEnd && this.pieces.length > 1 && end - this.pieces[1].start > MOST) this.pieces.shift().node.remove();
    this.tell(size);
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  async readOlder() {
    this.older.disabled = true;
    try {
      const found = await this.ask({ before: this.pieces[0].start });
      if (found) {
        const node = document.createTextNode(found.text);
        const { scrollHeight, scrollTop } = this.text;
        this.pieces.unshift({ start: found.start, end: found.end, node });
        this.text.prepend(node);
        this.text.scrollTop = scrollTop + this.text.scrollHeight - scrollHeight; // what was in view stays there
        this.tell(found.size);
      }
    } catch (error) {
      this.says.textContent = error.message;
    }
    this.older.disabled = false;
  }

  tell(size) {
    const [first, last] = [this.pieces[0].start, this.pieces.at(-1).end];
    this.older.hidden = first === 0;
    const shown = last - first;
    this.says.textContent = size === 0 ? "no output" : shown === size ? "" : `${kib(shown)} of ${kib(size)} KiB`;
  }
}

function titleOf(name) {
  return name === "continued" ? "the last Continue" : name.replace("-", " ");
}

function kib(bytes) {
  return grouped(Math.ceil(bytes / 1024));
}
