// What the browser keeps between two visits: the key, the settings and the conversation. All of it stays there.

const PREFIX = "fastdeploy_sd.";

/** Return what was kept under a name; `fallback` where nothing was, or it cannot be read. */
export function kept(name, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Keep a value; where the browser has no room or forbids it, it lives as long as the page. */
export function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // The page works without.
  }
}
