/** The page: fields for an observation, bars for what the policy makes of it. */

import { Policy } from "./policy.js";

const MOST_FIELDS = 64; // of a leaf; beyond that it is filled, not typed
const MOST_ROWS = 24; // of bars in a group
const WIDE = 1e4; // bounds further apart are none in practice
const NOT_ALLOWED = "not allowed";
const AROUND = 5; // what a slider covers where a number has no bounds

const byId = (id) => document.getElementById(id);

/** Makes an element of a class, with what is in it. */
function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Makes the heading of a leaf: its path, if it has one, and what is below. */
function heading(path, what) {
  const parts = path.length ? [path.join(" / "), what] : [what];
  return element("h3", "", ...parts.map((part) => element("span", "", part)));
}

// -- spaces ---------------------------------------------------------------------------------------

/** Returns a space in words, as Gymnasium prints it, but shorter. */
function named(space) {
  if (space.type === "Dict") return `{${space.spaces.map(([key, sub]) => `${key}: ${named(sub)}`).join(", ")}}`;
  if (space.type === "Tuple") return `(${space.spaces.map(named).join(", ")})`;
  const size = [space.n ?? space.nvec ?? space.shape].flat().join(" × ");
  return `${space.type}(${size || "1"})`;
}

/** Returns the space of a leaf. */
function leafAt(space, path) {
  return path.reduce((at, key) => {
    if (at.type === "Tuple") return at.spaces[Number(key)];
    return at.spaces.find(([name]) => String(name) === key)[1];
  }, space);
}

/** Returns one number per element of a bound, which is stored as one if all are the same. */
function each(bound, count) {
  const plain = (x) => (typeof x === "object" ? Number(x.$float.replace("inf", "Infinity")) : x);
  return Array.isArray(bound) ? bound.map(plain) : Array(count).fill(plain(bound));
}

/** Returns what each number of an observed leaf may be: `low`, `high`, and whether it is whole. */
function rangesOf(space, count) {
  const { type } = space;
  if (type === "Discrete") return [{ low: space.start, high: space.start + space.n - 1, whole: true }];
  if (type === "MultiBinary") return Array(count).fill({ low: 0, high: 1, whole: true });
  if (type === "MultiDiscrete") {
    const start = each(space.start, count);
    return space.nvec.map((n, i) => ({ low: start[i], high: start[i] + n - 1, whole: true }));
  }
  const low = each(space.low, count);
  const high = each(space.high, count);
  return low.map((x, i) => ({ low: x, high: high[i], whole: !space.dtype.startsWith("float") }));
}

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const isRanged = ({ low, high }) => high - low <= WIDE;

function normal() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

function randomNumber(range) {
  const { low, high, whole } = range;
  if (whole && isRanged(range)) return low + Math.floor(Math.random() * (high - low + 1));
  const drawn = isRanged(range) ? low + Math.random() * (high - low) : clamp(clamp(0, low, high) + normal(), low, high);
  return whole ? Math.round(drawn) : Number(drawn.toPrecision(4));
}

// -- fields of an observation ---------------------------------------------------------------------

/** One leaf of the observation: its numbers, and what shows them. `read` says what they are now. */
class Field {
  constructor(port, space, changed) {
    this.port = port;
    this.shape = port.shape.filter((n) => typeof n === "number");
    this.ranges = rangesOf(space, this.shape.reduce((a, b) => a * b, 1));
    this.isMask = port.name.startsWith("action_mask");
    this.numbers = this.ranges.map((range) => this.#blank(range));
    const control = this.isMask || space.type === "MultiBinary" ? chips : space.type === "Discrete" ? choice : sliders;
    this.control = (this.numbers.length > MOST_FIELDS ? picture : control)(this, changed);
    this.element = element("div", "", heading(port.path, named(space)), this.control.element);
  }

  #blank({ low, high }) {
    return this.isMask ? 1 : clamp(0, low, high);
  }

