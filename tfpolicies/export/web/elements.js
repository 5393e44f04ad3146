/** Shared by the parts of the page: elements, headings, formatted numbers. */

/** Creates an element with a class and content. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Creates the heading of a leaf: its path, if it has one, and a description. */
export function heading(path, what) {
  const parts = path.length ? [path.join(" / "), what] : [what];
  return element("h3", "", ...parts.map((part) => element("span", "", part)));
}

export const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

/** Returns a number with four significant digits. */
export function shown(x) {
  const isPlain = x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5);
  return isPlain ? String(Number(x.toPrecision(4))) : x.toExponential(2);
}
