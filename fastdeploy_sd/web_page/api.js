// Requests to the server that the page came from, with the key where it wants one. Paths are relative to the page.

import { byId } from "./dom.js";
import { keep, kept } from "./store.js";

let key = kept("key", null);
let asking = null;

/** Raised for an answer that is an error; `status` is HTTP's. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request; asks for the key once where it is missing or wrong. Returns the response, which is no error. */
export async function request(path, options = {}) {
  for (;;) {
    const sent = key;
    const authorization = sent === null ? {} : { Authorization: `Bearer ${sent}` };
    const headers = { Accept: "application/json", ...authorization, ...options.headers };
    const response = await fetch(path, { ...options, headers, credentials: "same-origin", redirect: "error" });
    if (response.ok) return response;
    const message = await errorText(response);
    if (response.status !== 401) throw new ServerError(response.status, message);
    if (sent === key) await askForKey(sent !== null);
  }
}

export const getJson = async (path) => (await request(path)).json();
export const getText = async (path) => (await request(path, { headers: { Accept: "text/plain" } })).text();

/** Yield the JSON of each event of a streamed answer until its end; `signal` stops it. */
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError(0, "The connection ended before the answer did.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = dataOf(event);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

async function errorText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 500) || `${response.status} ${response.statusText}`;
  }
}

/** Several requests may wait for the same answer of the user. */
function askForKey(wasRefused) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key");
    byId("key-refused").hidden = !wasRefused;
    byId("key-text").value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = byId("key-text").value.trim();
      keep("key", key);
      dialog.close();
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}
