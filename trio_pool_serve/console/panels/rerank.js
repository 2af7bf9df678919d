// Documents ranked by a query: where each was, and where it has moved to.

import { request } from "../api.js";
import { field, format, h, svg } from "../elements.js";
import { InputError, lines, modelSelect, textArea, workbench } from "../panel.js";

const QUERY = "How do I stop a task?";
const DOCUMENTS = "Season the soup to taste.\nA nursery waits for its child tasks.\nCancel the scope that the task runs in.\nThe tram stops at the market.\nA deadline cancels what takes too long.";
const ROW = 44;

export const rerank = {
  id: "rerank",
  title: "Rerank",
  accepts: (model) => model.tasks.includes("score"),
  open(main, models, frame) {
    const state = frame.state.get();
    const model = modelSelect(models, state.model, "score");
    const [query, queryField] = textArea("Query", state.query ?? QUERY, 2);
    const [documents, documentField] = textArea("Documents, one per line", state.documents ?? DOCUMENTS, 10);

    async function run(signal) {
      const given = lines(documents.value);
      if (!given.length) throw new InputError("Enter at least one document.");
      const asked = await request("v1/rerank", { model: model.value, query: query.value, documents: given }, signal);
      const ranked = asked.json.results.map(({ index, relevance_score }, rank) => ({ rank, index, moved: index - rank, score: relevance_score, text: given[index] }));
      return {
        element: h("div", { class: "stack" }, h("h2", {}, "Ranking"), moves(given, ranked)),
        requests: [asked],
        json: { model: model.value, query: query.value, results: ranked },
        csv: [["rank", "was", "score", "document"], ...ranked.map(({ rank, index, score, text }) => [rank + 1, index + 1, score, text])],
      };
    }

    return workbench(main, {
      title: "Rerank", about: "Documents ranked by their relevance to a query, beside their original order.", action: "Rank", frame, run,
      controls: [field("Model", model), queryField, documentField],
      read: () => ({ model: model.value, query: query.value, documents: documents.value }),
    });
  },
};

const way = (moved) => (moved > 0 ? "up" : moved < 0 ? "down" : "same");

function moves(given, ranked) {
  const height = given.length * ROW;
  const middle = (at) => at * ROW + (ROW - 6) / 2;
  const lines_ = ranked.map(({ rank, index, moved }) => svg("path", {
    d: `M0 ${middle(index)} C45 ${middle(index)} 45 ${middle(rank)} 90 ${middle(rank)}`, "data-way": way(moved),
  }));
  const scores = ranked.map(({ score }) => score);
  const [low, high] = [Math.min(0, ...scores), Math.max(...scores)];
  return h("div", { class: "moves" },
    h("ol", { "aria-label": "As given" }, given.map((text, at) => h("li", {}, h("span", { class: "muted" }, String(at + 1)), h("span", { class: "text", title: text }, text)))),
    svg("svg", { viewBox: `0 0 90 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true", style: { height: `${height}px` } }, lines_),
    h("ol", { "aria-label": "By relevance" }, ranked.map(({ text, score, moved }, rank) => h("li", { style: { background: `linear-gradient(90deg, rgba(var(--mark), .22) ${(100 * (score - low)) / (high - low || 1)}%, var(--sunken) 0)` } },
      h("span", { class: "muted" }, String(rank + 1)), h("span", { class: "move", data: { way: way(moved) } }, movement(moved)),
      h("span", { class: "text", title: text }, text), h("span", { class: "number" }, format.number(score, 4))))));
}

function movement(moved) {
  if (!moved) return [h("span", { "aria-hidden": "true" }, "="), h("span", { class: "hidden-text" }, "same place")];
  return [h("span", { "aria-hidden": "true" }, `${moved > 0 ? "▲" : "▼"} ${Math.abs(moved)}`), h("span", { class: "hidden-text" }, `${Math.abs(moved)} ${moved > 0 ? "up" : "down"}`)];
}
