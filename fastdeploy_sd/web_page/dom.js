// Makes elements. Text is always set as text, so nothing that comes from a model or a file can become markup.

/** Return an element; `attributes` named `on...` are listeners, false and null leave an attribute out. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Return an SVG element. */
export function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Return a button that does something. */
export function button(text, act, attributes = {}) {
  return element("button", { type: "button", onclick: act, ...attributes }, text);
}

/** Copy a text; browsers offer the first way to pages of this machine and of https only. */
export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = element("textarea", { class: "hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Return a number as text: three digits at most, and K or M where it is large. */
export function short(value, digits = 3) {
  if (!Number.isFinite(value)) return "-";
  const [scaled, unit] = value >= 1e6 ? [value / 1e6, "M"] : value >= 1e4 ? [value / 1e3, "K"] : [value, ""];
  return Number(scaled.toPrecision(scaled >= 1000 ? 4 : digits)).toLocaleString("en") + unit;
}

export const percent = (part) => (Number.isFinite(part) ? `${Math.round(part * 100)}%` : "-");
export const plural = (count, word) => `${short(count, 4)} ${word}${count === 1 ? "" : "s"}`;
