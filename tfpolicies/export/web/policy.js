/**
 * Runs an exported policy in the browser, on the WebAssembly build of ONNX Runtime.
 *
 *     import { Policy } from "./policy.js";
 *
 *     const policy = await Policy.load("model.onnx");
 *     const action = await policy.act([0.1, 0, -0.02, 0]);
 *
 * An ES module without dependencies. `policy_spec.json` next to the model lists inputs, outputs and
 * the location of the runtime. All loaded files are checked against the hashes in it.
 */

const GREEDY = "serving_default";
const SAMPLE = "sample";
const NORMALIZED = "actions_normalized";
const FORBIDDEN = -1e38; // logits of masked actions are smaller

const ARRAYS = {
  bool: Uint8Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  float32: Float32Array,
  float64: Float64Array,
};

export class Policy {
  /**
   * Loads a policy, and the runtime unless you provide it.
   *
   * @param {string | URL} url the greedy model; `policy_spec.json` must be in the same folder
   * @param {object} [options]
   * @param {object} [options.ort] your own `onnxruntime-web`, already imported
   * @param {() => number} [options.random] uniform numbers in [0, 1), for sampled actions
   */
  static async load(url = "model.onnx", { ort, random = Math.random } = {}) {
    const folder = new URL(".", new URL(url, globalThis.document?.baseURI ?? location.href));
    const spec = checked(JSON.parse(text(await fetched({ url: "policy_spec.json" }, folder))));
    ort ??= await runtime(spec.web, folder);
    const policy = new Policy(spec, folder, ort, random);
    await policy.#session(GREEDY);
    return policy;
  }

  #choices = {}; // by input of choices: the range of each number
  #folder;
  #ort;
  #random;
  #sessions = {};
  #last = Promise.resolve(); // steps run one after the other, in the order of the calls
  #memory; // by input: the last value of `state_out_<i>`
  #past; // by source: its last steps, the newest last

  /** Called by `load`. `spec` is the content of `policy_spec.json`. */
  constructor(spec, folder, ort, random) {
    this.spec = spec;
    this.#folder = folder;
    this.#ort = ort;
    this.#random = random;
    Object.assign(this, inputsOf(spec));
    const columns = this.observedInputs.filter(isMask).reduce((n, port) => n + sizeOf(port), 0);
    this.choices = columns ? choicesOf(spec.action_space, columns) : []; // of the mask's columns
    for (const port of this.observedInputs) {
      const space = leafAt(spec.observation_space, port.path);
      if (space.type.endsWith("Discrete") && port.dtype === "int64")
        this.#choices[port.name] = rangesOf(space, sizeOf(port));
    }
    this.reset();
  }

  /** The version of ONNX Runtime that runs the policy. */
  get runtimeVersion() {
    return this.#ort.env.versions?.web ?? this.#ort.env.versions?.common;
  }

  /** Whether actions depend on earlier steps. */
  get remembers() {
    return this.memoryInputs.length + this.views.length > 0;
  }

  /** Whether the policy reads the reward of its last action. */
  get readsRewards() {
    return this.views.some((view) => view.source === "rewards");
  }

  /** Begins a new episode: resets the recurrent state and the earlier steps. */
  reset() {
    this.#memory = Object.fromEntries(this.memoryInputs.map((port) => [port.name, zeros(port)]));
    this.#past = {};
    for (const { source, shifts, port, size } of this.views) {
      const depth = Math.max(this.#past[source]?.length ?? 0, -Math.min(...shifts));
      this.#past[source] = Array.from({ length: depth }, () =>
        typed(port.dtype, Array(size).fill(0)),
      );
    }
  }

  /**
   * Returns the action for an observation, ready for the environment.
   *
   * @param obs numbers, nested or typed arrays in C order; objects for Dict spaces, arrays for Tuple
   * @param {object} [options] as those of `decide`
   * @returns a number, nested arrays, an object or an array, as the action space has it
   */
  async act(obs, options) {
    return (await this.decide(obs, options)).action;
  }

