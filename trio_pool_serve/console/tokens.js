// The tokens of a text, as the model reads them.

import { request } from "./api.js";

/**
 * The tokens of a text with their places in it: `{id, special, begin, end, text}`, `begin` and `end` in UTF-16 units, null
 * for special tokens.
 */
export async function placedTokens(model, text, signal) {
  const asked = await request("tokenize", { model, inputs: text, add_special_tokens: true }, signal);
  const found = asked.json[0];
  const unitOf = unitsByByte(text);
  const tokens = found.map(({ id, special, start, stop, text: covered }) => ({
    id, special, text: covered, begin: start === null ? null : unitOf[start], end: stop === null ? null : unitOf[stop],
  }));
  return { asked, tokens };
}

/** Positions in the response are of UTF-8 bytes; the strings of this language have UTF-16 units. */
function unitsByByte(text) {
  const units = [];
  let unit = 0;
  for (const character of text) {
    const bytes = new TextEncoder().encode(character).length;
    for (let at = 0; at < bytes; at += 1) units.push(unit);
    unit += character.length;
  }
  units.push(unit);
  return units;
}

/** The tokens that are computed for a text of an input type, and which of them have a vector. */
export async function computedTokens(model, text, inputType, signal) {
  const asked = await request("tokenize", { model, prompt: text, input_type: inputType, return_token_strs: true }, signal);
  const { tokens, token_strs: pieces, kept } = asked.json;
  return { asked, tokens: tokens.map((id, at) => ({ id, piece: pieces[at], kept: kept[at] })) };
}
