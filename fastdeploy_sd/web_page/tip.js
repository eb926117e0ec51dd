// What appears over a token that is pointed at: who guessed it, and what its step brought.

import { byId, element, plural } from "./dom.js";
import { classOf, labelOf, tellsOf } from "./sources.js";

/** Show tips over the tokens of a chat. */
export function showTips(chat) {
  const tip = byId("tip");
  let marked = [];

  const hide = () => {
    tip.hidden = true;
    marked.forEach((token) => token.classList.remove("same"));
    marked = [];
  };
  const show = (event) => {
    const token = event.target.closest?.(".token");
    const view = token && chat.views.get(token.closest(".message"));
    hide();
    if (!view) return;
    const { step, source } = token.dataset;
    marked = [...token.closest(".message").querySelectorAll(`.token[data-step="${Number(step)}"]`)];
    marked.forEach((other) => other.classList.add("same"));
    tip.replaceChildren(...told(view.tellStep(Number(step), source), source));
    tip.hidden = false;
    const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const left = Math.min(Math.max(box.left, 8), window.innerWidth - tip.offsetWidth - 8);
    const isAbove = box.top > tip.offsetHeight + 12;
    tip.style.left = `${left}px`;
    tip.style.top = `${isAbove ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
  };
  chat.box.addEventListener("pointerover", show);
  chat.box.addEventListener("click", show); // a finger does not hover
  chat.box.addEventListener("pointerleave", hide);
  chat.box.addEventListener("scroll", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

function told(step, source) {
  const name = element("strong", {}, element("span", { class: `swatch ${classOf(source)}` }), `${labelOf(source)}: `);
  const lines = [element("div", {}, name, tellsOf(source))];
  const drafts = step.drafted ? `${step.accepted} of ${plural(step.drafted, "draft")} accepted` : "no drafts";
  lines.push(element("div", {}, `Step ${step.number} gave ${plural(step.numTokens, "token")}: ${drafts}.`));
  if (step.own !== undefined && step.own !== step.drafted) {
    lines.push(element("div", {}, `Of ${labelOf(source)}: ${step.ofOwn} of ${step.own}.`));
  }
  return lines;
}
