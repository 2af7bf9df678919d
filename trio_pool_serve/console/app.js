// The page's frame: the tabs, the key, the theme, the models, the stream of samples.

import { key, request } from "./api.js";
import { h } from "./elements.js";
import { LiveStream } from "./stream.js";
import { liveView, processState } from "./live.js";
import { classify } from "./panels/classify.js";
import { lateInteraction } from "./panels/late_interaction.js";
import { rerank } from "./panels/rerank.js";
import { similarity } from "./panels/similarity.js";
import { sparse } from "./panels/sparse.js";
import { tokenClasses } from "./panels/token_classes.js";
import * as permalink from "./permalink.js";

const THEME = "trio_pool_serve.theme";
const PANELS = [similarity, rerank, classify, tokenClasses, lateInteraction, sparse];

const page = Object.fromEntries(
  ["state", "since", "tabs", "main", "theme", "key-button", "key-dialog", "key-form", "key-reason", "key", "key-forget"]
    .map((id) => [id, document.getElementById(id)]),
);
const stream = new LiveStream();
let models = [];
let modelStates = "";
let reload = 0;
let tab = permalink.read().tab ?? "live";
let shown = null;

// -- theme -------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const chosen = page.theme.value;
  document.documentElement.dataset.theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
  document.dispatchEvent(new Event("themechange"));
}

page.theme.value = localStorage.getItem(THEME) ?? "auto";
page.theme.addEventListener("change", () => {
  localStorage.setItem(THEME, page.theme.value);
  applyTheme();
});
dark.addEventListener("change", applyTheme);
applyTheme();

// -- key ---------------------------------------------------------------------------------------------------------

function askForKey(reason) {
  if (page["key-dialog"].open) return;
  page["key-reason"].textContent = reason;
  page.key.value = "";
  page["key-dialog"].showModal();
}

function useKey(value) {
  key.set(value.trim());
  page["key-dialog"].close();
  stream.restart();
  loadModels();
}

page["key-button"].addEventListener("click", () => askForKey(key.get() ? "A key is in use." : "No key is in use."));
page["key-form"].addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(page.key.value);
});
page["key-forget"].addEventListener("click", () => useKey(""));

// -- tabs --------------------------------------------------------------------------------------------------------

function views() {
  const live = { id: "live", title: "Live", open: (main) => liveView(main, stream) };
  const able = PANELS.filter((panel) => models.some(panel.accepts));
  return [live, ...able.map((panel) => ({ id: panel.id, title: panel.title, open: (main) => panel.open(main, models.filter(panel.accepts), { askForKey, state: panelState(panel.id) }) }))];
}

/** The permalink's state of one view: `get()`, and `set(state)`, which returns whether it fits into an address. */
function panelState(id) {
  return {
    get: () => (permalink.read().tab === id ? permalink.read() : {}),
    set: (state) => permalink.write({ tab: id, ...state }),
  };
}

function drawTabs() {
  const all = views();
  const chosen = all.find((view) => view.id === tab) ?? all[0];
  const focused = page.tabs.contains(document.activeElement);
  page.tabs.replaceChildren(...all.map((view) => h("button", {
    type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": "main", "aria-selected": String(view === chosen),
    tabindex: view === chosen ? "0" : "-1", onclick: () => choose(view.id),
  }, view.title)));
  if (focused) document.getElementById(`tab-${chosen.id}`).focus();
  if (shown?.id === chosen.id) return;
  shown?.close?.();
  page.main.replaceChildren();
  page.main.setAttribute("role", "tabpanel");
  page.main.setAttribute("aria-labelledby", `tab-${chosen.id}`);
  shown = { id: chosen.id, close: chosen.open(page.main) };
}

function choose(id) {
  if (id !== tab) permalink.write({ tab: id });
  tab = id;
  drawTabs();
}

page.tabs.addEventListener("keydown", (event) => {
  const ids = [...page.tabs.children].map((element) => element.id.replace("tab-", ""));
  const at = ids.indexOf(shown.id);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: ids.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose(ids[(next + ids.length) % ids.length]);
  document.getElementById(`tab-${shown.id}`).focus();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();  // the fragment is the page's state
  page.main.focus();
});
addEventListener("hashchange", () => {
  tab = permalink.read().tab ?? "live";
  shown?.close?.();
  shown = null;
  drawTabs();
});

// -- models ------------------------------------------------------------------------------------------------------

async function loadModels() {
  let found;
  try {
    found = (await request("console/models")).json;
  } catch (error) {
    if (error.status === 401) askForKey("This server answers requests with an API key only.");
    return;
  }
  clearTimeout(reload);
  if (found.some(({ state }) => state === "loading")) reload = setTimeout(loadModels, 1000);
  // A model that is unloaded and loaded again is no reason to lose what is in a form.
  const described = JSON.stringify(found.map((model) => ({ ...model, state: undefined })));
  if (described === JSON.stringify(models.map((model) => ({ ...model, state: undefined })))) return;
  models = found;
  if (shown && shown.id !== "live") {  // its form lists models
    shown.close?.();
    shown = null;
  }
  drawTabs();
}

// -- state -------------------------------------------------------------------------------------------------------

const LEVELS = { ready: "good", overloaded: "warn", draining: "warn" };

stream.subscribe((update) => {
  const latest = update.latest;
  if (update.error) {
    page.state.textContent = update.error.status === 401 ? "needs a key" : update.error.status === 403 ? "key without admin" : "no answer";
    page.state.dataset.level = update.error.status === 401 || update.error.status === 403 ? "warn" : "bad";
    page.since.textContent = update.error.message;
    if (update.error.status === 401) askForKey("This server answers requests with an API key only.");
  } else if (latest) {
    const down = Object.entries(latest.processes).filter(([, each]) => processState(each) !== "ready");
    page.state.textContent = latest.state;
    page.state.dataset.level = latest.state === "ready" && down.length ? "warn" : LEVELS[latest.state] ?? "bad";
    page.since.textContent = down.length ? `not running: ${down.map(([name]) => name).join(", ")}` : "";
    const states = Object.entries(latest.models).map(([name, each]) => `${name} ${each.state}`).join();
    if (states !== modelStates) loadModels();
    modelStates = states;
  }
});
document.addEventListener("visibilitychange", () => (document.hidden ? stream.stop() : stream.start()));
drawTabs();
loadModels();
if (!document.hidden) stream.start();
