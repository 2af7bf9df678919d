// Files that people keep: what a view shows, as data or as a page that needs nothing else.

import { BASE } from "./api.js";

export function download(name, kind, content) {
  const address = URL.createObjectURL(new Blob([content], { type: kind }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Return one HTML file with a result as it is shown: texts as texts, canvases as pictures, the styles inside. */
export async function report(title, element, json) {
  const page = document.implementation.createHTMLDocument(`${title} – trio_pool_serve`);
  page.documentElement.lang = "en";
  page.documentElement.dataset.theme = document.documentElement.dataset.theme;
  const policy = page.createElement("meta");
  policy.httpEquiv = "Content-Security-Policy";
  policy.content = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
  const styles = page.createElement("style");
  styles.textContent = await (await fetch(new URL("console/console.css", BASE))).text();
  const encoding = page.createElement("meta");
  encoding.setAttribute("charset", "utf-8");
  page.head.append(encoding, policy, styles);

  const copy = page.importNode(element, true);
  const drawn = [...element.querySelectorAll("canvas")];
  for (const [at, canvas] of [...copy.querySelectorAll("canvas")].entries()) {
    const image = page.createElement("img");
    image.src = drawn[at].toDataURL();
    image.alt = drawn[at].getAttribute("aria-label") ?? "";
    canvas.replaceWith(image);
  }
  for (const control of copy.querySelectorAll("button")) control.setAttribute("disabled", "");
  const heading = page.createElement("h1");
  heading.textContent = title;
  const about = page.createElement("p");
  about.className = "hint";
  about.textContent = `From ${BASE.href}, ${new Date().toISOString()}.`;
  const data = page.createElement("pre");
  data.textContent = JSON.stringify(json, null, 1);
  const more = page.createElement("details");
  const summary = page.createElement("summary");
  summary.textContent = "The data";
  more.append(summary, data);
  const main = page.createElement("main");
  main.append(heading, about, copy, more);
  page.body.append(main);
  return `<!doctype html>\n${page.documentElement.outerHTML}\n`;
}
