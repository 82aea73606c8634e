// The text of a sample, with special tokens set apart, and the policy's tokens coloured by their properties.

import { el, hideTip, showTip } from "./dom.js";
import { number } from "./format.js";

/**
 * @typedef {object} Token
 * @property {string} text
 * @property {boolean} made_by_policy
 * @property {number | null} logprob
 * @property {number | null} trainer_logprob
 * @property {number | null} version
 * @property {number | null} [advantage]
 */

/** Markers that chat templates set: <|im_start|>, </s>, [INST], <start_of_turn>. A model may write such text too. */
const TAGS = ["s", "pad", "unk", "bos", "eos", "eot", "mask", "think", "tool_call", "tool_response", "start_of_turn",
  "end_of_turn", "start_of_image", "end_of_image", "image", "image_soft_token", "fake_token_around_image",
  "global-img"].join("|");
const SPECIAL = new RegExp(`(<\\|[^|<>\\s]{1,60}\\|>|<｜[^<>]{1,60}｜>|</?(?:${TAGS})>|\\[/?INST\\])`);

/** Text with special tokens set apart. @param {string} text */
export function marked(text) {
  return text.split(SPECIAL).filter(Boolean).map((part) => (SPECIAL.test(part) ? el("span.special", null, part)
    : part));
}

/** @type {[string, string][]} */
export const COLOURINGS = [
  ["plain", "plain"], ["gap", "log-prob gap"], ["advantage", "advantage"], ["version", "version"],
    ["logprob", "log-prob"],
];

const FULL_GAP = 1; // nats at which the colour is full
const FULL_ADVANTAGE = 2;
const FULL_SURPRISE = 6;

/**
 * The tokens of a sample, from the policy's first one on.
 * @param {Token[]} tokens @param {string} by one of `COLOURINGS` @param {number | null} advantage of the sample
 */
export function coloured(tokens, by, advantage) {
  const first = tokens.findIndex((token) => token.made_by_policy);
  const shown = first < 0 ? [] : tokens.slice(first);
  const newest = Math.max(...shown.map((token) => token.version ?? -1));
  return el("div.text.tokens", {
    onmouseover: (/** @type {MouseEvent} */ event) => explain(event, shown, advantage), onmouseleave: hideTip,
  }, shown.map((token, i) => (isRepeated(shown, i) ? null : tokenSpan(token, i, by, advantage, newest,
    repeats(shown, i)))));
}

/** Whether a token given to the policy is the special one before it again, as those of a picture are.
 * @param {Token[]} tokens @param {number} i */
function isRepeated(tokens, i) {
  const [one, two] = [tokens[i - 1], tokens[i]];
  return Boolean(one && two) && !one.made_by_policy && !two.made_by_policy && one.text === two.text
    && SPECIAL.test(two.text);
}

/** How often a token stands there side by side. @param {Token[]} tokens @param {number} i */
function repeats(tokens, i) {
  let next = i + 1;
  while (isRepeated(tokens, next)) next += 1;
  return next - i;
}

/** @param {Token} token @param {number} place @param {string} by @param {number | null} advantage
 * @param {number} newest @param {number} times */
function tokenSpan(token, place, by, advantage, newest, times) {
  const isSpecial = SPECIAL.test(token.text);
  const tag = `span.token${isSpecial ? ".special" : ""}${token.made_by_policy ? "" : ".given"}`;
  const colour = token.made_by_policy ? background(token, by, advantage, newest) : null;
  return el(tag, { data: { token: String(place) }, style: colour ? { "background-color": colour } : {} },
    times > 1 ? `${token.text} × ${times}` : token.text);
}

/** @param {Token} token @param {string} by @param {number | null} advantage @param {number} newest */
function background(token, by, advantage, newest) {
  if (by === "gap") return diverging(gapOf(token), FULL_GAP);
  if (by === "advantage") return diverging(token.advantage ?? advantage, FULL_ADVANTAGE);
  if (by === "version") return token.version === null ? null : age(newest - token.version);
  if (by === "logprob") return token.logprob === null ? null : strength("--cold", -token.logprob / FULL_SURPRISE);
  return null;
}

