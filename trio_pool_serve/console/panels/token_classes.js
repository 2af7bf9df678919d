// The class of each token, in the text.

import { request } from "../api.js";
import { field, format, h, table } from "../elements.js";
import { modelSelect, textArea, workbench } from "../panel.js";
import { placedTokens } from "../tokens.js";
import { floats, rows } from "../vectors.js";

const EXAMPLE = "Ada Lovelace met Charles Babbage in London in 1833.";
const COLOURS = 7;

export const tokenClasses = {
  id: "token-classes",
  title: "Token classes",
  accepts: (model) => model.tasks.includes("token_classify"),
  open(main, models, frame) {
    const state = frame.state.get();
    const model = modelSelect(models, state.model, "token_classify");
    const [text, textField] = textArea("Text", state.text ?? EXAMPLE, 6);

    async function run(signal) {
      const given = text.value;
      const [asked, placed] = await Promise.all([
        request("pooling", { model: model.value, task: "token_classify", input: given, encoding_format: "base64" }, signal),
        placedTokens(model.value, given, signal),
      ]);
      const labels = models.find(({ id }) => id === model.value)?.labels ?? [];
      const [{ data, shape }] = asked.json.data;
      const scores = rows(floats(data), shape);
      if (scores.length !== placed.tokens.length) throw new Error(`${scores.length} tokens were computed, but the text has ${placed.tokens.length}: it was truncated, or a prompt was prepended.`);
      const tokens = placed.tokens.map((token, at) => {
        const best = scores[at].indexOf(Math.max(...scores[at]));
        return { ...token, label: labels[best] ?? `LABEL_${best}`, best, score: scores[at][best] };
      });
      return {
        element: h("div", { class: "stack" }, h("h2", {}, "Token classes"), marked(given, tokens), legend(tokens), details(tokens)),
        requests: [asked, placed.asked],
        json: { model: model.value, text: given, tokens },
        csv: [["token", "begin", "end", "label", "score"], ...tokens.map((each) => [each.text, each.begin, each.end, each.label, each.score])],
      };
    }

    return workbench(main, {
      title: "Token classes", about: "The most probable class of each token; O means none.", action: "Classify tokens", frame, run,
      controls: [field("Model", model), textField], read: () => ({ model: model.value, text: text.value }),
    });
  },
};

const kindOf = (label) => label.replace(/^[BILUSE]-/, "");
const isNone = (label) => label === "O";

function coloursOf(tokens) {
  const kinds = [...new Set(tokens.filter(({ label, special }) => !special && !isNone(label)).map(({ label }) => kindOf(label)))].sort();
  return new Map(kinds.map((kind, at) => [kind, `var(--c${(at % COLOURS) + 1})`]));
}

/** Tokens that belong together as one: pieces of a word, and what follows with a label that goes on (`I-`). */
function spansOf(tokens) {
  const spans = [];
  for (const { begin, end, label } of tokens.filter((token) => token.begin !== null)) {
    const last = spans.at(-1);
    const kind = kindOf(label);
    if (last && begin < last.end) continue;  // several tokens of one character
    if (last?.kind === kind && (begin === last.end || label.startsWith("I-"))) last.end = end;
    else spans.push({ begin, end, kind });
  }
  return spans;
}

function marked(text, tokens) {
  const colours = coloursOf(tokens);
  const parts = [];
  let end = 0;
  for (const { begin, end: stop, kind } of spansOf(tokens)) {
    parts.push(text.slice(end, begin));
    const colour = colours.get(kind);
    parts.push(colour ? h("mark", { data: { kind }, style: { "--kind": colour } }, text.slice(begin, stop)) : text.slice(begin, stop));
    end = stop;
  }
  parts.push(text.slice(end));
  return h("p", { class: "text-view" }, parts);
}

function legend(tokens) {
  const entries = [...coloursOf(tokens)];
  if (!entries.length) return h("p", { class: "hint" }, "No token has a class.");
  return h("p", { class: "legend" }, entries.map(([kind, colour]) => h("span", {}, h("i", { style: { "--kind": colour } }), kind)));
}

function details(tokens) {
  return h("details", {}, h("summary", {}, "Tokens as a table"),
    table("Tokens", [["token"], ["class"], ["score", "number"]], tokens.map(({ text, label, score }) => [text, label, format.number(score, 4)])));
}
