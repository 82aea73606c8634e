// One complete sample: the prompt as the model saw it, the response by tokens, the reward and its parts, and samples
// of the same problem in other steps.

import { ApiError, ofRun } from "./api.js";
import { diffWords } from "./diff.js";
import { el, empty, fill, hideTip, segmented, select } from "./dom.js";
import { number } from "./format.js";
import { labelled, picturesNamed, withPictures } from "./pictures.js";
import { ending, placeOf, rewardBadge } from "./samples.js";
import * as state from "./state.js";
import { coloured, COLOURINGS, legend, marked } from "./tokens.js";

/** @typedef {import("./app.js").Context} Context */

export class Detail {
  /** @param {HTMLElement} root @param {Context} ctx
   * @param {{opened: (place: {at: string, purpose?: string, diff?: string | null}) => void, left: () => void}} on */
  constructor(root, ctx, on) {
    this.root = root;
    this.ctx = ctx;
    this.on = on;
    this.shown = "";
    this.asked = 0;
  }

  /** @param {string} at "step.group.sample" @param {string} purpose @param {string} diff likewise, of the other */
  async show(at, purpose, diff) {
    const key = [this.ctx.run().index, at, purpose, diff].join("|");
    if (key === this.shown) return;
    this.shown = key;
    this.asked += 1;
    const asked = this.asked;
    if (!at) {
      fill(this.root, empty("Choose a sample to read it whole.", "Arrow keys walk through the list."));
      return;
    }
    const run = this.ctx.run().index;
    if (!this.root.querySelector(".sample-head")) fill(this.root, this.back(), empty("Loading the sample…"));
    try {
      const sample = await ofRun(run, `samples/${at.replaceAll(".", "/")}`, { purpose });
      if (asked !== this.asked) return;
      const [siblings, others, body] = [el("div.siblings"), el("div.block-head.compare"), el("div")];
      this.draw(sample, siblings, others, body);
      if (!diff) fill(body, this.response(sample));
      // Other samples take longer to find.
      const history = ofRun(run, `problems/${encodeURIComponent(sample.problem_id)}/samples`);
      const { rows } = await ofRun(run, "samples", { step: sample.step, purpose, group: sample.group, limit: 64 });
      this.drawGroup(siblings, sample, rows);
      const other = this.drawOthers(others, sample, purpose, await history, diff);
      if (diff) fill(body, other ? differences(other, sample) : this.response(sample));
    } catch (error) {
      this.shown = "";
      if (!(error instanceof ApiError)) throw error;
      if (asked === this.asked) fill(this.root, this.back(), empty(error.message));
    }
  }

  back() {
    return el("button.back", { type: "button", onclick: this.on.left }, "← all samples");
  }

  /** @param {any} sample @param {HTMLElement} siblings @param {HTMLElement} others @param {HTMLElement} body */
  draw(sample, siblings, others, body) {
    fill(others, el("h3", null, "Response"));
    fill(this.root, this.back(), this.head(sample), siblings,
      el("div.pair", null, block("Prompt", "as the model saw it", el("div.text.prompt", null,
        withPictures(this.ctx.run().index, sample.prompt, marked))),
        block("Reference", "", el("div.text.reference", null, sample.reference_answer || "(none)"))),
      others, body);
  }

