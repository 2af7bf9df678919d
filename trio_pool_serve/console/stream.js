// The stream of samples, one a second: fifteen minutes of them, from the server's history and from then on.

import { events, RequestError } from "./api.js";

const KEPT = 900;
const SILENCE_MS = 2500;
const MAX_PAUSE_MS = 5000;

export class LiveStream {
  samples = [];
  error = null;
  #listeners = new Set();
  #abort = null;

  get latest() {
    return this.samples.at(-1);
  }

  /** Call `listener(this)` after each change, and once now. Returns what ends that. */
  subscribe(listener) {
    this.#listeners.add(listener);
    listener(this);
    return () => this.#listeners.delete(listener);
  }

  start() {
    if (this.#abort) return;
    this.#abort = new AbortController();
    this.#run(this.#abort.signal);
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  restart() {
    this.stop();
    this.start();
  }

  async #run(signal) {
    let pause = 250;
    while (!signal.aborted) {
      // A server that is stopped without closing its connections sends nothing more.
      const silent = new AbortController();
      let timer = setTimeout(() => silent.abort(), SILENCE_MS * 2);
      try {
        const after = this.latest?.number ?? 0;
        for await (const found of events(`console/live?after=${after}`, AbortSignal.any([signal, silent.signal]))) {
          clearTimeout(timer);
          timer = setTimeout(() => silent.abort(), SILENCE_MS);
          pause = 250;
          this.#add(found);
        }
        this.#fail(new RequestError(0, "The server closed the connection."));
      } catch (error) {
        if (signal.aborted) return;
        this.#fail(silent.signal.aborted ? new RequestError(0, "The server sends no data.") : error);
        if (error.status === 401 || error.status === 403) return this.stop();  // until there is another key
      } finally {
        clearTimeout(timer);
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, MAX_PAUSE_MS);
    }
  }

  #add(found) {
    // Another process of the server, or one that was restarted, has numbers of its own, and may send what is known.
    if (this.latest) found = found.filter((each) => each.time > this.latest.time);
    this.samples = [...this.samples, ...found].slice(-KEPT);
    this.error = null;
    this.#tell();
  }

  #fail(error) {
    this.error = error;
    this.#tell();
  }

  #tell() {
    for (const listener of this.#listeners) listener(this);
  }
}
