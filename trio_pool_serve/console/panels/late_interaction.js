// Late interaction: which token of a document answers each token of a query.

import { request } from "../api.js";
import { field, format, h } from "../elements.js";
import { heatmap } from "../heatmap.js";
import { modelSelect, textArea, workbench } from "../panel.js";
import { computedTokens } from "../tokens.js";
import { dot, floats, largest, matrix, maxSim, rows } from "../vectors.js";

const QUERY = "who cancels a task?";
const DOCUMENT = "A task ends early if its cancel scope is cancelled: by its deadline, or by another task.";

export const lateInteraction = {
  id: "late-interaction",
  title: "Late interaction",
  accepts: (model) => model.tasks.includes("token_embed"),
  open(main, models, frame) {
    const state = frame.state.get();
    const trained = models.find(({ scoring }) => scoring === "late_interaction");
    const model = modelSelect(models, state.model ?? trained?.id, "token_embed");
    const [query, queryField] = textArea("Query", state.query ?? QUERY, 2);
    const [given, documentField] = textArea("Document", state.document ?? DOCUMENT, 6);

    async function side(text, inputType, signal) {
      const body = { model: model.value, task: "token_embed", input: text, input_type: inputType, encoding_format: "base64", truncate_prompt_tokens: -1, normalize: true };
      const [asked, computed] = await Promise.all([request("pooling", body, signal), computedTokens(model.value, text, inputType, signal)]);
      const [{ data, shape }] = asked.json.data;
      const tokens = computed.tokens.filter(({ kept }) => kept);
      if (tokens.length !== shape[0]) throw new Error(`There are ${shape[0]} vectors for ${tokens.length} tokens.`);
      return { requests: [asked, computed.asked], tokens, all: computed.tokens, vectors: rows(floats(data), shape) };
    }

    async function run(signal) {
      const isTrained = models.find(({ id }) => id === model.value)?.scoring === "late_interaction";
      const scoring = isTrained ? request("score", { model: model.value, text_1: query.value, text_2: given.value, truncate_prompt_tokens: -1 }, signal) : null;
      const [asks, answers, scored] = await Promise.all([side(query.value, "query", signal), side(given.value, "document", signal), scoring]);
      const similarities = matrix(asks.vectors, answers.vectors, dot);
      const total = maxSim(similarities);
      const score = scored?.json.data[0].score;
      return {
        element: picture(asks, answers, similarities, { total, score, isTrained }),
        requests: [...asks.requests, ...answers.requests, ...(scored ? [scored] : [])],
        json: { model: model.value, query: asks.tokens, document: answers.tokens, similarities, max_sim: total, score },
        csv: [["query token", ...answers.tokens.map(({ piece }) => piece)], ...similarities.map((row, at) => [asks.tokens[at].piece, ...row])],
      };
    }

    return workbench(main, {
      title: "Late interaction", about: "Point at a token of the query to see the most similar token of the document. The score is the sum of these similarities.",
      action: "Compare tokens", frame, run, controls: [field("Model", model), queryField, documentField],
      read: () => ({ model: model.value, query: query.value, document: given.value }),
    });
  },
};

function picture(asks, answers, similarities, { total, score, isTrained }) {
  const names = [asks.tokens.map(({ piece }) => piece), answers.tokens.map(({ piece }) => piece)];
  const best = similarities.map((row) => row.indexOf(largest(row)));
  const chips = answers.all.map(({ piece, kept }) => h("span", { class: "token", data: kept ? {} : { dropped: "true" }, title: kept ? false : "has no vector" }, piece));
  const answering = chips.filter((_, at) => answers.all[at].kept);
  const says = h("p", { class: "readout", "aria-live": "polite" }, "Point at a token of the query, or choose one.");
  const buttons = asks.tokens.map(({ piece }, at) => h("button", {
    type: "button", class: "token", "aria-pressed": "false", onpointerenter: () => show(at), onfocus: () => show(at), onclick: () => show(at),
  }, piece));

  function show(chosen) {
    const row = similarities[chosen];
    const [low, high] = [row.reduce((a, b) => Math.min(a, b)), largest(row)];
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(at === chosen)));
    answering.forEach((chip, at) => {
      chip.style.setProperty("--weight", (0.75 * Math.max(0, (row[at] - low) / (high - low || 1)) ** 2).toFixed(3));
      chip.dataset.best = String(at === best[chosen]);
    });
    says.textContent = `${names[0][chosen]} is most similar to ${names[1][best[chosen]]}: ${format.number(row[best[chosen]], 4)}`;
  }

  const map = heatmap("Similarity of tokens", similarities, names, { onpick: show, cell: 34, verticalNames: true });
  const verdict = score === undefined
    ? `Sum of the maxima: ${format.number(total, 5)}.${isTrained ? "" : " This model was not trained for late interaction: it compares whole texts."}`
    : `MaxSim of the picture: ${format.number(total, 5)}; score of the server: ${format.number(score, 5)}.`;
  return h("div", { class: "stack" }, h("h2", {}, "Most similar tokens"), h("p", { id: "verdict" }, verdict),
    h("h3", {}, "Query"), h("div", { class: "tokens" }, buttons), says, h("h3", {}, "Document"), h("div", { class: "tokens" }, chips), map.element);
}
