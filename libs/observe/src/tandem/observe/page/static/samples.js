// The sample browser: a step's training or validation samples, one sample in full, or two of a problem side by side; of
// runs that generate none, the rows that a step trained on.

import { ofRun } from "./api.js";
import { el, empty, fill, mark, segmented, select, setText } from "./dom.js";
import { Detail } from "./sample.js";
import { number, whole } from "./format.js";
import { labelled, picturesIn } from "./pictures.js";
import { refresher } from "./refresh.js";
import { Rows } from "./rows.js";
import { Stepper } from "./stepper.js";
import * as state from "./state.js";

/** @typedef {import("./app.js").Context} Context */

const PAGE = 50;
const TYPING_MS = 250;
const PICTURES = 3; // shown of each sample in the list
/** @type {[string, string][]} */
const SORTS = [
  ["group", "by group"], ["reward-1", "best first"], ["reward-0", "worst first"], ["length-1", "longest first"],
  ["length-0", "shortest first"], ["advantage-1", "highest advantage"], ["advantage-0", "lowest advantage"],
];
const FILTERS = ["contains", "group", "min", "max"];

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  return ctx.run().stage === "rollouts" ? new Samples(root, ctx) : new Rows(root, ctx);
}

class Samples {
  /** @param {HTMLElement} root @param {Context} ctx */
  constructor(root, ctx) {
    this.ctx = ctx;
    this.root = root;
    if (state.value("at") && state.numeric("step") === null) state.set({ step: state.value("at").split(".")[0] });
    /** @type {any[]} */
    this.rows = [];
    this.total = 0;
    this.step = /** @type {number | null} */ (null);
    /** @type {[number, number] | null} */
    this.range = null;
    this.list = el("ol.samples",
      { "aria-label": "Samples", onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) });
    this.count = el("span.dim");
    this.more = el("button", { type: "button", hidden: true, onclick: () => this.loadMore() }, "More");
    this.detailRoot = el("section.panel.detail", { "aria-label": "Sample" });
    this.detail = new Detail(this.detailRoot, ctx, { opened: (place) => this.openPlace(place),
      left: () => this.leave() });
    this.browser = el("div.browser", null,
      el("section.panel.list", { "aria-label": "Samples of a step" }, this.list,
        el("div.list-foot", null, this.count, this.more)),
      this.detailRoot);
    fill(root, this.steps(), this.filters(), this.browser);
    fill(this.list, empty("Loading the samples…"));
    this.refresh = refresher(() => this.load(), (error) => this.failed(error));
    this.refresh();
    this.show();
  }

  get purpose() {
    return state.value("purpose", "train");
  }

  /** The choice of step and purpose. */
  steps() {
    this.stepper = new Stepper((step) => this.goTo(step));
    this.purposes = segmented("Samples of", [["train", "training"], ["validate", "validation"]], this.purpose,
      (value) => {
      state.set({ purpose: value === "train" ? null : value, step: null, group: null, at: null, diff: null });
      this.show();
      this.refresh();
    });
    return el("div.toolbar", null, this.purposes, this.stepper.elements);
  }

  filters() {
    const field = (/** @type {string} */ key, /** @type {string} */ tag, /** @type {any} */ attributes) => el(tag, {
      ...attributes, value: state.value(key), data: { filter: key },
      oninput: (/** @type {any} */ event) => this.filter({ [key]: event.target.value }),
    });
    const sort = select("Sort", SORTS, state.value("sort", "group"),
      (value) => this.filter({ sort: value === "group" ? null : value }));
    this.clear = el("button", { type: "button", hidden: true, onclick: () => this.clearFilters() }, "Clear");
    this.bar = el("div.toolbar.filters", null, field("contains", "input.contains",
      { type: "search", placeholder: "Contains…", "aria-label": "Contains" }), sort,
      el("label.labelled", null, "reward ", field("min", "input.narrow",
        { type: "number", step: "any", placeholder: "from", "aria-label": "Least reward" }),
        "–", field("max", "input.narrow", { type: "number", step: "any", placeholder: "to",
          "aria-label": "Most reward" })),
      el("label.labelled", null, "group ", field("group", "input.narrow",
        { type: "number", min: 0, placeholder: "all", "aria-label": "Group" })), this.clear);
    return this.bar;
  }

  clearFilters() {
    /** @type {NodeListOf<HTMLInputElement>} */
    const inputs = this.bar.querySelectorAll("[data-filter]");
    for (const input of inputs) input.value = "";
    this.filter(Object.fromEntries(FILTERS.map((key) => [key, null])));
  }

  /** @param {Record<string, string | null>} changes */
  filter(changes) {
    state.set(changes);
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.refresh(), TYPING_MS);
  }

  /** @param {import("./app.js").Change} change */
  update(change) {
    // Keep the shown step, unless the newest step is followed.
    if (change.steps) this.refresh();
  }

  /** @param {number} offset */
  async ask(offset) {
    const [sort, descending] = state.value("sort", "group").split("-");
    return ofRun(this.ctx.run().index, "samples", {
      step: state.numeric("step"), purpose: this.purpose, sort, descending, contains: state.value("contains"),
      group: state.numeric("group"), min_reward: state.numeric("min"), max_reward: state.numeric("max"), offset,
      limit: PAGE,
    });
  }

  async load() {
    const found = await this.ask(0);
    this.rows = found.rows;
    this.total = found.total;
    this.range = found.steps?.[this.purpose] ?? null;
    this.step = found.step ?? state.numeric("step");
    this.draw();
  }

  async loadMore() {
    const found = await this.ask(this.rows.length);
    this.rows.push(...found.rows);
    this.draw();
  }

  draw() {
    this.stepper?.draw(this.step, this.range, state.numeric("step") === null);
    const isFiltered = FILTERS.some((key) => state.value(key));
    if (this.clear) this.clear.hidden = !isFiltered;
    setText(this.count, this.total ? `${whole(this.rows.length)} of ${whole(this.total)}` : "");
    this.more.hidden = this.rows.length >= this.total;
    const prefix = sharedPrefix(this.rows.map((row) => oneLine(row.question || row.prompt)));
    if (this.rows.length) fill(this.list, this.rows.map((row) => this.item(row, prefix)));
    else fill(this.list, this.nothing(isFiltered));
    this.markOpen();
  }

  /** @param {boolean} isFiltered */
  nothing(isFiltered) {
    if (isFiltered && this.range) return empty("Nothing matches.");
    if (this.range) return empty(`No sample of step ${this.step} is recorded.`,
      `The record has steps ${this.range[0]} to ${this.range[1]}.`);
    return empty(this.purpose === "validate" ? "No validation sample is recorded." : "No sample is recorded.",
      "logger.samples says how much is kept.");
  }

  /** @param {any} row @param {number} prefix characters that all questions begin with */
  item(row, prefix) {
    const place = placeOf(row);
    const question = oneLine(row.question || row.prompt);
    const pictures = picturesIn(this.ctx.run().index, row.prompt, PICTURES);
    return el("li", null, el(`button.sample${pictures.length ? ".seen" : ""}`, {
      type: "button", data: { place }, onclick: () => this.openPlace({ at: place }),
    },
      rewardBadge(row.reward, row.correct),
      el("span.sample-text", null, el("span.response", null, oneLine(row.response) || "(nothing)"),
        el("span.question", { title: question }, prefix ? `… ${question.slice(prefix)}` : question),
      ),
      pictures.length ? el("span.pictures", null, pictures) : null,
      el("span.sample-facts", null, el("span", null, `${row.group}.${row.sample}`),
        el("span", null, `${row.response_length} tok`, ending(row)))));
  }

  failed(/** @type {Error} */ error) {
    fill(this.list, empty(error.message));
    setText(this.count, "");
  }

  /** @param {number | null} step */
  goTo(step) {
    state.set({ step });
    this.refresh();
  }

  /** Open another sample, or the same one in another way.
   * @param {{at: string, purpose?: string, diff?: string | null}} place */
  openPlace({ at, purpose, diff = null }) {
    const [step] = at.split(".").map(Number);
    const isAnother = purpose !== undefined && purpose !== this.purpose;
    const others = isAnother ? { purpose: purpose === "train" ? null : purpose, group: null } : {};
    state.set({ at, diff, step, ...others }, { isNewPlace: !state.value("at") });
    if (isAnother && this.purposes) mark(this.purposes, this.purpose);
    if (step !== this.step || isAnother) this.refresh();
    this.show();
  }

  leave() {
    state.set({ at: null, diff: null });
    this.show();
  }

  show() {
    const at = state.value("at");
    this.root.classList.toggle("opened", Boolean(at));
    this.detail.show(at, this.purpose, state.value("diff"));
    this.markOpen();
  }

  markOpen() {
    const at = state.value("at");
    for (const button of /** @type {NodeListOf<HTMLElement>} */ (this.list.querySelectorAll(".sample"))) {
      if (button.dataset.place === at) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!move) return;
    const buttons = [.../** @type {NodeListOf<HTMLElement>} */ (this.list.querySelectorAll(".sample"))];
    const next = buttons[buttons.indexOf(/** @type {HTMLElement} */ (document.activeElement)) + move];
    if (!next) return;
    event.preventDefault();
    next.focus();
    if (this.root.classList.contains("opened")) next.click();
  }

  close() {
    clearTimeout(this.typing);
    this.detail.close();
  }
}

/** @param {any} row */
export const placeOf = (row) => `${row.step}.${row.group}.${row.sample}`;
/** @param {string | null} text */
const oneLine = (text) => labelled(text).slice(0, 300).replaceAll(/\s+/g, " ").trim();

/** @param {number | null} reward @param {boolean | null} [correct] */
export function rewardBadge(reward, correct) {
  return el("span.reward", { data: { correct: String(Boolean(correct)), reward: String(reward) } }, number(reward));
}

/** Length of the common beginning of all texts, in whole words, if it is long. @param {string[]} texts */
function sharedPrefix(texts) {
  const [first, ...others] = new Set(texts);
  let length = others.length ? first.length : 0;
  for (const text of others) while (!text.startsWith(first.slice(0, length))) length -= 1;
  const words = first?.lastIndexOf(" ", length - 1) + 1;
  return words >= 20 ? words : 0;
}

/** The reason why a sample ended, if the policy did not stop. @param {any} row */
export function ending(row) {
  if (row.failure) return el("span.tag.bad", { title: row.failure }, "failed");
  if (row.finish_reason === "length") return el("span.tag",
    { title: "It reached the most tokens that a response may have" }, "cut off");
  return null;
}

