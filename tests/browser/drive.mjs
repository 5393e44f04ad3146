/**
 * Drives one page of Chromium as lines of JSON on the standard input say, and answers each by one.
 *
 *     CHROMIUM=/usr/bin/chromium node drive.mjs    # where playwright-core is installed
 *
 * A line is `{"do": name, ...}` with a name of `actions`; the answer is `{"result"}` or `{"error"}`.
 * Pages reach this machine alone: what else they ask for is served from files that `open` is told
 * of, or blocked and listed among the complaints.
 */

import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { createInterface } from "node:readline";

const { chromium } = createRequire(join(process.cwd(), "drive.mjs"))("playwright-core");
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM,
  args: ["--no-sandbox", "--disable-dev-shm-usage"], // as root in a container
});
let page;
let complaints = [];

async function answered(route, elsewhere) {
  const url = route.request().url();
  const known = Object.keys(elsewhere).find((start) => url.startsWith(start));
  const isLocal = new URL(url).hostname === "127.0.0.1" || /^(blob|file|data):/.test(url);
  if (isLocal) return route.continue();
  if (!known) {
    complaints.push(`blocked: ${url}`);
    return route.abort();
  }
  const body = await readFile(join(elsewhere[known], url.slice(known.length)));
  return route.fulfill({ body, headers: { "access-control-allow-origin": "*" } });
}

const actions = {
  async open({ url, width = 1280, height = 800, dark = false, elsewhere = {} }) {
    await page?.context().close();
    complaints = [];
    const viewport = { width, height };
    const context = await browser.newContext({ viewport, colorScheme: dark ? "dark" : "light" });
    await context.route("**/*", (route) => answered(route, elsewhere));
    page = await context.newPage();
    page.setDefaultTimeout(60_000);
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type())) complaints.push(message.text());
    });
    page.on("pageerror", (error) => complaints.push(String(error)));
    await page.goto(url);
  },
  /** Runs the body of an async function of `given` in the page. */
  run: ({ script, given }) =>
    page.evaluate(`(async (given) => { ${script} })(${JSON.stringify(given)})`),
  click: ({ at }) => page.click(at),
  fill: ({ at, text }) => page.fill(at, text),
  press: ({ key, held = 0 }) => page.keyboard.press(key, { delay: held }),
  wait: ({ until }) => page.waitForFunction(until).then(() => null),
  text: ({ at }) => page.innerText(at),
  picture: ({ path, full = true }) => page.screenshot({ path, fullPage: full }).then(() => null),
  complaints: async () => complaints,
};

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  const answer = await actions[asked.do](asked).then(
    (result) => ({ result: result ?? null }),
    (error) => ({ error: String(error) }),
  );
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();