  fill(kind) {
    const fillers = { random: randomNumber, blank: (range) => this.#blank(range) };
    this.numbers = this.ranges.map(fillers[kind]);
    if (this.isMask && !this.numbers.includes(1)) this.numbers[0] = 1;
    this.control.show();
  }
}

function sliders(field, changed) {
  const rows = field.ranges.map((range, i) => {
    const ends = isRanged(range) ? [range.low, range.high] : [-AROUND, AROUND];
    const slider = element("input");
    const typed = element("input");
    Object.assign(slider, { type: "range", min: ends[0], max: ends[1], step: range.whole ? 1 : (ends[1] - ends[0]) / 1000 || 1 });
    Object.assign(typed, { type: "number", step: range.whole ? 1 : "any", required: true });
    slider.ariaLabel = typed.ariaLabel = `${field.port.path.join(" / ") || "obs"} ${i}`;
    slider.oninput = () => {
      field.numbers[i] = Number(Number(slider.value).toPrecision(4));
      typed.value = field.numbers[i];
      changed();
    };
    typed.oninput = () => {
      field.numbers[i] = typed.valueAsNumber;
      slider.value = typed.value;
      changed();
    };
    return { element: element("div", "row", element("span", "", String(i)), slider, typed), slider, typed };
  });
  const show = () => rows.forEach(({ slider, typed }, i) => (slider.value = typed.value = field.numbers[i]));
  show();
  return { element: element("div", "", ...rows.map((row) => row.element)), show };
}

function chips(field, changed) {
  const boxes = field.numbers.map((_, i) => {
    const box = Object.assign(element("input"), { type: "checkbox" });
    box.oninput = () => {
      field.numbers[i] = Number(box.checked);
      changed();
    };
    return box;
  });
  const show = () => boxes.forEach((box, i) => (box.checked = field.numbers[i] === 1));
  show();
  return { element: element("div", "chips", ...boxes.map((box, i) => element("label", "", box, String(i)))), show };
}

function choice(field, changed) {
  const [{ low, high }] = field.ranges;
  const select = element("select");
  for (let n = low; n <= high; n++) select.append(new Option(String(n), String(n)));
  select.ariaLabel = field.port.path.join(" / ") || "obs";
  select.oninput = () => {
    field.numbers[0] = Number(select.value);
    changed();
  };
  const show = () => (select.value = String(field.numbers[0]));
  show();
  return { element: select, show };
}

/** Shows a leaf of many numbers: an image as one, the mean of its channels. */
function picture(field) {
  const [height, width, channels = 1] = field.shape.length > 1 ? field.shape : [1, ...field.shape];
  const canvas = Object.assign(element("canvas", "image"), { width, height });
  const context = canvas.getContext("2d");
  const show = () => {
    const image = context.createImageData(width, height);
    for (let i = 0; i < width * height; i++) {
      image.data.fill(brightness(field, i * channels, channels), 4 * i, 4 * i + 3);
      image.data[4 * i + 3] = 255;
    }
    context.putImageData(image, 0, 0);
  };
  show();
  const note = element("p", "note", `${field.numbers.length.toLocaleString("en")} numbers: fill them with the buttons above.`);
  return { element: element("div", "", canvas, note), show };
}

function brightness(field, first, channels) {
  let sum = 0;
  for (let i = first; i < first + channels; i++) {
    const range = field.ranges[i];
    const [low, high] = isRanged(range) ? [range.low, range.high] : [-3, 3];
    sum += (field.numbers[i] - low) / (high - low || 1);
  }
  return (255 * sum) / channels;
}

// -- bars of an action ----------------------------------------------------------------------------

const shown = (x) => (x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5) ? String(Number(x.toPrecision(4))) : x.toExponential(2));
const percent = (p) => `${(100 * p).toFixed(1)} %`;

function row(label, parts, number, className = "") {
  return element("div", `row ${className}`, element("span", "", label), element("div", "track", ...parts), element("span", "number", number));
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
  return cells.slice(0, MOST_ROWS).flatMap((numbers, i) => [
    ...cellTitle(cells.length, i, "choice"),
    ...choiceRows(numbers, leaf.first[i], part.action[i], part.kind === "values"),
  ]);
}

function bitsOf(part) {
  return part.probabilities
    .slice(0, MOST_ROWS)
    .map((p, i) => {
      const state = part.action[i] ? "chosen" : p === null ? "forbidden" : "";
      return row(String(i), [bar(0, p ?? 0)], p === null ? NOT_ALLOWED : `${percent(p)} ${part.action[i] ? "on" : "off"}`, state);
    });
}

/** Returns a row per number, on the range it may have, with the spread of draws if it is known. */
function numbersOf(part, leaf) {
  return part.action.slice(0, MOST_ROWS).map((x, i) => {
    const spread = part.spreads?.[i] ?? [x, x];
    const low = leaf.low?.[i] ?? Math.min(-1, x, spread[0]);
    const high = leaf.high?.[i] ?? Math.max(1, x, spread[1]);
    const at = (y) => (y - low) / (high - low || 1);
    const made = row(String(i), [bar(at(spread[0]), at(spread[1])), bar(at(x), 0, "mark")], shown(x));
    made.querySelector(".track").dataset.range = `${shown(low)} … ${shown(high)}`;
    return made;
  });
}

const ROWS = { choices: choicesOf, values: choicesOf, bits: bitsOf, normal: numbersOf, squashed_normal: numbersOf, other: numbersOf };
const MEANING = {
  choices: "probability",
  values: "value of each action",
  bits: "probability of being on",
  normal: "mark: action, bar: two of three draws",
  squashed_normal: "mark: action, bar: two of three draws",
  other: "value",
};

function group(part, leaf) {
  const bars = element("div", "bars", ...ROWS[part.kind](part, leaf));
  const more = part.action.length - MOST_ROWS;
  if (more > 0) bars.append(element("p", "note", `and ${more} more`));
  return element("div", "", heading(part.path, MEANING[part.kind]), bars);
}

