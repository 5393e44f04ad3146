/** Texts for spaces, and fields for observations. */

import { clamp, element, heading } from "./elements.js";
import { isMask, product, rangesOf } from "./policy.js";

const MOST_FIELDS = 64; // of a leaf; larger ones are filled by buttons
const WIDE = 1e4; // wider bounds are ignored
const AROUND = 5; // the range of a slider for a number without bounds

/** Returns a text for a space, shorter than Gymnasium's. */
export function named(space) {
  if (space.type === "Dict")
    return `{${space.spaces.map(([key, sub]) => `${key}: ${named(sub)}`).join(", ")}}`;
  if (space.type === "Tuple") return `(${space.spaces.map(named).join(", ")})`;
  const size = [space.n ?? space.nvec ?? space.shape].flat().join(" × ");
  return `${space.type}(${size || "1"})`;
}

const isRanged = ({ low, high }) => high - low <= WIDE;

function normal() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

function randomNumber(range) {
  const { low, high, whole } = range;
  if (whole && isRanged(range)) return low + Math.floor(Math.random() * (high - low + 1));
  const drawn = isRanged(range)
    ? low + Math.random() * (high - low)
    : clamp(clamp(0, low, high) + normal(), low, high);
  return whole ? Math.round(drawn) : Number(drawn.toPrecision(4));
}

/** One leaf of the observation: its numbers, and the control that shows them. */
export class Field {
  constructor(port, space, changed) {
    this.port = port;
    this.shape = port.shape.filter((n) => typeof n === "number");
    this.ranges = rangesOf(space, product(this.shape));
    this.isMask = isMask(port);
    this.numbers = this.ranges.map((range) => this.#blank(range));
    const control =
      this.isMask || space.type === "MultiBinary"
        ? chips
        : space.type === "Discrete"
          ? choice
          : sliders;
    this.control = (this.numbers.length > MOST_FIELDS ? picture : control)(this, changed);
    this.element = element("div", "", heading(port.path, named(space)), this.control.element);
  }

  #blank({ low, high }) {
    return this.isMask ? 1 : clamp(0, low, high);
  }

  fill(kind) {
    const fillers = { random: randomNumber, blank: (range) => this.#blank(range) };
    this.numbers = this.ranges.map(fillers[kind]);
    this.control.show();
  }
}

function sliders(field, changed) {
  const rows = field.ranges.map((range, i) => {
    const ends = isRanged(range) ? [range.low, range.high] : [-AROUND, AROUND];
    const slider = element("input");
    const typed = element("input");
    Object.assign(slider, {
      type: "range",
      min: ends[0],
      max: ends[1],
      step: range.whole ? 1 : (ends[1] - ends[0]) / 1000 || 1,
    });
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
    return {
      element: element("div", "row", element("span", "", String(i)), slider, typed),
      slider,
      typed,
    };
  });
  const show = () =>
    rows.forEach(({ slider, typed }, i) => (slider.value = typed.value = field.numbers[i]));
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
  return {
    element: element(
      "div",
      "chips",
      ...boxes.map((box, i) => element("label", "", box, String(i))),
    ),
    show,
  };
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

/** Shows a leaf of many numbers; an image as a picture, the mean of its channels. */
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
  const note = element(
    "p",
    "note",
    `${field.numbers.length.toLocaleString("en")} numbers: fill them with the buttons above.`,
  );
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
