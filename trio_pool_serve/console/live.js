// The view of the server at work.

import { timeChart } from "./charts.js";
import { fill, format, h, table } from "./elements.js";

const STAGES = { render_wait: "wait to render", render: "render", queue: "queue", forward: "forward pass", copy_wait: "output copy", encode: "encode" };

const REASONS = { queue: "queue full", memory: "memory", api_key: "API key limit", loading: "loading", draining: "draining", unavailable: "unavailable" };

const perSecond = (value) => format.number(value, 3);
const count = (value) => format.number(value, 3);

function charts() {
  return [
    timeChart("Requests per second", [
      ["answered", 1, (sample) => sample.requests],
      ["errors", 5, (sample) => sample.failures],
      ["refused", 2, (sample) => sample.refusals && Object.values(sample.refusals).reduce((sum, each) => sum + each, sample.connections_refused ?? 0)],
    ], perSecond),
    timeChart("Refused per second, by reason", Object.entries(REASONS).map(([reason, label], at) => [label, at + 1, (sample) => sample.refusals?.[reason]]), perSecond),
    timeChart("Time of a request", [["p50", 1, (sample) => sample.stages?.request[0]], ["p99", 2, (sample) => sample.stages?.request[1]]], format.ms),
    timeChart("p50 of each stage", Object.entries(STAGES).map(([stage, label], at) => [label, at + 1, (sample) => sample.stages?.[stage][0]]), format.ms),
    timeChart("p99 of each stage", Object.entries(STAGES).map(([stage, label], at) => [label, at + 1, (sample) => sample.stages?.[stage][1]]), format.ms),
    timeChart("Rows in the queue", [["rows", 1, (sample) => sample.queued_rows]], count),
    timeChart("Tokens in the queue", [["tokens", 2, (sample) => sample.queued_tokens]], count),
    timeChart("Batch fill and padding", [
      ["token budget used", 1, (sample) => sample.batch_fill], ["padding", 2, (sample) => sample.padding],
    ], format.share),
    timeChart("Rows per batch", [["rows", 3, (sample) => sample.batch_rows]], count),
    timeChart("Tokens per second", [["tokens", 4, (sample) => sample.tokens]], count),
    timeChart("Lag of the event loop", [["p50", 1, (sample) => sample.loop_lag?.[0]], ["p99", 2, (sample) => sample.loop_lag?.[1]]], format.ms),
    timeChart("Connections and requests", [["connections", 3, (sample) => sample.connections], ["running requests", 1, (sample) => sample.running]], count),
    timeChart("Memory of all processes", [["resident", 6, (sample) => Object.values(sample.processes).reduce((sum, each) => sum + (each.memory_bytes ?? 0), 0)]], format.bytes),
  ];
}

function tiles(sample) {
  const refused = Object.entries(sample.refusals ?? {}).filter(([, each]) => each > 0);
  const all = [
    ["Requests/s", perSecond(sample.requests), ""],
    ["p50 of a request", format.ms(sample.stages?.request[0]), ""],
    ["p99 of a request", format.ms(sample.stages?.request[1]), ""],
    ["In the queue", count(sample.queued_rows), `rows, ${count(sample.queued_tokens)} tokens`],
    ["Batch fill", format.share(sample.batch_fill), `${count(sample.batch_rows)} rows`],
    ["Padding", format.share(sample.padding), ""],
    ["Loop lag, p99", format.ms(sample.loop_lag?.[1]), ""],
    ["Errors/s", perSecond(sample.failures), ""],
    ["Refused/s", perSecond(refused.reduce((sum, [, each]) => sum + each, sample.connections_refused ?? 0)), refused.map(([reason]) => reason.replaceAll("_", " ")).join(", ")],
    ["Connections", count(sample.connections), ""],
  ];
  return all.map(([name, value, more]) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, " ", h("small", {}, more))));
}

/** The state of a process: one that answers has a pid, whatever its parent says of it. */
export function processState(each) {
  if (each.pid === undefined) return each.state === "loading" || each.state === "failed" ? each.state : "ended";
  return each.state ?? "ready";
}

function level(state) {
  return h("span", { class: "badge", data: { level: state === "ready" ? "good" : state === "unloaded" ? "unknown" : "bad" } }, state);
}

const number = (name) => [name, "number"];
const PROCESS_COLUMNS = [["process"], ["state"], number("pid"), number("restarts"), number("memory"), number("CPU")];
const MODEL_COLUMNS = [
  ["model"], ["state"], number("rows waiting"), number("tokens waiting"), number("wait"), number("tokens/s"), number("failed"), number("memory"),
];

function processRows(latest) {
  return Object.entries(latest.processes).sort(([a], [b]) => a.localeCompare(b)).map(([name, each]) => {
    const pid = each.pid === undefined ? "–" : String(each.pid);
    return [name, level(processState(each)), pid, count(each.restarts ?? 0), format.bytes(each.memory_bytes), format.share(each.cpu)];
  });
}

function modelRows(latest) {
  return Object.entries(latest.models).map(([name, each]) => [
    name, level(each.state), count(each.queued_rows), count(each.queued_tokens), format.ms(each.waiting_s), count(each.tokens_per_s), count(each.failed_batches), format.bytes(each.memory_bytes || undefined),
  ]);
}

/** Show the samples of a stream in `main`; returns what ends that. */
export function liveView(main, stream) {
  const all = charts();
  const now = h("dl", { class: "tiles" });
  const processes = table("Processes", PROCESS_COLUMNS);
  const models = table("Models", MODEL_COLUMNS);
  const note = h("p", { class: "hint" });
  main.classList.add("stack");
  main.append(h("h2", { class: "hidden-text" }, "The server now"), now, h("div", { class: "charts" }, all.map((chart) => chart.element)),
    h("div", { class: "card tables" }, processes, models), note);
  const unsubscribe = stream.subscribe(({ samples }) => {
    if (!samples.length) return;
    const latest = samples.at(-1);
    now.replaceChildren(...tiles(latest));
    fill(processes, PROCESS_COLUMNS, processRows(latest));
    fill(models, MODEL_COLUMNS, modelRows(latest));
    note.textContent = `${samples.length} samples, one per second while the console is open in any browser; latest: ${new Date(latest.time * 1e3).toLocaleTimeString()}.`;
    for (const chart of all) chart.update(samples);
  });
  return () => {
    main.classList.remove("stack");
    unsubscribe();
    for (const chart of all) chart.close();
  };
}
