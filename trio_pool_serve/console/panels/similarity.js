// How similar texts and images are, by one model or prompt, or by two side by side.

import { request } from "../api.js";
import { field, format, h, table } from "../elements.js";
import { heatmap } from "../heatmap.js";
import { ImageDrop } from "../images.js";
import { InputError, lines, modelSelect, promptSelect, textArea, workbench } from "../panel.js";
import { cosine, floats, matrix } from "../vectors.js";

const EXAMPLE = "How do I cancel a task?\nA nursery waits for its child tasks.\nCancel the scope that the task runs in.\nThe soup needs more salt.\nSeason the broth to taste.";
const MAX_INPUTS = 64;

export const similarity = {
  id: "similarity",
  title: "Similarity",
  accepts: (model) => model.tasks.includes("embed"),
  open(main, models, frame) {
    const state = frame.state.get();
    const [texts, textField] = textArea("Texts, one per line", state.texts ?? EXAMPLE, 8);
    const images = models.some((model) => model.accepts_images) ? new ImageDrop() : null;
    const side = (name, withNone) => {
      const model = modelSelect(models, state[`model_${name}`], "embed", withNone ? { none: "nothing" } : {});
      const prompt = promptSelect(models, model, state[`prompt_${name}`]);
      const box = h("fieldset", {}, h("legend", {}, withNone ? "Compare with" : "Model"),
        h("div", { class: "row" }, field("Model", model), field("Prompt", prompt)));
      return { name, model, prompt, box };
    };
    const sides = [side("a", false), side("b", true)];

    async function run(signal) {
      const given = lines(texts.value);
      const names = [...given, ...(images?.names ?? [])];
      if (!names.length) throw new InputError("Enter at least one text, or add an image.");
      if (names.length > MAX_INPUTS) throw new InputError(`There are ${names.length} inputs; at most ${MAX_INPUTS} are compared.`);
      const input = images?.urls.length ? [...given.map((text) => ({ text })), ...images.urls.map((image) => ({ image }))] : given;
      const asked = sides.filter(({ model }) => model.value);
      const requests = await Promise.all(asked.map(({ model, prompt }) => request("v1/embeddings", {
        model: model.value, input, encoding_format: "base64", ...(prompt.value ? { prompt_name: prompt.value } : {}),
      }, signal)));
      const results = requests.map(({ json }, at) => {
        const vectors = json.data.map((each) => floats(each.embedding));
        return { model: asked[at].model.value, prompt: asked[at].prompt.value, cosine: matrix(vectors, vectors, cosine) };
      });
      const maps = results.map((each) => {
        const title = each.prompt ? `${each.model}, prompt ${each.prompt}` : each.model;
        return heatmap(title, each.cosine, [names, names], { low: each.cosine.flat().reduce((a, b) => Math.min(a, b), 0), high: 1 });
      });
      const tables = results.map((each) => h("details", {}, h("summary", {}, `${each.model} as a table`),
        table("Cosine similarity", [[""], ...names.map((name) => [name, "number"])], each.cosine.map((row, at) => [names[at], ...row.map((value) => format.number(value, 4))]))));
      return {
        element: h("div", { class: "stack" }, h("h2", {}, "Cosine similarity"), h("div", { class: "pair" }, maps.map((map) => map.element)), tables),
        requests,
        json: { inputs: names, results },
        csv: [["model", "prompt", "input", ...names], ...results.flatMap((each) => each.cosine.map((row, at) => [each.model, each.prompt, names[at], ...row]))],
      };
    }

    const stopPasting = images?.acceptPasted(main);
    const stop = workbench(main, {
      title: "Similarity", about: "The cosine similarity of each pair of inputs.", action: "Compare", frame, run,
      controls: [textField, images?.element ?? [], sides.map(({ box }) => box)],
      read: () => ({
        texts: texts.value,
        ...Object.fromEntries(sides.flatMap(({ name, model, prompt }) => [[`model_${name}`, model.value], [`prompt_${name}`, prompt.value]])),
      }),
    });
    return () => {
      stopPasting?.();
      stop();
    };
  },
};
