// A request as a command and as a program.

import { BASE, key } from "./api.js";
import { h } from "./elements.js";

export function curl(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const auth = key.get() ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  return `curl ${quoted(new URL(path, BASE).href)} \\\n  -H 'Content-Type: application/json'${auth} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

export function python(path, body) {
  const auth = key.get() ? '\nheaders = {"Authorization": f"Bearer {os.environ[\'API_KEY\']}"}' : "";
  const imports = key.get() ? "import os\n\nimport httpx\n" : "import httpx\n";
  return `${imports}${auth}
response = httpx.post(
    ${literal(new URL(path, BASE).href)},
    json=${literal(body)},${auth ? "\n    headers=headers," : ""}
    timeout=60,
)
response.raise_for_status()
print(response.json())
`;
}

/** A JSON value as Python writes it. */
function literal(value) {
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
  // JSON's escapes are Python's, but for surrogate pairs, which JSON.stringify leaves as characters.
  return JSON.stringify(value);
}

export function snippets({ path, body }) {
  const block = (title, text) => h("details", {}, h("summary", {}, title),
    h("pre", { tabindex: "0", "aria-label": title }, text),
    h("button", { type: "button", onclick: (event) => copy(event.target, text) }, "Copy"));
  return h("div", {}, block(`curl: ${path}`, curl(path, body)), block(`Python: ${path}`, python(path, body)));
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy";
  }
}