  /** @param {any} sample */
  head(sample) {
    const facts = [
      ["step", sample.step], ["group", sample.group], ["sample", sample.sample], ["problem", sample.problem_id],
      ["tokens", `${sample.prompt_length} + ${sample.response_length}`], ["ended by", sample.finish_reason],
      ["advantage", number(sample.advantage)],
      ["versions", sample.oldest_version === sample.newest_version ? sample.newest_version
        : `${sample.oldest_version}–${sample.newest_version}`],
      ...(sample.num_turns > 1 ? [["turns", sample.num_turns]] : []), ["by", sample.rollout],
    ];
    const components = Object.entries(sample.components ?? {});
    return el("div.sample-head", null,
      el("div.big-reward", null, el("span.dim", null, "reward"), rewardBadge(sample.reward, sample.correct),
        components.map(([name, value]) => el("span.component", { data: { component: name } },
          el("span.dim", null, name), el("b", null, number(/** @type {number} */ (value))))),
        ending(sample)),
      el("dl.facts", null, facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))),
      sample.failure ? el("p.failure", null, sample.failure) : null);
  }

  /** The other samples of its prompt. @param {HTMLElement} root @param {any} sample @param {any[]} siblings */
  drawGroup(root, sample, siblings) {
    fill(root, el("span.dim", null, siblings.length > 1 ? "same prompt" : "the only sample of its prompt"),
      siblings.length > 1 ? siblings.map((row) => el("button.sibling", {
        type: "button", "aria-current": row.sample === sample.sample ? "true" : null, title: `sample ${row.sample}`,
        data: { correct: String(Boolean(row.correct)) }, onclick: () => this.on.opened({ at: placeOf(row) }),
      }, number(row.reward))) : null);
  }

  /** List the problem's other samples; return the one chosen for comparison.
   * @param {HTMLElement} root @param {any} sample @param {string} purpose @param {any[]} history
   * @param {string} diff */
  drawOthers(root, sample, purpose, history, diff) {
    const rows = history.map((row) => ({ row, key: `${row.purpose}:${placeOf(row)}` }));
    const others = rows.filter(({ key }) => key !== `${purpose}:${placeOf(sample)}`);
    const other = others.find(({ key }) => key === diff)?.row;
    const options = others.map(({ row, key }) => /** @type {[string, string]} */ ([key, calledInList(row)]));
    const chosen = (/** @type {string} */ value) => this.on.opened({ at: placeOf(sample), diff: value || null });
    fill(root, el("h3", null, other ? "Difference" : "Response"), others.length
      ? select("Compare with another sample of this problem",
        [["", "compare with another of this problem…"], ...options], other ? diff : "", chosen)
      : el("span.dim", null, "the only sample of this problem on record"));
    return other;
  }

  /** @param {any} sample */
  response(sample) {
    const body = el("div");
    const draw = () => {
      const by = state.value("colour", "plain");
      fill(body, legend(sample.tokens, by, sample.advantage),
        sample.tokens.length ? coloured(sample.tokens, by, sample.advantage)
        : el("div.text", null, labelled(sample.response)));
    };
    draw();
    const later = picturesNamed(this.ctx.run().index, sample.later_images ?? []);
    return el("div.block.response-block", null, segmented("Colour tokens by", COLOURINGS,
      state.value("colour", "plain"), (value) => {
      state.set({ colour: value === "plain" ? null : value });
      draw();
    }), body, later.length ? el("p.pictures", null, el("span.dim", null, "pictures given later"), later) : null);
  }

  close() {
    this.asked += 1;
    hideTip();
  }
}

/** @param {string} title @param {string} note @param {HTMLElement} body */
function block(title, note, body) {
  return el("div.block", null, el("div.block-head", null, el("h3", null, title), el("span.dim", null, note)), body);
}

/** Show both, the earlier first, each with its own parts marked. @param {any} one @param {any} two */
function differences(one, two) {
  const [before, after] = one.step <= two.step ? [one, two] : [two, one];
  const parts = diffWords(labelled(before.response), labelled(after.response));
  const side = (/** @type {any} */ row, /** @type {string} */ own, /** @type {string} */ tag) => el("div.block", null,
    el("div.block-head", null, el("h3", null, `step ${row.step}`),
      el("span.dim", null, `sample ${row.group}.${row.sample}`), rewardBadge(row.reward, row.correct)),
    el("div.text", null, parts.filter((part) => part.kind === "same" || part.kind === own)
      .map((part) => (part.kind === "same" ? part.text : el(tag, null, part.text)))));
  return el("div.sides", null, side(before, "gone", "del"), side(after, "new", "ins"));
}

/** @param {any} row */
function calledInList(row) {
  const step = `step ${row.step}${row.purpose === "train" ? "" : ", validation"}`;
  return `${step} · sample ${row.group}.${row.sample} · reward ${number(row.reward)}`;
}
