// Continue: shows the command that started a run, asks for the secrets that no file keeps, and has it started again.

import { html } from "./trials.js";
import { label, write } from "./words.js";

const element = (id) => document.getElementById(id);
const LOOKS = 300, BETWEEN_MS = 1000; // at a card whose command was started, until its run has begun

export class Continuing {
  // asks: wire, notice(text), read() of the card
  constructor(button, line, asks) {
    this.button = button;
    this.line = line;
    this.asks = asks;
    this.dialog = element("go-on");
    button.addEventListener("click", () => this.ask());
    this.dialog.addEventListener("close", () => element("go-on-secrets").replaceChildren());
    element("go-on-not").addEventListener("click", () => this.dialog.close());
    element("go-on-really").addEventListener("click", () => this.start());
  }

  show(said) {
    const { continuing } = said;
    this.said = said;
    const isShown = Boolean(continuing) && (continuing.can || continuing.is_starting);
    this.button.hidden = !isShown;
    this.button.disabled = !continuing?.can;
    label(this.button, continuing?.is_starting ? "Starting…" : "Continue", said.name);
    const why = continuing?.failed ?? (continuing?.why ? `Continue is not offered: ${continuing.why}` : "");
    write(this.line, why);
    this.line.hidden = !why;
    if (this.dialog.open && this.asked?.key === said.key && !continuing?.can) this.dialog.close();
    if (continuing?.is_starting) this.lookAgain(said.key);
    else this.looks = 0;
  }

  // Nothing in the folder changes if the command fails before its run has begun.
  lookAgain(key) {
    clearTimeout(this.later);
    this.looks = (this.looks ?? 0) + 1;
    if (this.looks > LOOKS) return;
    this.later = setTimeout(() => { if (this.said?.key === key) this.asks.read(); }, BETWEEN_MS);
  }

  ask() {
    this.asked = { key: this.said.key, name: this.said.name, digest: this.said.continuing.digest };
    write(element("go-on-title"), `Continue ${this.asked.name}?`);
    write(element("go-on-command"), visible(this.said.continue ?? ""));
    element("go-on-secrets").replaceChildren(...this.said.continuing.lacks.map(field));
    this.dialog.showModal();
  }

  async start() {
    const inputs = [...element("go-on-secrets").querySelectorAll("input")];
    const empty = inputs.find((input) => !input.value);
    if (empty) return empty.focus();
    const { key, name, digest } = this.asked;
    const body = [digest, ...inputs.map((input) => input.value)].join("\n");
    this.dialog.close();
    try {
      await this.asks.wire.post(`/api/runs/${encodeURIComponent(key)}/continue`, body);
      this.asks.notice("");
    } catch (error) {
      this.asks.notice(`${name} was not continued: ${error.message}`);
    }
    this.asks.read();
  }
}

function field(name) {
  const input = html("input", { type: "password", autocomplete: "off" });
  return html("label", {}, `${visible(name)}, which the run folder does not keep`, input);
}

// A command as it is, also where it has letters that are not seen or that turn the direction of writing.
function visible(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`);
}
