// Requests to the server that this page came from, below whatever path prefix a proxy has put in front of it.

const KEY = "trio_pool_serve.key";

/** Where the server's routes begin: the folder that this script's folder is in. */
export const BASE = new URL("../", import.meta.url);

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function headers(extra = {}) {
  return key.get() ? { ...extra, Authorization: `Bearer ${key.get()}` } : extra;
}

/** GET a path, or POST `body` to it as JSON. Returns the JSON response, what was asked, and how long each stage took. */
export async function request(path, body, signal) {
  const began = performance.now();
  const options = { signal, headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }) };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response, text;
  try {
    response = await fetch(new URL(path, BASE), options);
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "The server does not respond.");
  }
  const elapsed = performance.now() - began;
  if (!response.ok) throw new RequestError(response.status, messageOf(response, text));
  return { json: JSON.parse(text), path, body, elapsed, stages: serverTiming(response.headers.get("server-timing")) };
}

function messageOf(response, text) {
  try {
    const { error, message } = JSON.parse(text);
    return `${response.status}: ${error?.message ?? error ?? message ?? text}`;
  } catch {
    return `${response.status}: ${text.slice(0, 500) || response.statusText}`;
  }
}

/** Return `[[name, milliseconds, description], …]` of a Server-Timing header. */
export function serverTiming(header) {
  return (header ?? "").split(",").map((part) => part.trim()).filter(Boolean).map((part) => {
    const [name, ...parameters] = part.split(";");
    const found = Object.fromEntries(parameters.map((each) => each.trim().split("=")));
    return [name, Number(found.dur ?? 0), (found.desc ?? "").replace(/^"|"$/g, "")];
  });
}

/** Iterate over the JSON of server-sent events. Ends when the server ends the stream; throws RequestError. */
export async function* events(path, signal) {
  let response;
  try {
    response = await fetch(new URL(path, BASE), { signal, headers: headers({ Accept: "text/event-stream" }) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "The server does not respond.");
  }
  if (!response.ok) throw new RequestError(response.status, messageOf(response, await response.text()));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new RequestError(0, "The connection was lost.");
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    yield parts.filter((part) => part.startsWith("data: ")).map((part) => JSON.parse(part.slice(6)));
  }
}
