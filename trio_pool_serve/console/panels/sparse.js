// Sparse vectors: the weights of a text's own tokens in the text, and the terms that the model adds.

import { request } from "../api.js";
import { bar, field, format, h, select } from "../elements.js";
import { modelSelect, textArea, workbench } from "../panel.js";
import { placedTokens } from "../tokens.js";

const EXAMPLE = "A nursery waits for its child tasks, and cancels them when one fails.";
const SHOWN = 40;

export const sparse = {
  id: "sparse",
  title: "Sparse",
  accepts: (model) => model.tasks.includes("sparse_embed"),
  open(main, models, frame) {
    const state = frame.state.get();
    const model = modelSelect(models, state.model, "sparse_embed");
    const inputType = select([["document", "a document"], ["query", "a query"]], state.input_type);
    const [text, textField] = textArea("Text", state.text ?? EXAMPLE, 6);

    async function run(signal) {
      const given = text.value;
      const [asked, placed] = await Promise.all([
        request("pooling", { model: model.value, task: "sparse_embed", input: given, input_type: inputType.value }, signal),
        placedTokens(model.value, given, signal),
      ]);
      const weights = asked.json.data[0].data.map(({ index, value }) => ({ index, value })).sort((a, b) => b.value - a.value);
      const areLatents = models.find(({ id }) => id === model.value)?.sparse_indices === "latents";  // no tokens: they have no text
      const listed = weights.slice(0, SHOWN);
      const decoded = listed.length && !areLatents ? await request("decode", { model: model.value, ids: listed.map(({ index }) => [index]), skip_special_tokens: false }, signal) : null;
      const own = new Set(placed.tokens.map(({ id }) => id));
      const terms = listed.map((each, at) => ({ ...each, term: areLatents ? `latent ${each.index}` : decoded.json[at], isOwn: areLatents || own.has(each.index) }));
      return {
        element: h("div", { class: "stack" }, h("h2", {}, "Weights"), highlighted(given, placed.tokens, areLatents ? [] : weights),
          h("h3", {}, `Terms, ${weights.length} in all`), bars(terms)),
        requests: [asked, placed.asked, ...(decoded ? [decoded] : [])],
        json: { model: model.value, text: given, weights, terms },
        csv: [["index", "term", "weight", "in the text"], ...terms.map(({ index, term, value, isOwn }) => [index, term, value, isOwn])],
      };
    }

    return workbench(main, {
      title: "Sparse", about: "Weights over the vocabulary. Tokens of the text are highlighted by weight; the model added the other terms.", action: "Compute weights", frame, run,
      controls: [field("Model", model), field("Input type", inputType), textField],
      read: () => ({ model: model.value, input_type: inputType.value, text: text.value }),
    });
  },
};

function highlighted(text, tokens, weights) {
  const byId = new Map(weights.map(({ index, value }) => [index, value]));
  const most = weights[0]?.value ?? 1;
  const parts = [];
  let end = 0;
  for (const { id, begin, end: stop } of tokens.filter((token) => token.begin !== null)) {
    if (begin < end) continue;  // several tokens of one character
    parts.push(text.slice(end, begin));
    const weight = byId.get(id) ?? 0;
    parts.push(weight > 0 ? h("mark", { style: { "--weight": (0.08 + 0.5 * (weight / most)).toFixed(3) }, title: format.number(weight, 4) }, text.slice(begin, stop)) : text.slice(begin, stop));
    end = stop;
  }
  parts.push(text.slice(end));
  return h("p", { class: "text-view" }, parts);
}

function bars(terms) {
  const high = terms[0]?.value ?? 1;
  return h("div", { class: "bars" }, terms.map(({ term, value, isOwn }) => bar(isOwn ? term : `${term} (added)`, value, format.number(value, 4), { high, colour: isOwn ? undefined : "var(--c2)" })));
}
