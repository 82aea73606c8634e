// The page's colours, distinct also for colour-blind users (after Okabe and Ito), and their theme.

const NUM_COLOURS = 8;

/** @type {Map<string, string>} */
const known = new Map();
/** @type {Set<() => void>} */
const listeners = new Set();

/** The current value of a custom property in the style sheet. @param {string} name "--text" */
export function css(name) {
  let found = known.get(name);
  if (found === undefined) {
    found = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    known.set(name, found);
  }
  return found;
}

/** A categorical colour for CSS. @param {number} index */
export const colour = (index) => `var(--c${index % NUM_COLOURS})`;
/** The same for a canvas. @param {number} index */
export const painted = (index) => css(`--c${index % NUM_COLOURS}`);

/** Colours of activities, the same for seconds by phase as in the timeline.
 * @type {Record<string, number>} */
const ACTIVITIES = {
  generating: 0, generation: 0, training: 1, policy_training: 1, train: 1, "log-probabilities": 2, logprobs: 2,
  get_logprobs: 2, reference_logprobs: 2, refitting: 3, refit: 3, transfer: 3, copy: 3, verifying: 5, verify: 5,
  digest: 5, validating: 4, validation: 4, saving: 6, checkpointing: 6, recording: 7, commit: 7, starting: 7,
};

/** The colour of an activity; null for waiting, which has none. @param {string} what */
export function activityColour(what) {
  if (what.startsWith("waiting") || what === "idle") return null;
  const found = ACTIVITIES[what] ?? ACTIVITIES[what.split(" ")[0]];
  return found ?? [...what].reduce((sum, c) => sum + c.charCodeAt(0), 0) % NUM_COLOURS;
}

/** Black or white, whichever is more readable on a categorical colour. @param {number} index */
export function ink(index) {
  const hex = painted(index);
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.25 ? "#0b0f14" : "#ffffff";
}

/** `#rrggbb` with an opacity. @param {string} hex @param {number} alpha */
export function faded(hex, alpha) {
  return `${hex}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;
}

/** Call back when the theme changes. @param {() => void} listener @returns {() => void} stops the calls */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed() {
  known.clear();
  for (const listener of listeners) listener();
}

const system = matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", changed);

export const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

/** Switch between light and dark; the choice is stored unless it equals the system's. */
export function toggleTheme() {
  const to = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = to;
  try {
    if ((to === "dark") === system.matches) localStorage.removeItem("tandem.theme");
    else localStorage.setItem("tandem.theme", to);
  } catch (error) {
    // Without storage, the choice holds until the page is closed.
  }
  changed();
}