  /**
   * Takes one step and returns the action with its distribution.
   *
   * @param obs as that of `act`
   * @param {object} [options]
   * @param {boolean} [options.sample] draw from the distribution instead of the most likely action
   * @param {number} [options.reward] the reward of the last action, for policies that read it
   * @returns {Promise<{action, parts: object[], logp: number, value: ?number}>} `parts` has for each
   *   leaf of the action space its `path`, `kind`, `action` (flat) and, depending on the kind:
   *   `probabilities` or `values` of each cell's choices, null where a mask forbids them; or
   *   `spreads`, the range `[low, high]` of each number that about two of three draws fall into
   */
  decide(obs, { sample = false, reward = 0 } = {}) {
    const step = () => this.#decide(obs, sample ? SAMPLE : GREEDY, reward);
    return (this.#last = this.#last.then(step, step));
  }

  async #decide(obs, signature, reward) {
    const observed = this.#observed(obs);
    const session = await this.#session(signature);
    this.#past.rewards?.at(-1)?.fill(reward);
    const feeds = this.#feeds(observed, signature);
    const outputs = {};
    for (const [name, tensor] of Object.entries(await session.run(feeds))) {
      outputs[name] = tensor.data;
    }
    this.#remember(observed, outputs);
    return this.#told(outputs);
  }

  /** Returns a typed array per observation input. */
  #observed(obs) {
    const found = {};
    for (const port of this.observedInputs) {
      const part = port.path.reduce((x, key) => x?.[key], obs);
      const where = port.path.length
        ? `The observation's part ${port.path.join("/")}`
        : "The observation";
      if (part === undefined || part === null) throw new Error(`${where} is missing.`);
      const numbers = flat(part);
      found[port.name] = typed(port.dtype, numbers, sizeOf(port), where);
      this.#choices[port.name]?.forEach(({ low, high }, i) => {
        if (numbers[i] < low || numbers[i] > high)
          throw new Error(`${where} must be from ${low} to ${high}, got ${numbers[i]}.`);
      });
    }
    this.#checkMask(found);
    return found;
  }

  /** Throws if the mask allows no option of a choice. */
  #checkMask(observed) {
    const masks = this.observedInputs.filter(isMask).flatMap(({ name }) => flat(observed[name]));
    if (!masks.length) return;
    for (const [start, stop] of this.choices) {
      if (!masks.slice(start, stop).some(Boolean))
        throw new Error(`The action mask allows no action in its columns ${start} to ${stop - 1}.`);
    }
  }

  #feeds(observed, signature) {
    const rows = { ...observed };
    for (const { port, source, shifts } of this.views) {
      const steps =
        source in observed ? [...this.#past[source], observed[source]] : this.#past[source];
      const present = this.#past[source].length;
      rows[port.name] = typed(
        port.dtype,
        shifts.flatMap((shift) => flat(steps[present + shift])),
      );
    }
    if (signature === SAMPLE) rows.noise = this.#noise();
    const feeds = { ...rows, ...this.#memory };
    if (this.memoryInputs.length) feeds.seq_lens = Int32Array.of(1);
    for (const { name, dtype, shape } of this.spec.signatures[signature].inputs) {
      const dims = shape.map((n) => (typeof n === "number" ? n : 1)); // one row, and one step
      feeds[name] = new this.#ort.Tensor(dtype, feeds[name], dims);
    }
    return feeds;
  }

  #noise() {
    const blocks = this.spec.noise.blocks;
    return Float32Array.from(
      blocks.flatMap(([kind, size]) =>
        Array.from({ length: size }, () => NOISE[kind](this.#random)),
      ),
    );
  }

  #remember(observed, outputs) {
    for (const { name } of this.memoryInputs)
      this.#memory[name] = outputs[name.replace("_in_", "_out_")];
    const newest = { ...outputs, ...observed, rewards: [0] };
    for (const [source, past] of Object.entries(this.#past)) {
      if (!past.length) continue;
      const { dtype } = this.views.find((view) => view.source === source).port;
      past.push(typed(dtype, flat(newest[source])));
      past.shift();
    }
  }

  #told(outputs) {
    const inputs = flat(outputs.action_dist_inputs);
    const parts = this.spec.distribution.map((leaf, i) => {
      const action = flat(outputs[this.actionOutputs[i].name]);
      return {
        path: leaf.path,
        kind: leaf.kind,
        action,
        ...TOLD[leaf.kind](leaf, inputs.slice(...leaf.columns)),
      };
    });
    const leaves = parts.map((part, i) => shaped(part.action, rowShape(this.actionOutputs[i])));
    return {
      action: nested(this.spec.action_space, leaves.values()),
      parts,
      logp: outputs.action_logp[0],
      value: outputs.vf_preds?.[0] ?? null,
    };
  }

  #session(signature) {
    this.#sessions[signature] ??= this.#opened(this.spec.files[signature]);
    return this.#sessions[signature];
  }

  async #opened(name) {
    const hex = this.spec.sha256[name]
      .match(/../g)
      .map((byte) => String.fromCharCode(parseInt(byte, 16)));
    const file = { url: name, integrity: `sha256-${btoa(hex.join(""))}` };
    const content = new Uint8Array(await fetched(file, this.#folder));
    refuseModel(content, name);
    const extra = { session: { load_model_format: "ONNX" } };
    return this.#ort.InferenceSession.create(content, { executionProviders: ["wasm"], extra });
  }
}

