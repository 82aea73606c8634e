// The view, kept in the URL's hash, so that a link opens it again: #samples?run=0&step=12&sort=reward

/** @typedef {{tab: string, values: Record<string, string>}} State */

/** @type {State} */
let state = parse();
/** @type {Set<() => void>} */
const listeners = new Set();

/** @returns {State} */
function parse() {
  const [tab, query] = location.hash.slice(1).split("?");
  return { tab: tab ?? "", values: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function write(/** @type {boolean} */ isNewPlace) {
  const words = new URLSearchParams(Object.entries(state.values).sort());
  const hash = `#${state.tab}${words.size ? `?${words}` : ""}`;
  if (hash === location.hash) return;
  history[isNewPlace ? "pushState" : "replaceState"](null, "", hash);
  seen = location.hash;
}

export const tab = () => state.tab;

/** @param {string} key @param {string} [otherwise] */
export const value = (key, otherwise = "") => state.values[key] ?? otherwise;

/** @param {string} key @param {number | null} [otherwise] @returns {any} */
export function numeric(key, otherwise = null) {
  const found = state.values[key];
  return found === undefined || found === "" || Number.isNaN(Number(found)) ? otherwise : Number(found);
}

/**
 * Change values; null removes one.
 * @param {Record<string, string | number | null | undefined>} changes
 * @param {{isNewPlace?: boolean}} [how] "back" returns from a new place
 */
export function set(changes, { isNewPlace = false } = {}) {
  for (const [key, of] of Object.entries(changes)) {
    if (of === null || of === undefined || of === "") delete state.values[key];
    else state.values[key] = String(of);
  }
  write(isNewPlace);
}

/** Values shared by all panels; the others are dropped when their panel is left. */
const SHARED = new Set(["run", "runs"]);

/** Go to another panel. @param {string} to @param {Record<string, string | number>} [values] */
export function go(to, values = {}) {
  const kept = Object.entries(state.values).filter(([key]) => SHARED.has(key));
  state = { tab: to, values: { ...Object.fromEntries(kept), ...mapped(values) } };
  write(true);
  for (const listener of listeners) listener();
}

/** @param {Record<string, string | number>} values */
const mapped = (values) => Object.fromEntries(Object.entries(values).map(([key, of]) => [key, String(of)]));

/** Call back after navigation by a link or the browser's buttons. @param {() => void} listener */
export function onMove(listener) {
  listeners.add(listener);
}

let seen = location.hash;

function moved() {
  if (location.hash === seen) return; // one navigation fires two events
  seen = location.hash;
  state = parse();
  for (const listener of listeners) listener();
}

addEventListener("hashchange", moved);
addEventListener("popstate", moved);
