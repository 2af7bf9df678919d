// Labels of texts with their probabilities.

import { request } from "../api.js";
import { bar, field, format, h } from "../elements.js";
import { lines, modelSelect, textArea, workbench } from "../panel.js";

const EXAMPLE = "The server was fast, and told me at once what was wrong.\nI waited for an hour, and the answer was wrong.";
const SHOWN = 12;

export const classify = {
  id: "classify",
  title: "Classify",
  accepts: (model) => model.tasks.includes("classify"),
  open(main, models, frame) {
    const state = frame.state.get();
    const model = modelSelect(models, state.model, "classify");
    const [texts, textField] = textArea("Texts, one per line", state.texts ?? EXAMPLE, 6);

    async function run(signal) {
      const given = lines(texts.value);
      const asked = await request("classify", { model: model.value, input: given }, signal);
      const labels = models.find(({ id }) => id === model.value)?.labels ?? [];
      const results = asked.json.data.map(({ probs, label }, at) => ({
        text: given[at], label, scores: probs.map((value, index) => [labels[index] ?? `LABEL_${index}`, value]).sort(([, a], [, b]) => b - a),
      }));
      return {
        element: h("div", { class: "stack" }, h("h2", {}, "Labels"), results.map(({ text, scores }) => h("article", { class: "stack" }, h("p", { class: "text-view" }, text), bars(scores)))),
        requests: [asked],
        json: { model: model.value, results },
        csv: [["text", "label", "score"], ...results.flatMap(({ text, scores }) => scores.map(([label, value]) => [text, label, value]))],
      };
    }

    return workbench(main, {
      title: "Classify", about: "Probabilities of the labels that the model was trained on.", action: "Classify", frame, run,
      controls: [field("Model", model), textField], read: () => ({ model: model.value, texts: texts.value }),
    });
  },
};

function bars(scores) {
  const values = scores.map(([, value]) => value);
  const axis = { low: Math.min(0, ...values), high: Math.max(1, ...values) };
  const more = scores.length - SHOWN;
  return h("div", { class: "bars" }, scores.slice(0, SHOWN).map(([label, value]) => bar(label, value, format.number(value, 4), axis)),
    more > 0 ? h("p", { class: "hint" }, `${more} more are in the export`) : null);
}