/** Draws each kind of noise from uniform numbers: for choices, Boxes and bits. */
const NOISE = {
  gumbel: (random) => -Math.log(-Math.log(positive(random))),
  normal: (random) => Math.sqrt(-2 * Math.log(positive(random))) * Math.cos(2 * Math.PI * random()),
  logistic: (random) => {
    const u = positive(random);
    return Math.log(u / (1 - u));
  },
};

/** Describes each kind of distribution, from the leaf's record and its inputs. */
const TOLD = {
  choices: (leaf, inputs) => ({ probabilities: cells(inputs, leaf.sizes).map(softmax) }),
  bits: (leaf, inputs) => ({
    probabilities: inputs.map((x) => allowed(x, 1 / (1 + Math.exp(-x)))),
  }),
  values: (leaf, inputs) => ({ values: [inputs.map((x) => allowed(x, x))] }),
  normal: (leaf, inputs) => ({
    spreads: spreads(leaf, inputs, (mean, std) => [mean - std, mean + std]),
  }),
  squashed_normal: (leaf, inputs) => ({
    spreads: spreads(leaf, inputs, (mean, std) => [Math.tanh(mean - std), Math.tanh(mean + std)]),
  }),
  other: () => ({}),
};

/** Returns one standard deviation around each mean, in the environment's units. */
function spreads(leaf, inputs, around) {
  const count = inputs.length / 2;
  const [least, most] = leaf.log_std_range ?? [-Infinity, Infinity];
  return Array.from({ length: count }, (_, i) => {
    const std = Math.exp(clamp(inputs[count + i], least, most));
    return around(inputs[i], std).map((x) => {
      const scaled = x * leaf.half_width[i] + leaf.middle[i];
      return leaf.clipped
        ? clamp(scaled, leaf.low[i] ?? -Infinity, leaf.high[i] ?? Infinity)
        : scaled;
    });
  });
}

/** Returns the inputs and outputs of a model by their purpose. */
function inputsOf(spec) {
  const { inputs, outputs } = spec.signatures[GREEDY];
  const seen = new Set(spec.views.flatMap((view) => view.inputs));
  const rest = inputs.filter((port) => !seen.has(port.name));
  const observedInputs = rest.filter(({ name }) => /^(obs|action_mask)/.test(name));
  const plain = observedInputs.filter((port) => !isMask(port));
  return {
    observedInputs,
    memoryInputs: rest.filter(({ name }) => name.startsWith("state_in_")),
    actionOutputs: outputs.filter(
      ({ name }) => name.startsWith("actions") && !name.startsWith(NORMALIZED),
    ),
    views: spec.views.flatMap((view) =>
      view.inputs.map((name, i) => {
        const port = inputs.find((each) => each.name === name);
        const size = sizeOf(port) / (view.window ? view.shifts.length : 1);
        const actions = NORMALIZED + name.slice(view.name.length);
        const source = { obs: plain[i]?.name, actions }[view.column] ?? view.column;
        return { port, source, shifts: view.shifts, size };
      }),
    ),
  };
}

