/** The physics of Gymnasium's CartPole-v1: Barto, Sutton and Anderson 1983, by Euler's method. */

const GRAVITY = 9.8;
const POLE_MASS = 0.1;
const TOTAL_MASS = 1.0 + POLE_MASS;
const HALF_LENGTH = 0.5; // of the pole, in metres
const FORCE = 10; // of an action, in newtons
export const SECONDS = 0.02; // of a step
export const EDGE = 2.4; // metres from the middle
export const TILT = (12 * 2 * Math.PI) / 360; // radians at which the pole counts as fallen

export class CartPole {
  /** @param {() => number} random uniform numbers in [0, 1) */
  constructor(random = Math.random) {
    this.random = random;
    this.reset();
  }

  /** Begins an episode near the upright position and returns its first observation. */
  reset() {
    this.state = Array.from({ length: 4 }, () => 0.1 * this.random() - 0.05);
    return this.state;
  }

  /** Whether the episode is over: the pole has fallen, or the cart has left the track. */
  get isOver() {
    const [x, , angle] = this.state;
    return Math.abs(x) > EDGE || Math.abs(angle) > TILT;
  }

  /**
   * Takes a step and returns the observation: position, speed, angle, angular speed.
   *
   * @param {0 | 1} action pushes the cart to the left or to the right
   * @param {number} push another force on the cart in this step, in newtons
   */
  step(action, push = 0) {
    const [x, speed, angle, turning] = this.state;
    const [sin, cos] = [Math.sin(angle), Math.cos(angle)];
    const force = (action === 1 ? FORCE : -FORCE) + push;
    const swing = (force + POLE_MASS * HALF_LENGTH * turning ** 2 * sin) / TOTAL_MASS;
    const inertia = HALF_LENGTH * (4 / 3 - (POLE_MASS * cos ** 2) / TOTAL_MASS);
    const turned = (GRAVITY * sin - cos * swing) / inertia;
    const moved = swing - (POLE_MASS * HALF_LENGTH * turned * cos) / TOTAL_MASS;
    const rates = [speed, moved, turning, turned];
    this.state = this.state.map((number, i) => number + SECONDS * rates[i]);
    return this.state;
  }
}
