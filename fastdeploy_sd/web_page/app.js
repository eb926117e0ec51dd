// Starts the page: asks the server what it is, shows one of the two views, and keeps the state in the bar up to date.

import { getJson, request } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element } from "./dom.js";
import { ServerView } from "./server.js";
import { Settings } from "./settings.js";
import { classOf, labelOf, tellsOf } from "./sources.js";
import { keep, kept } from "./store.js";
import { showTips } from "./tip.js";

const HEALTH_MS = 10000;
const about = { isRouter: false };
const views = { chat: byId("chat"), server: byId("server") };
const settings = new Settings(byId("settings"));
const chat = new Chat(settings, () => byId("model").value || undefined, showLegend);
const server = new ServerView(views.server, about);
const known = new Set(["target"]); // sources in the legend
let cards = [];

function showView() {
  const name = location.hash === "#server" ? "server" : "chat";
  for (const [other, box] of Object.entries(views)) {
    box.hidden = other !== name;
    byId(`show-${other}`).toggleAttribute("aria-current", other === name);
    if (other === name) byId(`show-${other}`).setAttribute("aria-current", "page");
  }
  server.show(name === "server");
}

/** Show what the server is: its models, and the colours that its methods may bring. */
async function learn() {
  const root = await getJson("./");
  about.isRouter = root.routes.includes("GET /instances");
  cards = (await getJson("v1/models")).data;
  const chosen = kept("model", "");
  byId("model").replaceChildren(...cards.map(({ id }) => element("option", { value: id }, id)));
  if (cards.some(({ id }) => id === chosen)) byId("model").value = chosen;
  chooseModel();
}

function chooseModel() {
  const card = cards.find(({ id }) => id === byId("model").value);
  const methods = card?.speculation?.methods ?? ["ngram", "suffix"]; // a router does not say
  settings.offer(methods);
  const drafting = methods.filter((name) => name !== "naive" && name !== "auto");
  known.clear();
  ["target", ...drafting, "grammar", "prediction"].forEach((name) => known.add(name));
  showLegend(chat.sources());
}

/** Show the colours of what the server may draft with, and of what has drafted. */
function showLegend(seen) {
  const toggle = element("input", { type: "checkbox", id: "colours", onchange: () => colour(toggle.checked) });
  toggle.checked = kept("colours", true);
  seen.forEach((name) => known.add(name));
  const chips = [...known].map((name) =>
    element("span", { class: `chip ${classOf(name)}`, title: tellsOf(name) }, labelOf(name)));
  byId("legend").replaceChildren(
    element("label", {}, toggle, "Who guessed each token"),
    ...chips,
    element("span", { class: "hint" }, "Coloured tokens were drafted and the model confirmed them, several in one step. The text is the same as without drafts."),
  );
  colour(toggle.checked);
}

function colour(isOn) {
  chat.box.classList.toggle("colours", isOn);
  keep("colours", isOn);
}

async function showState() {
  const state = byId("state");
  try {
    await request("health");
    state.textContent = "ready";
    state.className = "state ready";
    if (!cards.length) await learn();
  } catch (error) {
    state.textContent = error.status ? error.message : "no answer";
    state.className = "state bad";
  }
  setTimeout(showState, HEALTH_MS);
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  keep("theme", name);
}

function toggleSettings(isOpen) {
  byId("settings").hidden = !isOpen;
  byId("show-settings").setAttribute("aria-expanded", String(isOpen));
}

byId("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  theme(isDark ? "light" : "dark");
});
byId("show-settings").addEventListener("click", () => toggleSettings(byId("settings").hidden));
byId("show-chat").addEventListener("click", () => (location.hash = "chat"));
byId("show-server").addEventListener("click", () => (location.hash = "server"));
byId("model").addEventListener("change", () => {
  keep("model", byId("model").value);
  chooseModel();
});
window.addEventListener("hashchange", showView);
theme(kept("theme", null));
toggleSettings(window.innerWidth > 900);
showLegend(chat.sources());
showTips(chat);
showView();
showState();
