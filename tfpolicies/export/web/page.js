/** The page: fields for an observation, bars for the policy's action and its distribution. */

import { group } from "./bars.js";
import { element, shown } from "./elements.js";
import { Field, named } from "./fields.js";
import { leafAt, Policy } from "./policy.js";

const byId = (id) => document.getElementById(id);

/** Creates terms with their texts, skipping those without a text. */
function facts(entries) {
  const known = entries.filter(([, text]) => text !== null);
  return known.map(([name, text]) =>
    element("div", "", element("dt", "", name), element("dd", "", text)),
  );
}

/** Shows an error. */
function tell(error) {
  byId("fault").textContent = error.message;
  byId("fault").hidden = false;
}

/** Sets title and footer. */
function describe(policy) {
  const { spec } = policy;
  const spaces = [spec.observation_space, spec.action_space].map(named);
  document.title = `${spec.policy_class}: ${spaces.join(" → ")}`;
  byId("title").textContent = spec.policy_class;
  byId("spaces").append(
    "sees ",
    element("b", "", spaces[0]),
    ", does ",
    element("b", "", spaces[1]),
  );
  const file = spec.files.serving_default;
  const { observations, largest_difference } = spec.parity;
  const lines = [
    `Runs ${file} (SHA-256 ${spec.sha256[file].slice(0, 12)}…) with ONNX Runtime ` +
      `${policy.runtimeVersion} in this browser. Nothing you enter leaves it.`,
    `When it was written by tfpolicies ${spec.versions.tfpolicies}, it agreed with the policy on ` +
      `${observations.toLocaleString("en")} observations, to ${largest_difference.toExponential(1)}.`,
  ];
  byId("about").append(...lines.map((line) => element("p", "", line)));
}

/** Nests the flat numbers of each leaf as the observation is. */
function observationOf(fields) {
  if (fields.length === 1 && fields[0].port.path.length === 0) return fields[0].numbers;
  const root = {};
  for (const { port, numbers } of fields) {
    const inner = port.path.slice(0, -1).reduce((at, key) => (at[key] ??= {}), root);
    inner[port.path.at(-1)] = numbers;
  }
  return root;
}

/** Creates a field for the reward of the last action, which is not part of the observation. */
function rewardField() {
  const port = { name: "reward", path: ["reward of the last step"], shape: ["batch"] };
  const space = { type: "Box", dtype: "float32", shape: [], low: -Infinity, high: Infinity };
  return new Field(port, space, () => {});
}

class Page {
  #policy;
  #fields;
  #reward;
  #steps = 0; // of the episode
  #isWaiting = false; // for the animation frame that handles changes

  constructor(policy) {
    this.#policy = policy;
    const spaceOf = (port) => leafAt(policy.spec.observation_space, port.path);
    const changed = () => this.changed();
    this.#fields = policy.observedInputs.map((port) => new Field(port, spaceOf(port), changed));
    this.#reward = policy.readsRewards ? rewardField() : null;
    const shown = [...this.#fields, ...(this.#reward ? [this.#reward] : [])];
    byId("observation").append(...shown.map((field) => field.element));
    this.#connect();
  }

  #connect() {
    byId("observation").onsubmit = (event) => {
      event.preventDefault();
      this.act();
    };
    byId("random").onclick = () => this.fill("random");
    byId("blank").onclick = () => this.fill("blank");
    byId("act").onclick = () => this.act();
    byId("act").textContent = this.#policy.remembers ? "Step" : "Draw again";
    byId("reset").onclick = () => this.begin();
    for (const id of ["reset", "memory"]) byId(id).hidden = !this.#policy.remembers;
    for (const input of document.querySelectorAll("[name=mode]")) {
      input.oninput = () => this.changed();
    }
  }

  get #isSampled() {
    return document.querySelector("[name=mode]:checked").value === "sample";
  }

  /** Begins an episode; a policy that does not remember acts at once. */
  async begin() {
    if (!this.#policy.remembers) return this.changed();
    this.#policy.reset();
    this.#steps = 0;
    const note = "This policy remembers earlier steps until a new episode begins.";
    byId("action").replaceChildren(element("p", "note", note));
    byId("facts").replaceChildren();
    byId("memory").textContent = "the episode begins with the next step";
  }

  fill(kind) {
    for (const field of this.#fields) field.fill(kind);
    this.#openMasks();
    this.changed();
  }

  /** Allows one column of each choice that has none, so that there is an action. */
  #openMasks() {
    const masks = this.#fields.filter((field) => field.isMask);
    const cells = masks.flatMap((field) => field.numbers.map((_, i) => [field, i]));
    for (const [start, stop] of this.#policy.choices) {
      const choice = cells.slice(start, stop);
      if (!choice.length || choice.some(([field, i]) => field.numbers[i] === 1)) continue;
      const [field, i] = choice[Math.floor(Math.random() * choice.length)];
      field.numbers[i] = 1;
      field.control.show();
    }
  }

  /** Acts again if that changes no state; several changes at once count as one. */
  async changed() {
    // A button is useful only if the next step differs.
    byId("steps").hidden = !this.#policy.remembers && !this.#isSampled;
    if (this.#policy.remembers || this.#isWaiting) return;
    this.#isWaiting = true;
    await new Promise(requestAnimationFrame);
    this.#isWaiting = false;
    await this.act();
  }

  async act() {
    const options = { sample: this.#isSampled, reward: this.#reward?.numbers[0] };
    try {
      const step = await this.#policy.decide(observationOf(this.#fields), options);
      this.#steps += 1;
      this.#show(step);
      byId("fault").hidden = true;
    } catch (error) {
      tell(error);
    }
  }

  #show({ action, parts, value, logp }) {
    const { distribution } = this.#policy.spec;
    byId("action").replaceChildren(...parts.map((part, i) => group(part, distribution[i])));
    const short = (_, x) => (typeof x === "number" ? Number(shown(x)) : x);
    const isDrawn = parts.every((part) => part.kind !== "values");
    const told = [
      ["action", JSON.stringify(action, short)],
      ["value of the state", value === null ? null : shown(value)],
      ["log-probability", isDrawn ? shown(logp) : null],
    ];
    byId("facts").replaceChildren(...facts(told));
    byId("memory").textContent = `step ${this.#steps} of the episode`;
  }
}

async function start() {
  const policy = await Policy.load("model.onnx");
  describe(policy);
  const page = new Page(policy);
  document.querySelector("main").hidden = false;
  await page.begin();
}

start().catch((error) => {
  byId("title").textContent = "The policy cannot be loaded";
  tell(error);
});
