// Arithmetic on vectors as the server returns them: base64 of little-endian float32.

export function floats(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, at) => view.getFloat32(4 * at, true));
}

/** Cut the vectors of a text's tokens, `[tokens, width]`, out of one array. */
export function rows(array, [count, width]) {
  return Array.from({ length: count }, (_, at) => array.subarray(at * width, (at + 1) * width));
}

export function dot(a, b) {
  let sum = 0;
  for (let at = 0; at < a.length; at += 1) sum += a[at] * b[at];
  return sum;
}

export function cosine(a, b) {
  return dot(a, b) / (Math.sqrt(dot(a, a)) * Math.sqrt(dot(b, b)) || 1);
}

/** Return the matrix of `compare(left, right)`, row by row. */
export function matrix(lefts, rights, compare) {
  return lefts.map((left) => rights.map((right) => compare(left, right)));
}

/** The largest of numbers, of which there may be more than a call takes as arguments. */
export function largest(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}

/** MaxSim of ColBERT (Khattab and Zaharia, arXiv 2004.12832): for each row its largest value, added up. */
export function maxSim(similarities) {
  return similarities.reduce((sum, row) => sum + largest(row), 0);
}
