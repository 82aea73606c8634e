// Numbers, times and names as people read them.

/** A number in few characters: 0.1234, 12.34, 1,234, 1.2e-5. @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) {
    return Number(value.toPrecision(3)).toExponential().replaceAll("-", "−").replace("e+", "e");
  }
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

/** @param {number} value */
export const whole = (value) => Math.round(value).toLocaleString("en");

/** @param {number | null | undefined} share @param {number} [digits] */
export const percent = (share, digits = 0) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)}%`;

/** A duration: 340 µs, 12.3 s, 4 min 05 s, 3 h 12 min. @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const s = Math.round(seconds);
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

/** @param {number | null | undefined} count */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${unit ? Number(count.toPrecision(3)) : count} ${units[unit]}`;
}

/** @param {number} gigabytes */
export const gb = (gigabytes) => (gigabytes >= 1 ? `${gigabytes.toFixed(2)} GB` : `${Math.round(gigabytes * 1000)} MB`);

/**
 * The format of a metric's values, with the unit at the end of its name.
 * @param {string} name @returns {(value: number) => string}
 */
export function writer(name) {
  if (name.endsWith("_gb")) return gb;
  const isSeconds = name === "seconds" || name.startsWith("seconds/")
    || (name.endsWith("_s") && !name.endsWith("_per_s"));
  if (isSeconds) return duration;
  return SHARE.test(name) ? (value) => (Number.isFinite(value) ? `${number(100 * value)}%` : number(value)) : number;
}

const SHARE = /accuracy|fraction/;
/** Units by what is in a metric's name; the first match counts. @type {[RegExp, string][]} */
const UNITS = [
  [/^seconds\b|_gb$/, ""], [/tokens_per_s$/, "tokens/s"], [/_per_s$/, "per second"], [/_s$|accuracy|fraction/, ""],
  [/length|^num_.*tokens/, "tokens"], [/trajectory_age/, "versions"], [/entropy|^(approx_)?kl$/, "nat/token"],
  [/^groups_|buffer_size|in_store/, "groups"], [/^token_mult_prob_error$|(^|_)ratio(_|$)/, "times"], [/turns/, "turns"],
];
/** What the loss of these algorithms is, which is no unit of others' losses. @type {Record<string, string>} */
const LOSSES = { sft: "nat/token", dpo: "nat/pair", rm: "nat/pair" };

/**
 * The unit of a metric's values, where they are not written with one; nothing for bare numbers.
 * @param {string} name @param {string} algorithm
 */
export function unit(name, algorithm) {
  if (/^(val_)?loss$/.test(name)) return LOSSES[algorithm] ?? "";
  return UNITS.find(([pattern]) => pattern.test(name))?.[1] ?? "";
}

/** Time of day. @param {number} at Unix seconds */
export function clock(at) {
  const date = new Date(at * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
}

/** @param {number} at Unix seconds */
export function day(at) {
  const date = new Date(at * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

/** @param {number} value */
function two(value) {
  return String(value).padStart(2, "0");
}

/** @type {Record<string, string>} */
const TITLES = {
  reward: "Reward", val_accuracy: "Held-out accuracy", accuracy: "Accuracy", loss: "Loss", val_loss: "Held-out loss",
  kl: "KL to the reference", approx_kl: "KL of the update", entropy: "Entropy", grad_norm: "Gradient norm",
  mean_generation_length: "Response length",
  max_generation_length: "Longest response",
  truncated_fraction: "Truncated responses", token_mult_prob_error: "Log-probability gap",
  clip_fraction: "Clipped tokens", tokens_per_s: "Tokens per second", groups_without_spread: "Groups without spread",
  learning_rate: "Learning rate", reward_std: "Spread of rewards", avg_trajectory_age: "Mean age of samples",
  buffer_size: "In the buffer", engine_idle_s: "Engines idle", trainer_idle_s: "Trainers idle",
  slowest_trainer: "Slowest trainer rank", trainer_compute_max_s: "Own work of that rank",
  groups_too_old: "Groups too old", val_reward: "Held-out reward", "seconds/total": "Seconds a step",
  sampling_importance_ratio: "Importance ratio", probs_ratio: "Probability ratio",
  rewards_chosen_mean: "Reward, chosen",
  rewards_rejected_mean: "Reward, rejected", val_rewards_chosen_mean: "Held-out reward, chosen",
};

/** A metric's label on the page. @param {string} name */
export function title(name) {
  if (TITLES[name]) return TITLES[name];
  const unitless = name.replace(/(?<!_per)_(s|gb)$/, "").replace(/^seconds\//, "seconds: ");
  const words = unitless.replaceAll("_", " ").replace("/", ": ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}