function facts(entries) {
  const known = entries.filter(([, text]) => text !== null);
  return known.map(([name, text]) => element("div", "", element("dt", "", name), element("dd", "", text)));
}

// -- the page -------------------------------------------------------------------------------------

function tell(error) {
  byId("fault").textContent = error.message;
  byId("fault").hidden = false;
}

function describe(policy) {
  const { spec } = policy;
  const spaces = [spec.observation_space, spec.action_space].map(named);
  document.title = `${spec.policy_class}: ${spaces.join(" → ")}`;
  byId("title").textContent = spec.policy_class;
  byId("spaces").append("sees ", element("b", "", spaces[0]), ", does ", element("b", "", spaces[1]));
  const file = spec.files.serving_default;
  const { observations, largest_difference } = spec.parity;
  byId("about").append(
    element("p", "", `Runs ${file} (SHA-256 ${spec.sha256[file].slice(0, 12)}…) with ONNX Runtime ${policy.runtimeVersion} in this browser. Nothing you enter leaves it.`),
    element("p", "", `When it was written by tfpolicies ${spec.versions.tfpolicies}, it agreed with the policy on ${observations.toLocaleString("en")} observations, to ${largest_difference.toExponential(1)}.`),
  );
}

/** Puts numbers in a line per leaf into the structure of the observation. */
function observationOf(fields) {
  if (fields.length === 1 && fields[0].port.path.length === 0) return fields[0].numbers;
  const root = {};
  for (const { port, numbers } of fields) {
    const inner = port.path.slice(0, -1).reduce((at, key) => (at[key] ??= {}), root);
    inner[port.path.at(-1)] = numbers;
  }
  return root;
}

async function start() {
  const policy = await Policy.load("model.onnx");
  const { spec } = policy;
  let steps = 0;
  let reward = null;
  let waiting = false;

  const isSampled = () => document.querySelector("[name=mode]:checked").value === "sample";

  async function act() {
    const sample = isSampled();
    try {
      const step = await policy.decide(observationOf(fields), { sample, reward: reward?.numbers[0] });
      steps += 1;
      show(step);
      byId("fault").hidden = true;
    } catch (error) {
      tell(error);
    }
  }

  function show(step) {
    const groups = step.parts.map((part, i) => group(part, spec.distribution[i]));
    byId("action").replaceChildren(...groups);
    const value = step.value === null ? null : shown(step.value);
    byId("facts").replaceChildren(
      ...facts([
        ["action", JSON.stringify(step.action, (_, x) => (typeof x === "number" ? Number(shown(x)) : x))],
        ["value of the state", value],
        ["log-probability", step.parts.some((part) => part.kind === "values") ? null : shown(step.logp)],
      ]),
    );
    byId("memory").textContent = `step ${steps} of the episode`;
  }

  /** A step of a policy without a memory is worth a button only if it draws. */
  function changedMode() {
    byId("steps").hidden = !policy.remembers && !isSampled();
    changed();
  }

  /** Acts anew where that has no consequences; several changes at once are one. */
  async function changed() {
    if (policy.remembers || waiting) return;
    waiting = true;
    await new Promise(requestAnimationFrame);
    waiting = false;
    await act();
  }

  function fill(kind) {
    for (const field of fields) field.fill(kind);
    changed();
  }

  function newEpisode() {
    policy.reset();
    steps = 0;
    byId("memory").textContent = "the episode begins with the next step";
    byId("facts").replaceChildren();
    byId("action").replaceChildren(element("p", "note", "This policy remembers: it goes on from step to step, until a new episode begins."));
  }

  const fields = policy.observedInputs.map((port) => new Field(port, leafAt(spec.observation_space, port.path), changed));
  byId("observation").append(...fields.map((field) => field.element));
  if (policy.readsRewards) {
    const port = { name: "reward", path: ["reward of the last step"], shape: ["batch"], dtype: "float32" };
    reward = new Field(port, { type: "Box", dtype: "float32", shape: [], low: -Infinity, high: Infinity }, () => {});
    byId("observation").append(reward.element);
  }
  byId("observation").onsubmit = (event) => {
    event.preventDefault();
    act();
  };
  byId("random").onclick = () => fill("random");
  byId("blank").onclick = () => fill("blank");
  byId("act").onclick = act;
  byId("reset").onclick = newEpisode;
  for (const input of document.querySelectorAll("[name=mode]")) input.oninput = changedMode;
  byId("act").textContent = policy.remembers ? "Step" : "Draw again";
  byId("steps").hidden = !policy.remembers;
  for (const id of ["reset", "memory"]) byId(id).hidden = !policy.remembers;
  describe(policy);
  document.querySelector("main").hidden = false;
  if (policy.remembers) newEpisode();
  else await act();
}

start().catch((error) => {
  byId("title").textContent = "The policy cannot be loaded";
  tell(error);
});
