/** The page: the policy balances, you push. */

import { CartPole, EDGE, SECONDS } from "./cartpole.js";
import { Policy } from "./policy.js";

const PUSH = 25; // newtons, for one step
const SOLVED = 500; // the steps of an episode of CartPole-v1
const PAUSE = 1200; // milliseconds between two episodes

const byId = (id) => document.getElementById(id);
const canvas = byId("world");
const world = new CartPole();
const game = { steps: 0, best: 0, push: 0, isPaused: false, isOver: false, rights: 0.5, pushed: 0 };

function newEpisode(policy) {
  policy.reset();
  world.reset();
  Object.assign(game, { steps: 0, push: 0, pushed: 0, isOver: false });
}

async function step(policy) {
  const sample = document.querySelector("[name=mode]:checked").value === "sample";
  const decision = await policy.decide(world.state, { sample });
  game.rights = decision.parts[0].probabilities?.[0][1] ?? decision.action;
  world.step(decision.action, game.push);
  game.pushed = game.push || 0.9 * game.pushed; // the arrow fades slowly
  game.push = 0;
  game.steps += 1;
  game.best = Math.max(game.best, game.steps);
  if (!world.isOver) return;
  game.isOver = true;
  setTimeout(() => newEpisode(policy), PAUSE);
}

/** Steps in real time; a page that was hidden does not catch up. */
async function run(policy) {
  let due = performance.now();
  for (;;) {
    const now = await new Promise(requestAnimationFrame);
    due = Math.max(due, now - 100);
    for (; due <= now; due += 1000 * SECONDS) {
      if (!game.isPaused && !game.isOver) await step(policy);
    }
    draw();
    tell();
  }
}

function tell() {
  byId("steps").textContent = game.steps;
  byId("best").textContent = game.best;
  byId("verdict").textContent = game.isOver
    ? "It fell. Again …"
    : game.steps >= SOLVED
      ? "Solved, and still going"
      : "Balancing";
  byId("left").style.width = `${100 * (1 - game.rights)}%`;
  byId("right").style.width = `${100 * game.rights}%`;
  byId("left-chance").textContent = `${Math.round(100 * (1 - game.rights))} %`;
  byId("right-chance").textContent = `${Math.round(100 * game.rights)} %`;
}

// -- drawing, in metres around the middle of the track --------------------------------------------

function draw() {
  const scale = devicePixelRatio;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  const metre = Math.min(width / (2 * EDGE + 0.8), height / 1.75);
  pen.setTransform(
    scale * metre,
    0,
    0,
    -scale * metre,
    (scale * width) / 2,
    scale * (height - 0.55 * metre),
  );
  pen.clearRect(-10, -10, 20, 20);
  drawTrack(pen);
  drawCart(pen, world.state[0], world.state[2]);
  if (Math.abs(game.pushed) > 1) drawPush(pen, world.state[0], Math.sign(game.pushed));
}

const colour = (name) => getComputedStyle(canvas).getPropertyValue(`--${name}`);

function line(pen, name, width, ...points) {
  pen.strokeStyle = colour(name);
  pen.lineWidth = width;
  pen.lineCap = "round";
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.stroke();
}

function drawTrack(pen) {
  line(pen, "line", 0.02, [-EDGE, -0.13], [EDGE, -0.13]);
  for (const x of [-EDGE, EDGE]) line(pen, "line", 0.04, [x, -0.22], [x, -0.04]);
}

function drawCart(pen, x, angle) {
  pen.fillStyle = colour("ink");
  pen.beginPath();
  pen.roundRect(x - 0.25, -0.13, 0.5, 0.26, 0.06);
  pen.fill();
  line(pen, "pole", 0.08, [x, 0.06], [x + Math.sin(angle), 0.06 + Math.cos(angle)]);
  pen.fillStyle = colour("accent");
  pen.beginPath();
  pen.arc(x, 0.06, 0.055, 0, 2 * Math.PI);
  pen.fill();
}

function drawPush(pen, x, way) {
  const tip = x - way * 0.32;
  line(pen, "accent", 0.04, [tip - way * 0.45, 0], [tip, 0]);
  line(pen, "accent", 0.04, [tip - way * 0.12, 0.1], [tip, 0], [tip - way * 0.12, -0.1]);
}

// -- controls -------------------------------------------------------------------------------------

function push(way) {
  game.push = way * PUSH;
}

function pause() {
  game.isPaused = !game.isPaused;
  byId("pause").textContent = game.isPaused ? "Resume" : "Pause";
}

async function start() {
  const policy = await Policy.load("model.onnx");
  const { spec } = policy;
  if (spec.observation_space.shape?.[0] !== 4 || spec.action_space.n !== 2) {
    throw new Error("This page needs a policy for CartPole: Box(4) to Discrete(2).");
  }
  const again = () => newEpisode(policy);
  const keys = { ArrowLeft: () => push(-1), ArrowRight: () => push(1), p: pause, n: again };
  byId("push-left").onclick = keys.ArrowLeft;
  byId("push-right").onclick = keys.ArrowRight;
  byId("pause").onclick = pause;
  byId("again").onclick = again;
  addEventListener("keydown", (event) => {
    if (event.target.name === "mode" || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("about").textContent =
    `${spec.policy_class} of tfpolicies ${spec.versions.tfpolicies}, run by ONNX Runtime ${policy.runtimeVersion} ` +
    `in this browser. Its file agreed with the policy to ${spec.parity.largest_difference.toExponential(1)} when it was written.`;
  document.body.classList.add("ready");
  await run(policy);
}

start().catch((error) => {
  byId("verdict").textContent = error.message;
});
