// Elements are made here only. Texts become text nodes, never markup, so that what a server or a user sends stays text.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an element: `h("p", {class: "hint"}, "text", child)`. Properties that begin with `on` are listeners, `style` is
 * an object of CSS properties, `data` one of data attributes; false, null and undefined leave an attribute out.
 */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

let lastId = 0;

/** A control with its label; `hint` is read out with it. */
export function field(label, control, hint) {
  control.id ||= `field-${++lastId}`;
  const parts = [h("label", { for: control.id }, label), control];
  if (hint) {
    parts.push(h("span", { class: "hint", id: `${control.id}-hint` }, hint));
    control.setAttribute("aria-describedby", `${control.id}-hint`);
  }
  return h("div", { class: "field" }, parts);
}

export function select(options, chosen) {
  const element = h("select", {}, options.map(([value, text]) => h("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) element.value = chosen;
  return element;
}

/** A table; a column is `[heading]` or `[heading, class]`. Its rows may be replaced by `fill`. */
export function table(caption, columns, rows = []) {
  const head = columns.map(([name, kind]) => h("th", { scope: "col", class: kind ?? false }, name));
  const element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: "plain" }, h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {})));
  return fill(element, columns, rows);
}

export function fill(element, columns, rows) {
  const cells = (row) => row.map((value, at) => h("td", { class: columns[at][1] ?? false }, value));
  element.querySelector("tbody").replaceChildren(...rows.map((row) => h("tr", {}, cells(row))));
  return element;
}

/** A horizontal bar from 0 to `value` on an axis from `low` to `high`, with its name and number as texts. */
export function bar(name, value, number, { low = 0, high = 1, start = 0, colour } = {}) {
  const share = (at) => `${(100 * (Math.min(high, Math.max(low, at)) - low)) / (high - low || 1)}%`;
  const [from, to] = [Math.min(start, value), Math.max(start, value)];
  const style = { left: share(from), right: `calc(100% - ${share(to)})` };
  if (colour) style.background = colour;
  return h("div", { class: "bar" }, h("span", { class: "name", title: name }, name),
    h("span", { class: "track" }, h("span", { class: "fill", style })), h("span", { class: "number" }, number));
}

export const format = {
  number: (value, digits = 4) => (value === null || value === undefined ? "–" : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)))),
  ms: (seconds) => (seconds === null || seconds === undefined ? "–" : seconds >= 1 ? `${Number(seconds.toPrecision(3))} s` : `${Number((seconds * 1e3).toPrecision(3))} ms`),
  share: (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`),
  bytes: (value) => (!Number.isFinite(value) ? "–" : value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(value < 2 ** 23 ? 1 : 0)} MiB`),
};

/** The value of a CSS custom property, for canvases. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
