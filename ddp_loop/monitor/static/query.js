// The search of the list and the filter of the table: words, and conditions such as rate=0.1 loss<0.5 status="timed out".

const WORD = /(?:[^\s"]|"[^"]*"?)+/g;
const CONDITION = /^("[^"]*"|[^=<>!"]+)(<=|>=|!=|==?|<|>)(.*)$/;
const BEST = "best ", EVALUATED = /^(best )?eval(?:uated)? /;
const OF_EPOCHS = /^(best )?epoch /; // columns of `ddp_loop runs`, which the page does not read
const MOST_BEFORE = 3; // words of a name without quotes before its last one
const SPECIAL = /[*?^$|()[\]\\+]/;
const ORDERS = new Map([
  ["<", (one, limit) => one < limit], [">", (one, limit) => one > limit],
  ["<=", (one, limit) => one <= limit], [">=", (one, limit) => one >= limit],
]);

// What is searched of a run: its text, and its values by name. Names come from users, so one name can mean several values.
export class Searched {
  constructor({ name, path, folder, state, note, why, config, last, best, trial, iteration, epoch, elapsed_s: time }) {
    this.names = new Map();
    const own = { name, run: name, path: path ?? name, folder, status: state, state, note: note ?? "", why: why ?? "",
      value: trial?.value ?? null, objective: trial?.value ?? null, trial: trial?.number ?? null, steps: iteration, epoch, time };
    for (const [kind, values] of [["", own], ["", config], ["", last], [BEST, best]]) {
      for (const [one, value] of Object.entries(values ?? {})) {
        const key = (kind + one).toLowerCase();
        if (this.names.has(key)) this.names.get(key).push(value);
        else this.names.set(key, [value]);
      }
    }
    const words = Object.entries(config ?? {}).map(([one, value]) => `${one}=${value}`);
    this.text = [name, path ?? "", state, note ?? "", why ?? "", ...words].join(" ").toLowerCase();
  }

  // The values that a name can mean, none for an unknown name; "rate" is also the end of "optimizer.rate".
  valuesOf(asked) {
    const name = asked.replace(EVALUATED, "$1evaluation."); // as `ddp_loop runs` has it
    const exact = this.names.get(name) ?? [];
    if (exact.some((value) => value !== null && !Number.isNaN(value))) return exact;
    const kind = name.startsWith(BEST) ? BEST : "", end = `.${name.slice(kind.length)}`;
    const further = [...this.names].filter(([one]) => one.startsWith(BEST) === (kind === BEST) && one.endsWith(end));
    return [...exact, ...further.flatMap(([, values]) => values)];
  }
}

// Returns the conditions of a text: {test(row), says} with what is wrong with the text, if anything.
// Rows are Searched. The value after = is the beginning of a value where no row has exactly this one.
export function parse(text, rows) {
  const tests = [], wrong = [];
  for (const word of wordsOf(text, rows)) {
    const [, given, sign, quoted] = word.match(CONDITION) ?? [];
    const [name, value, plain] = [given ?? "", quoted ?? "", word].map((one) => one.replaceAll('"', ""));
    const pattern = asPattern(plain);
    const hasText = (row) => row.text.includes(plain) || (pattern?.test(row.text) ?? false);
    if (sign === undefined) tests.push(hasText);
    else if (value === "") continue; // while it is typed
    else if (!rows.some((row) => row.valuesOf(name).length)) {
      if (!rows.some(hasText)) wrong.push(`No column is called ${name}${OF_EPOCHS.test(name) ? ": only ddp_loop runs has means over epochs" : ""}.`);
      tests.push(hasText); // a run's name can have such a sign
    } else if (ORDERS.has(sign)) {
      const limit = Number(value), order = ORDERS.get(sign);
      if (Number.isNaN(limit)) wrong.push(`${value} is no number.`);
      tests.push((row) => row.valuesOf(name).some((one) => typeof one === "number" && order(one, limit)));
    } else {
      const equals = (row) => row.valuesOf(name).some((one) => isEqual(one, value));
      const begins = (row) => row.valuesOf(name).some((one) => asText(one).startsWith(value));
      const meets = rows.some(equals) ? equals : begins;
      tests.push(sign === "!=" ? (row) => !meets(row) : meets);
    }
  }
  return { test: (row) => tests.every((one) => one(row)), says: wrong.join(" ") };
}

// The words of a text, each condition with its whole name.
function wordsOf(text, rows) {
  const words = [];
  for (const word of text.toLowerCase().match(WORD) ?? []) {
    const many = before(word.match(CONDITION)?.[1] ?? '"', words, rows);
    words.push([...words.splice(words.length - many), word].join(" "));
  }
  return words;
}

// How many of the words before a condition belong to its name: those that make it the name of a value, as in
// best loss<0.1, or one that is in no row's text.
function before(name, words, rows) {
  if (name.startsWith('"')) return 0;
  const isPlain = (word) => !/[=<>!"]/.test(word) && !SPECIAL.test(word);
  const plain = words.slice(words.findLastIndex((word) => !isPlain(word)) + 1).slice(-MOST_BEFORE);
  for (let many = plain.length; many; many -= 1) {
    const whole = [...plain.slice(-many), name].join(" ");
    if (rows.some((row) => row.valuesOf(whole).length)) return many;
  }
  return plain.length && !rows.some(({ text }) => text.includes(plain.at(-1))) ? 1 : 0;
}

// A regular expression; a * that follows no other sign stands for any letters of a word. None for plain text, nor while
// it is typed.
function asPattern(plain) {
  if (!SPECIAL.test(plain)) return null;
  try {
    return new RegExp(plain.replace(/(^|[\w/=-])\*/g, "$1\\S*"));
  } catch {
    return null;
  }
}

function isEqual(one, value) {
  return typeof one === "number" ? one === Number(value) : asText(one) === value;
}

function asText(one) {
  return String(one ?? "none").toLowerCase();
}
