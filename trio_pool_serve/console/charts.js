// Line charts over the last fifteen minutes: uPlot in the page's colours, with their last values as text.

import { colour, h } from "./elements.js";

const HEIGHT = 170;
const GAP_S = 5;

const clock = (seconds) => new Date(seconds * 1e3).toLocaleTimeString("en-GB");

/**
 * Return `{element, update, close}` of a chart. `series` are `[label, colour number, (sample) => value]`, `show` writes
 * a value. The chart is collapsed while all values are 0 or missing.
 */
export function timeChart(title, series, show) {
  const holder = h("div", { class: "chart" });
  const summary = h("p", { class: "hidden-text" });
  const note = h("span", { class: "muted" });
  const element = h("details", { class: "card" }, h("summary", {}, h("h2", {}, title), note), holder, summary);
  let plot = null;
  let isEmpty = null;
  let samples = [];

  // uPlot joins the neighbours of undefined values (a second without requests), and leaves a gap at null (not watched).
  function values() {
    const points = samples.flatMap((each, at) => (at && each.time - samples[at - 1].time > GAP_S ? [null, each] : [each]));
    const times = points.map((each, at) => each?.time ?? points[at - 1].time + 1);
    return [times, ...series.map(([, , of]) => points.map((each) => each && (of(each) ?? undefined)))];
  }

  function make() {
    plot?.destroy();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 0.5 }, ticks: { stroke: colour("line"), width: 0.5 }, font: "11px system-ui" };
    plot = new uPlot({
      width: Math.max(200, holder.clientWidth), height: HEIGHT, padding: [8, 12, 0, 0],
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 66, values: (_, ticks) => ticks.map(show) }],
      series: [{ label: "time", value: (_, at) => (at ? clock(at) : "–") },
        ...series.map(([label, number]) => ({ label, stroke: colour(`c${number}`), width: 1.6, points: { show: false }, value: (_, value) => show(value) }))],
      legend: { live: true },
    }, values(), holder);
    // Its legend is a table for the mouse; the summary below says the same.
    holder.querySelector(".u-legend")?.setAttribute("aria-hidden", "true");
    const canvas = holder.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", title);
  }

  const resize = new ResizeObserver(() => plot?.setSize({ width: Math.max(200, holder.clientWidth), height: HEIGHT }));
  resize.observe(holder);
  document.addEventListener("themechange", make);
  return {
    element,
    update(now) {
      samples = now;
      const wasEmpty = isEmpty;
      isEmpty = !samples.some((sample) => series.some(([, , of]) => of(sample)));
      if (isEmpty !== wasEmpty) {
        element.open = !isEmpty;
        element.dataset.empty = String(isEmpty);
        note.textContent = isEmpty ? "nothing to show" : "";
      }
      if (plot) plot.setData(values());
      else make();
      const last = samples.at(-1);
      summary.textContent = last ? `${title}: ${series.map(([label, , of]) => `${label} ${show(of(last))}`).join(", ")}` : "";
    },
    close() {
      resize.disconnect();
      document.removeEventListener("themechange", make);
      plot?.destroy();
    },
  };
}