/** The trainer's log-probability minus the engine's. @param {Token} token */
function gapOf(token) {
  return token.trainer_logprob === null || token.trainer_logprob === undefined || token.logprob === null
    ? null : token.trainer_logprob - token.logprob;
}

/** @param {number | null | undefined} value @param {number} full */
function diverging(value, full) {
  return value === null || value === undefined ? null : strength(value < 0 ? "--cold" : "--warm",
    Math.abs(value) / full);
}

/** @param {string} hue @param {number} share */
const strength = (hue, share) => `rgb(var(${hue}) / ${(0.75 * Math.min(1, Math.sqrt(Math.max(0, share)))).toFixed(3)})`;
/** @param {number} behind versions behind the newest of the sample */
const age = (behind) => `color-mix(in srgb, var(--c${behind % 8}) 45%, transparent)`;

/** The legend of the colours. @param {Token[]} tokens @param {string} by @param {number | null} advantage */
export function legend(tokens, by, advantage) {
  const made = tokens.filter((token) => token.made_by_policy);
  if (by === "gap") {
    if (!made.some((token) => gapOf(token) !== null)) {
      return el("p.legend-line", null,
        "The trainer's log-probabilities of this sample are not recorded, so there is no gap to colour by.");
    }
    const gaps = made.map(gapOf).filter((gap) => gap !== null).map((gap) => Math.abs(/** @type {number} */ (gap)));
    return scale("likelier to the engine", "likelier to the trainer", `±${FULL_GAP} nat`,
      `mean ${number(gaps.reduce((a, b) => a + b, 0) / gaps.length)}, most ${number(Math.max(...gaps))}`);
  }
  if (by === "advantage") {
    if (advantage === null) return el("p.legend-line", null, "This sample was not trained on: it has no advantage.");
    return scale("made less likely", "made likelier", `±${FULL_ADVANTAGE}`, `advantage ${number(advantage)}`);
  }
  if (by === "version") return versions(made);
  if (by === "logprob") return scale("", "", "",
    `colour is full at ${-FULL_SURPRISE} nat; mean ${number(mean(made.map((token) => token.logprob)))}`, true);
  const given = tokens.length - made.length;
  return el("p.legend-line", null, `${made.length} tokens by the policy${given ? `, ${given} given to it` : ""}`);
}

/** @param {(number | null)[]} values */
function mean(values) {
  const known = /** @type {number[]} */ (values.filter((value) => value !== null));
  return known.reduce((a, b) => a + b, 0) / (known.length || 1);
}

/** @param {Token[]} made */
function versions(made) {
  /** @type {Map<number, number>} */
  const counts = new Map();
  for (const token of made) if (token.version !== null) counts.set(token.version, (counts.get(token.version) ?? 0) + 1);
  const order = [...counts].sort((a, b) => b[0] - a[0]);
  if (!order.length) return el("p.legend-line", null, "The versions of this sample are not recorded.");
  return el("p.legend-line", null, order.map(([version, count]) => el("span.key", null,
    el("i.swatch", { style: { "--c": age(order[0][0] - version) } }), `version ${version}: ${count} tokens`)));
}

/** @param {string} low @param {string} high @param {string} full @param {string} told @param {boolean} [isOneSided] */
function scale(low, high, full, told, isOneSided = false) {
  return el("p.legend-line", null, low, el(isOneSided ? "i.scale.one" : "i.scale"), high,
    full ? el("span.dim", null, full) : null, el("b", null, told));
}

/** @param {MouseEvent} event @param {Token[]} tokens @param {number | null} advantage */
function explain(event, tokens, advantage) {
  const place = /** @type {HTMLElement} */ (event.target).dataset.token;
  if (place === undefined) { hideTip(); return; }
  const token = tokens[Number(place)];
  const facts = token.made_by_policy ? [
    ["log-probability", number(token.logprob)], ["to the trainer", number(token.trainer_logprob)],
      ["gap", number(gapOf(token))],
    ["advantage", number(token.advantage ?? advantage)], ["version", token.version ?? "–"],
  ] : [["", "given to the policy"]];
  showTip(event, el("b.mono", null, JSON.stringify(token.text)),
    el("dl", null, facts.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)])));
}
