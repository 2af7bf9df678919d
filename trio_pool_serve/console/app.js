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
const LOADING_MS = 1000;
const SOMETIMES_MS = 15_000;
const PANELS = [similarity, rerank, classify, tokenClasses, lateInteraction, sparse];

const page = Object.fromEntries(
  ["state", "since", "tabs", "main", "theme", "key-button", "key-dialog", "key-form", "key-reason", "key", "key-forget"]
    .map((id) => [id, document.getElementById(id)]),
);
const stream = new LiveStream();
let models = [];
let modelStates = "";
let reload = 0;
let asked = 0;
let tab = permalink.read().tab ?? "live";
let isFromAddress = true;  // whether the next view is opened by a link, and sends what that has
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
  return [live, ...PANELS.filter((panel) => models.some(panel.accepts))];
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
  const able = models.filter(chosen.accepts ?? (() => false));
  shown = { id: chosen.id, able, close: chosen.open(page.main, able, { askForKey, state: panelState(chosen.id), isFromAddress }) };
  if (chosen.id === tab) isFromAddress = false;
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
  isFromAddress = true;
  shown?.close?.();
  shown = null;
  drawTabs();
});

// -- models ------------------------------------------------------------------------------------------------------

async function loadModels() {
  const mine = ++asked;
  let found = [];
  try {
    found = (await request("console/models")).json;
  } catch (error) {
    if (error.status !== 401) return;
    askForKey("This server requires an API key.");
  }
  if (mine !== asked) return;  // there is a later answer, or there will be
  clearTimeout(reload);
  reload = setTimeout(loadModels, found.some(({ state }) => state === "loading") ? LOADING_MS : SOMETIMES_MS);
  // A model that is unloaded and loaded again changes nothing in a form.
  const described = (all) => JSON.stringify(all.map((model) => ({ ...model, state: undefined })));
  if (described(found) === described(models)) return;
  models = found;
  const panel = PANELS.find(({ id }) => id === shown?.id);
  if (panel) {
    shown.able.splice(0, Infinity, ...models.filter(panel.accepts));
    for (const element of page.main.querySelectorAll("select.models")) element.refresh();
  }
  drawTabs();
}

// -- state -------------------------------------------------------------------------------------------------------

const LEVELS = { ready: "good", overloaded: "warn", draining: "warn" };

/** Show a state; texts that do not change are not read out again. */
function showState(text, level, more) {
  for (const [element, now] of [[page.state, text], [page.since, more]]) if (element.textContent !== now) element.textContent = now;
  page.state.dataset.level = level;
}

stream.subscribe(({ error, latest }) => {
  if (error?.status === 401) {
    showState("needs a key", "warn", error.message);
    askForKey("This server requires an API key.");
  } else if (error) {
    const isForbidden = error.status === 403;
    showState(isForbidden ? "key without admin" : "no response", isForbidden ? "warn" : "bad", error.message);
  } else if (latest) {
    const down = Object.entries(latest.processes).filter(([, each]) => processState(each) !== "ready").map(([name]) => name);
    const level = latest.state === "ready" && down.length ? "warn" : LEVELS[latest.state] ?? "bad";
    showState(latest.state, level, down.length ? `not running: ${down.join(", ")}` : "");
    const states = Object.entries(latest.models).map(([name, each]) => `${name} ${each.state}`).join();
    if (states !== modelStates) loadModels();
    modelStates = states;
  }
});
document.addEventListener("visibilitychange", () => (document.hidden ? stream.stop() : stream.start()));
drawTabs();
loadModels();
if (!document.hidden) stream.start();
