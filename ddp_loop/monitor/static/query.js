// The filter of the results: words, and conditions such as rate=0.1 loss<0.5 status="timed out".

const WORD = /(?:[^\s"]|"[^"]*"?)+/g;
const CONDITION = /^("[^"]*"|[^=<>!"]+)(<=|>=|!=|=|<|>)(.*)$/;
const ORDERS = new Map([
  ["<", (one, limit) => one < limit], [">", (one, limit) => one > limit],
  ["<=", (one, limit) => one <= limit], [">=", (one, limit) => one >= limit],
]);

// Returns the conditions of a text: {test(row), says} with what is wrong with the text, if anything.
// A row has text (in small letters) and valuesOf(name), the values that a name can mean, none for an unknown name.
// isKnown(name) is whether any row has such a name.
export function parse(text, isKnown) {
  const tests = [], wrong = [];
  for (const word of text.toLowerCase().match(WORD) ?? []) {
    const [, given, sign, quoted] = word.match(CONDITION) ?? [];
    const [name, value] = [given ?? "", quoted ?? word].map((one) => one.replaceAll('"', ""));
    if (sign === undefined) tests.push((row) => row.text.includes(value));
    else if (value === "") continue; // while it is typed
    else if (!isKnown(name)) {
      wrong.push(`No column is called ${name}.`);
      tests.push(() => false);
    } else if (ORDERS.has(sign)) {
      const limit = Number(value), order = ORDERS.get(sign);
      if (Number.isNaN(limit)) wrong.push(`${value} is no number.`);
      tests.push((row) => row.valuesOf(name).some((one) => typeof one === "number" && order(one, limit)));
    } else {
      const equals = (row) => row.valuesOf(name).some((one) => isEqual(one, value));
      tests.push(sign === "=" ? equals : (row) => !equals(row));
    }
  }
  return { test: (row) => tests.every((one) => one(row)), says: wrong.join(" ") };
}

function isEqual(one, value) {
  if (typeof one === "number") return one === Number(value);
  return String(one ?? "none").toLowerCase() === value;
}