/** Returns the space of a leaf. */
export function leafAt(space, path) {
  return path.reduce((at, key) => {
    if (at.type === "Tuple") return at.spaces[Number(key)];
    return at.spaces.find(([name]) => String(name) === key)[1];
  }, space);
}

/** Returns one number per element of a bound, which is stored as a single number if all are equal. */
function each(bound, count) {
  const plain = (x) => (typeof x === "object" ? Number(x.$float.replace("inf", "Infinity")) : x);
  return Array.isArray(bound) ? bound.map(plain) : Array(count).fill(plain(bound));
}

/** Returns the range of each number of a leaf: `low`, `high`, and whether it is an integer. */
export function rangesOf(space, count) {
  const { type } = space;
  if (type === "Discrete")
    return [{ low: space.start, high: space.start + space.n - 1, whole: true }];
  if (type === "MultiBinary") return Array(count).fill({ low: 0, high: 1, whole: true });
  if (type === "MultiDiscrete") {
    const start = each(space.start, count);
    return space.nvec.map((n, i) => ({ low: start[i], high: start[i] + n - 1, whole: true }));
  }
  const low = each(space.low, count);
  const high = each(space.high, count);
  return low.map((x, i) => ({ low: x, high: high[i], whole: !space.dtype.startsWith("float") }));
}

/** Yields the number of mask columns for each part of an action, and whether one must be allowed. */
function* cellsOf(space, most) {
  const { type } = space;
  if (type === "Dict") for (const [, part] of space.spaces) yield* cellsOf(part, most);
  else if (type === "Tuple") for (const part of space.spaces) yield* cellsOf(part, most);
  else if (type === "MultiBinary") yield [product([space.n].flat()), false];
  else if (type !== "Box" || !space.dtype.startsWith("float")) {
    const parts = product(space.shape ?? []);
    if (!(parts <= most))
      throw new Error(`policy_spec.json has a mask of ${most} columns for ${parts} parts.`);
    for (const { low, high } of rangesOf(space, parts))
      yield [high - low + 1, true];
  }
}

/** Returns the columns of a mask that belong together, as start and end (exclusive). */
function choicesOf(space, most) {
  let start = 0;
  const found = [];
  for (const [width, isChoice] of cellsOf(space, most)) {
    if (isChoice) found.push([start, start + width]);
    start += width;
  }
  return found;
}

const runtimes = new Map(); // by URL

/** Returns ONNX Runtime's module, loaded once for all policies of a page. */
function runtime(web, folder) {
  if (!web) {
    throw new Error(
      "policy_spec.json names no runtime for the browser: export with web=True, or give Policy.load your `ort`.",
    );
  }
  const key = new URL(web.script.url, folder).href;
  if (!runtimes.has(key)) runtimes.set(key, imported(web, folder));
  return runtimes.get(key);
}

/** Fetches the runtime's two files, checks both, and then runs them. */
async function imported(web, folder) {
  const [script, wasm] = await Promise.all([
    fetched(web.script, folder),
    fetched(web.wasm, folder),
  ]);
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const ort = await import(url);
  URL.revokeObjectURL(url);
  ort.env.wasm.wasmBinary = wasm;
  ort.env.wasm.numThreads = 1; // more threads need cross-origin isolation by the server
  return ort;
}

async function fetched({ url, integrity }, folder) {
  const place = new URL(url, folder);
  try {
    const response = await fetch(place, { integrity, cache: "no-cache" });
    if (!response.ok) throw new Error(`status ${response.status}`);
    return await response.arrayBuffer();
  } catch (error) {
    const other = integrity ? ", or is not the file that policy_spec.json describes" : "";
    throw new Error(`${place} cannot be loaded${other} (${error.message}).`);
  }
}

