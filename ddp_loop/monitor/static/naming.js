// What a user says of a run: its name and a note, which are written into its folder, and whether the list hides it.

const element = (id) => document.getElementById(id);
const STORE = "hidden runs"; // in this browser: the folders of the hidden runs, as JSON
const MOST_HIDDEN = 5000;

export class Hidden {
  constructor() {
    this.folders = new Set();
    try {
      const stored = JSON.parse(localStorage.getItem(STORE) ?? "[]");
      if (Array.isArray(stored)) this.folders = new Set(stored.filter((one) => typeof one === "string"));
    } catch {
      // Storage is off, or holds something else: nothing is hidden.
    }
  }

  has({ folder }) {
    return this.folders.has(folder);
  }

  set({ folder }, on) {
    if (on) this.folders.add(folder);
    else this.folders.delete(folder);
    try {
      localStorage.setItem(STORE, JSON.stringify([...this.folders].slice(-MOST_HIDDEN)));
    } catch {
      // Without storage it holds until the page is closed.
    }
  }
}

export class Naming {
  // asks: wire, notice(text)
  constructor(asks) {
    this.asks = asks;
    this.dialog = element("naming");
    [this.name, this.note] = [element("naming-name"), element("naming-note")];
    element("naming-not").addEventListener("click", () => this.dialog.close());
    element("naming-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
  }

  open(summary) {
    this.summary = summary;
    element("naming-title").textContent = `Name and note of ${summary.path}`;
    this.name.value = summary.name === summary.path ? "" : summary.name;
    this.name.placeholder = summary.path;
    this.note.value = summary.note ?? "";
    this.was = { name: this.name.value, note: this.note.value };
    this.dialog.showModal();
    this.name.focus();
  }

  // Writes what changed. The list shows it when the monitor has read it from the folder.
  async save() {
    const { summary } = this;
    this.dialog.close();
    this.asks.notice("");
    for (const what of ["name", "note"]) {
      const text = this[what].value.trim();
      if (text === this.was[what]) continue;
      try {
        await this.asks.wire.post(`/api/runs/${encodeURIComponent(summary.key)}/${what}`, text);
      } catch (error) {
        this.asks.notice(`The ${what} of ${summary.path} was not saved: ${error.message}`);
      }
    }
  }
}
