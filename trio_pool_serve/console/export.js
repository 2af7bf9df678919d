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

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

/** Return a node as HTML, with canvases as pictures. Copies of elements would be subject to this page's policy. */
function markup(node) {
  if (node.nodeType === Node.TEXT_NODE) return escaped(node.data);
  if (node.localName === "canvas") return `<img alt="${escaped(node.getAttribute("aria-label") ?? "")}" src="${node.toDataURL()}">`;
  const attributes = [...node.attributes].map(({ name, value }) => ` ${name}="${escaped(value)}"`).join("");
  const start = `<${node.localName}${attributes}${node.localName === "button" ? " disabled" : ""}>`;
  return node.localName === "img" ? start : `${start}${[...node.childNodes].map(markup).join("")}</${node.localName}>`;
}

/** Return one HTML file with a result as it is shown: texts as texts, canvases as pictures, the styles inside. */
export async function report(title, element, json) {
  const styles = await (await fetch(new URL("console/console.css", BASE))).text();
  const theme = document.documentElement.dataset.theme;
  return `<!doctype html>
<html lang="en" data-theme="${theme}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>${escaped(title)} – trio_pool_serve</title>
<style>
${styles}</style>
</head>
<body>
<main class="stack">
<h1>${escaped(title)}</h1>
<p class="hint">From ${escaped(BASE.href)}, ${new Date().toISOString()}.</p>
${markup(element)}
<details><summary>The data</summary><pre>${escaped(JSON.stringify(json, null, 1))}</pre></details>
</main>
</body>
</html>
`;
}