function checked(spec) {
  if (
    spec.format !== "tfpolicies.policy_spec" ||
    spec.format_version !== 2 ||
    spec.artefact !== "onnx"
  ) {
    throw new Error("policy_spec.json does not describe an ONNX export of version 2.");
  }
  const files = Object.values(spec.files);
  for (const name of files) {
    const isPlain = typeof name === "string" && /^[\w-][\w.-]*$/.test(name);
    if (!isPlain || !/^[0-9a-f]{64}$/.test(spec.sha256[name]))
      throw new Error(
        `policy_spec.json names ${JSON.stringify(name)}, which is not a file in its folder.`,
      );
  }
  for (const { inputs, outputs } of Object.values(spec.signatures))
    for (const port of [...inputs, ...outputs]) checkPort(port);
  for (const { shifts } of spec.views) checkShifts(shifts);
  checkNoise(spec);
  return spec;
}

const MOST = 1e8; // numbers of one row
const MOST_NOISE = 1e6; // numbers per step
const isCount = (n) => Number.isInteger(n) && n >= 0;

/** Throws if the spec has an array that is too large, or of an unknown dtype. */
function checkPort(port) {
  if (!rowShape(port).every(isCount) || !(sizeOf(port) <= MOST))
    throw new Error(`policy_spec.json has arrays of ${sizeOf(port)} numbers per row.`);
  if (!Object.hasOwn(ARRAYS, port.dtype))
    throw new Error(`policy_spec.json has arrays of ${JSON.stringify(port.dtype)}.`);
}

/** Throws if a view has invalid steps. */
function checkShifts(shifts) {
  const isPast = (n) => Number.isInteger(n) && n <= 0 && n >= -MOST;
  if (!shifts.length || !shifts.every(isPast))
    throw new Error(`policy_spec.json has a view of the steps ${shifts.slice(0, 9)}.`);
}

/** Throws if the noise has another size than the model's input, or is too large. */
function checkNoise({ noise: { blocks }, signatures }) {
  const sizes = blocks.map(([, size]) => size);
  const total = sizes.reduce((a, b) => a + b, 0);
  if (!sizes.every(isCount) || total > MOST_NOISE)
    throw new Error(
      `policy_spec.json asks for noise of ${JSON.stringify(sizes)} numbers; each must be at least 0, and all together at most ${MOST_NOISE}.`,
    );
  const unknown = blocks.find(([kind]) => !Object.hasOwn(NOISE, kind));
  if (unknown) throw new Error(`policy_spec.json asks for noise of the kind ${unknown[0]}.`);
  const taken = signatures[SAMPLE].inputs.filter(({ name }) => name === "noise").map(sizeOf);
  if (taken.length !== 1 || taken[0] !== total)
    throw new Error(
      `policy_spec.json asks for noise of ${total} numbers, but the input takes ${taken}.`,
    );
}

