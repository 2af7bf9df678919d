// What all views of "try it" have: a form, its result, how long the request took, and how to repeat it elsewhere.

import { RequestError } from "./api.js";
import { bar, field, format, h } from "./elements.js";
import { download, report } from "./export.js";
import { snippets } from "./snippets.js";

/** What a form cannot be sent with; it is shown to the user. */
export class InputError extends Error {}

/**
 * A select of `models`, an array that may change: `refresh()` shows its models then. By default the first model whose
 * main task is `task` is chosen, or else the first one.
 */
export function modelSelect(models, chosen, task, { none } = {}) {
  const element = h("select", { class: "models" });
  element.refresh = (value = element.value) => {
    const options = [...(none ? [["", none]] : []), ...models.map(({ id }) => [id, id])];
    const main = none ? undefined : models.find((model) => model.task === task)?.id;
    element.replaceChildren(...options.map(([id, text]) => h("option", { value: id }, text)));
    element.value = options.some(([id]) => id === value) ? value : main ?? options[0]?.[0];
  };
  element.refresh(chosen);
  return element;
}

/** A select of a model's prompts, which follows the select of its model. */
export function promptSelect(models, modelElement, chosen) {
  const element = h("select", {});
  const refill = (value) => {
    const prompts = models.find(({ id }) => id === modelElement.value)?.prompts ?? [];
    const names = [...new Set([...prompts, "query", "document"])];
    element.replaceChildren(h("option", { value: "" }, "default"), ...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(value)) element.value = value;
  };
  refill(chosen);
  modelElement.addEventListener("change", () => refill(element.value));
  return element;
}

export function textArea(label, value, rows, hint) {
  const area = h("textarea", { rows, spellcheck: "false", value });
  return [area, field(label, area, hint)];
}

/** The lines of a text that are not blank. */
export function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

/**
 * Fill `main` with a form of `controls` and the results of `run(signal)`: `{element, requests, json, csv}`.
 * `read()` returns the form's state for a permalink.
 */
export function workbench(main, { title, about, controls, action, run, read, frame }) {
  const status = h("p", { role: "status", class: "readout" });
  const result = h("div", { class: "stack" });
  const submit = h("button", { type: "submit", class: "primary" }, action);
  const link = h("button", { type: "button", onclick: copyLink }, "Copy link");
  const form = h("form", { class: "card", onsubmit: start, onkeydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit() },
    h("h2", {}, title), h("p", { class: "hint" }, about), controls, h("div", { class: "buttons" }, submit, link), status);
  main.append(h("div", { class: "panel" }, form, h("section", { "aria-label": "Result" }, result)));
  let running = null;

  async function start(event) {
    event?.preventDefault();
    running?.abort();
    const mine = (running = new AbortController());
    submit.disabled = true;
    say("Computing …");
    frame.state.set(read());
    try {
      const found = await run(mine.signal);
      if (mine.signal.aborted) return;
      say(`Done: ${found.requests.length} ${found.requests.length === 1 ? "request" : "requests"}.`);
      result.replaceChildren(h("section", { class: "card" }, found.element), details(title, found));
      found.drawn?.();
    } catch (error) {
      if (mine.signal.aborted) return;
      say(error.message, true);
      if (error.status === 401) frame.askForKey("This server requires an API key.");
      if (!(error instanceof RequestError || error instanceof InputError)) console.error(error);
    } finally {
      if (running === mine) submit.disabled = false;
    }
  }

  function say(text, isError = false) {
    status.textContent = text;
    status.classList.toggle("error", isError);
  }

  async function copyLink() {
    const fits = frame.state.set(read());
    try {
      await navigator.clipboard.writeText(location.href);
      say(fits ? "Link copied." : "Link copied without the texts, which are too long.");
    } catch {
      say(fits ? "The link is in the address bar." : "The texts are too long for a link.");
    }
  }

  if (Object.keys(frame.state.get()).length > 1 && frame.isFromAddress) start();
  return () => running?.abort();
}

function details(title, found) {
  const save = (name, kind, make) => h("button", { type: "button", onclick: async () => download(name, kind, await make()) }, name.split(".").at(-1).toUpperCase());
  const file = title.toLowerCase().replaceAll(" ", "-");
  return h("section", { class: "card stack" },
    h("div", { class: "buttons" }, h("h3", {}, "Export"), save(`${file}.json`, "application/json", () => JSON.stringify(found.json, null, 1)),
      save(`${file}.csv`, "text/csv", () => csvOf(found.csv)), save(`${file}.html`, "text/html", () => report(title, found.element, found.json))),
    h("h3", {}, "Time"), found.requests.map(waterfall), h("h3", {}, "Repeat it"), found.requests.map(snippets));
}

function csvOf(rows) {
  // A cell that begins like a formula would be computed by a spreadsheet.
  const cell = (value) => {
    if (typeof value !== "string") return String(value ?? "");
    // In quotes, as a program may take other characters for the one that separates cells.
    return `"${/^[=+\-@\t\r]/.test(value) ? "'" : ""}${value.replaceAll('"', '""')}"`;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

const STAGES = { render: "tokenise", queue: "queue", forward: "forward pass", copy: "output copy", encode: "encode" };

/** The stages of a request one after the other, as its Server-Timing has them; the rest is HTTP and the network. */
function waterfall({ path, stages, elapsed }) {
  const known = Object.fromEntries(stages.map(([name, ms]) => [name, ms]));
  const notes = stages.filter(([, , text]) => text).map(([name, , text]) => `${name}: ${text}`);
  const inServer = known.total ?? 0;
  let start = 0;
  const bars = Object.entries(STAGES).filter(([name]) => known[name] > 0).map(([name, label]) => {
    const element = bar(label, start + known[name], format.ms(known[name] / 1e3), { high: elapsed, start });
    start += known[name];
    return element;
  });
  const other = Math.max(0, inServer - start);
  bars.push(bar("other work", start + other, format.ms(other / 1e3), { high: elapsed, start, colour: "var(--muted)" }));
  bars.push(bar("network, browser", elapsed, format.ms((elapsed - inServer) / 1e3), { high: elapsed, start: Math.min(inServer, elapsed), colour: "var(--muted)" }));
  return h("div", { class: "waterfall", role: "group", "aria-label": `Time of ${path}` },
    h("p", {}, h("code", {}, path), `: ${format.ms(elapsed / 1e3)} in all`, notes.length ? `; ${notes.join(", ")}` : ""), bars,
    h("p", { class: "hint" }, "With several inputs, each bar shows the longest time of all inputs. Stages overlap."));
}
