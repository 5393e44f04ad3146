/** Bars for actions and their distributions. */

import { clamp, element, heading, shown } from "./elements.js";

const MOST_ROWS = 24; // of bars in a group
const NOT_ALLOWED = "not allowed";

const percent = (p) => `${(100 * p).toFixed(1)} %`;

function row(label, parts, number, className = "") {
  return element(
    "div",
    `row ${className}`,
    element("span", "", label),
    element("div", "track", ...parts),
    element("span", "number", number),
  );
}

function bar(from, to, className = "") {
  const made = element("div", className);
  made.style.left = `${100 * clamp(from, 0, 1)}%`;
  if (className !== "mark") made.style.width = `${100 * clamp(to - from, 0, 1)}%`;
  return made;
}

/** Returns rows for the choices of a cell: their probabilities, or their values. */
function choiceRows(numbers, first, chosen, isValue) {
  const known = numbers.filter((x) => x !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const length = (x) => (isValue ? 0.04 + (0.96 * (x - low)) / (high - low || 1) : x);
  const order = numbers.map((_, i) => i);
  if (order.length > MOST_ROWS) order.sort((a, b) => numbers[b] - numbers[a]);
  const rows = order.slice(0, MOST_ROWS).map((i) => {
    const x = numbers[i];
    const number = x === null ? NOT_ALLOWED : isValue ? shown(x) : percent(x);
    const state = first + i === chosen ? "chosen" : x === null ? "forbidden" : "";
    return row(String(first + i), x === null ? [] : [bar(0, length(x))], number, state);
  });
  const others = order.length - rows.length;
  return others > 0 ? [...rows, element("p", "note", `${others} less likely ones`)] : rows;
}

function cellTitle(count, cell, text) {
  return count > 1 ? [element("p", "note", `${text} ${cell}`)] : [];
}

function choicesOf(part, leaf) {
  const cells = part.probabilities ?? part.values;
  return cells
    .slice(0, MOST_ROWS)
    .flatMap((numbers, i) => [
      ...cellTitle(cells.length, i, "choice"),
      ...choiceRows(numbers, leaf.first[i], part.action[i], part.kind === "values"),
    ]);
}

function bitsOf(part) {
  return part.probabilities.slice(0, MOST_ROWS).map((p, i) => {
    const state = part.action[i] ? "chosen" : p === null ? "forbidden" : "";
    return row(
      String(i),
      [bar(0, p ?? 0)],
      p === null ? NOT_ALLOWED : `${percent(p)} ${part.action[i] ? "on" : "off"}`,
      state,
    );
  });
}

/** Returns a row per number, within its range, with the spread of draws if it is known. */
function numbersOf(part, leaf) {
  return part.action.slice(0, MOST_ROWS).map((x, i) => {
    const spread = part.spreads?.[i] ?? [x, x];
    const low = leaf.low?.[i] ?? Math.min(-1, x, spread[0]);
    const high = leaf.high?.[i] ?? Math.max(1, x, spread[1]);
    const at = (y) => (y - low) / (high - low || 1);
    const made = row(
      String(i),
      [bar(at(spread[0]), at(spread[1])), bar(at(x), 0, "mark")],
      shown(x),
    );
    made.querySelector(".track").dataset.range = `${shown(low)} … ${shown(high)}`;
    return made;
  });
}

const ROWS = {
  choices: choicesOf,
  values: choicesOf,
  bits: bitsOf,
  normal: numbersOf,
  squashed_normal: numbersOf,
  other: numbersOf,
};
const MEANING = {
  choices: "probability",
  values: "value of each action",
  bits: "probability of being on",
  normal: "mark: action, bar: two of three draws",
  squashed_normal: "mark: action, bar: two of three draws",
  other: "value",
};

/** Creates the bars of a leaf of the action, from its part of `decide` and its record in the spec. */
export function group(part, leaf) {
  const bars = element("div", "bars", ...ROWS[part.kind](part, leaf));
  const more = part.action.length - MOST_ROWS;
  if (more > 0) bars.append(element("p", "note", `and ${more} more`));
  return element("div", "", heading(part.path, MEANING[part.kind]), bars);
}