/** The messages of ONNX that may contain refused fields, by the number of their field. */
const INSIDE = {
  model: { 7: "graph", 8: "opset" },
  graph: { 1: "node", 5: "tensor", 15: "sparse" },
  node: { 5: "attribute" },
  attribute: { 5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse" },
  sparse: { 1: "tensor", 2: "tensor" },
};
const DOMAINS = ["", "ai.onnx", "ai.onnx.ml"];
const otherDomain = (content) =>
  DOMAINS.includes(text(content)) ? "" : `operators of ${JSON.stringify(text(content))}`;

/** Checks of fields that let a model do more than compute numbers, by message and field. */
const REFUSED = {
  "model 20": () => "a part for training",
  "model 25": () => "functions",
  "attribute 21": () => "functions",
  "opset 1": otherDomain,
  "node 7": otherDomain,
  "node 4": (content) => text(content).startsWith("String") && "texts",
  "attribute 1": (content) => text(content).includes("string") && "texts",
  "tensor 2": ([value]) => value === 8 && "texts",
  "tensor 6": () => "texts",
  "tensor 13": () => "weights in other files",
  "tensor 14": ([value]) => value && "weights in other files",
};

/** Throws unless a file is a model with only ONNX's standard operators and its weights inside. */
function refuseModel(content, name) {
  if (text(content.subarray(4, 8)) === "ORTM")
    throw new Error(`${name} is in the format of ONNX Runtime, which is refused; export it again.`);
  let problem;
  try {
    problem = refusal("model", content);
  } catch (error) {
    throw new Error(`${name} is damaged (${error.message}); export the policy again.`);
  }
  if (problem) throw new Error(`${name} has ${problem}, which is refused; export it again.`);
}

/** Returns the first refused feature of a message of ONNX's format, or "". */
function refusal(kind, message) {
  let at = 0;
  const number = () => {
    let value = 0;
    for (let i = 0; i < 10; i++) {
      if (at >= message.length) break;
      const byte = message[at++];
      value += (byte & 127) * 128 ** i;
      if (byte < 128) return value;
    }
    throw new Error("a number has no end");
  };
  while (at < message.length) {
    const tag = number();
    const [field, wire] = [Math.floor(tag / 8), tag % 8];
    if (tag >= 2 ** 32 || !field || ![0, 1, 2, 5].includes(wire)) throw new Error("a field");
    const size = { 1: 8, 2: wire === 2 && number(), 5: 4 }[wire];
    const start = at;
    if (wire === 0) number();
    else at += size;
    if (at > message.length) throw new Error("a field has no end");
    const content = message.subarray(start, at);
    const inside = wire === 2 && INSIDE[kind]?.[field];
    const problem = REFUSED[`${kind} ${field}`]?.(content) || (inside && refusal(inside, content));
    if (problem) return problem;
  }
  return "";
}

const text = (buffer) => new TextDecoder().decode(buffer);
export const isMask = (port) => port.name.startsWith("action_mask");
export const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const rowShape = (port) => port.shape.filter((n) => typeof n === "number");
const sizeOf = (port) => product(rowShape(port));
const zeros = (port) => new ARRAYS[port.dtype](sizeOf(port));
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const allowed = (logit, number) => (logit < FORBIDDEN ? null : number);
const positive = (random) => Math.max(random(), Number.MIN_VALUE);

/** Flattens nested or typed arrays. */
function flat(x) {
  if (ArrayBuffer.isView(x)) return Array.from(x, Number);
  return Array.isArray(x) ? x.flatMap(flat) : [Number(x)];
}

/** Returns numbers as a typed array; checks them if `where` names their source. */
function typed(dtype, numbers, size = numbers.length, where = "") {
  const whole = !dtype.startsWith("float");
  if (numbers.length !== size) {
    throw new Error(`${where} must have ${size} numbers, got ${numbers.length}.`);
  }
  const wrong = where && numbers.find((x) => (whole ? !Number.isInteger(x) : Number.isNaN(x)));
  if (wrong !== undefined && wrong !== "") {
    throw new Error(`${where} must be ${whole ? "whole numbers" : "numbers"}, got ${wrong}.`);
  }
  const array = ARRAYS[dtype].from(dtype.endsWith("int64") ? numbers.map(BigInt) : numbers);
  const kept = (x, i) => (dtype === "bool" ? x === 0 || x === 1 : Number(array[i]) === x);
  const lost = where && whole ? numbers.findIndex((x, i) => !kept(x, i)) : -1;
  if (lost >= 0) throw new Error(`${where} must fit ${dtype}, got ${numbers[lost]}.`);
  return array;
}

function cells(numbers, sizes) {
  let at = 0;
  return sizes.map((size) => numbers.slice(at, (at += size)));
}

/** Returns probabilities, equal ones if everything is forbidden. */
function softmax(logits) {
  const largest = Math.max(...logits);
  const weights = logits.map((x) => Math.exp(x - largest));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((x, i) => allowed(logits[i] - largest, x / sum));
}

/** Nests flat numbers as arrays; a single number if there is no axis. */
function shaped(numbers, shape) {
  if (shape.length === 0) return numbers[0];
  const [first, ...rest] = shape;
  const step = numbers.length / first;
  return Array.from({ length: first }, (_, i) =>
    shaped(numbers.slice(i * step, (i + 1) * step), rest),
  );
}

/** Nests one value per leaf as a space is. */
function nested(space, leaves) {
  if (space.type === "Dict") {
    return Object.fromEntries(space.spaces.map(([key, sub]) => [key, nested(sub, leaves)]));
  }
  if (space.type === "Tuple") return space.spaces.map((sub) => nested(sub, leaves));
  return leaves.next().value;
}
