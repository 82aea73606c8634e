// The rows that a step of SFT, DPO or a reward model trained on: every token, with those that are learned marked.

import { ofRun } from "./api.js";
import { el, empty, fill, hideTip, setText, showTip } from "./dom.js";
import { whole } from "./format.js";
import { refresher } from "./refresh.js";
import { Stepper } from "./stepper.js";
import * as state from "./state.js";

/** @typedef {import("./app.js").Context} Context */

/**
 * @typedef {object} Token
 * @property {number} id
 * @property {string} text
 * @property {boolean} is_special
 * @property {boolean} is_learned
 * @property {number} count equal tokens in a row that it stands for
 *
 * @typedef {{name: string, kind: string, size: string, tokens: Token[], facts: [string, string][]}} Row
 */

const FIRST = 8; // rows, and how many more at a click
const LONGEST = 3000; // tokens of a row that are drawn, of which the last `END`
const END = 500;

export class Rows {
  /** @param {HTMLElement} root @param {Context} ctx */
  constructor(root, ctx) {
    this.ctx = ctx;
    this.limit = FIRST;
    this.stepper = new Stepper((step) => {
      state.set({ step });
      this.refresh();
    });
    this.list = el("div.rows");
    this.notes = el("div.row-notes");
    this.count = el("span.dim");
    this.more = el("button", { type: "button", hidden: true, onclick: () => {
      this.limit += FIRST;
      this.refresh();
    } }, "More");
    fill(root, el("div.toolbar", null, this.stepper.elements, el("span.hint", null,
      el("span.token.learned", null, "learned"), " by the model; point at a token for its number")),
      this.notes, this.list, el("div.list-foot", null, this.count, this.more));
    fill(this.list, empty("Loading the rows…", "They are read from the run's data again, which takes a few seconds."));
    this.refresh = refresher(() => this.load(), (error) => this.failed(error));
    this.refresh();
  }

  /** @param {import("./app.js").Change} change */
  update(change) {
    if (change.steps && state.numeric("step") === null) this.refresh();
  }

  async load() {
    const asked = state.numeric("step");
    const found = await ofRun(this.ctx.run().index, "rows", { step: asked, limit: this.limit });
    this.stepper.draw(found.step, [1, found.last_step], asked === null);
    fill(this.notes, found.notes.map((/** @type {string} */ note) => el("p.failure", null, note)));
    fill(this.list, found.rows.map(drawRow));
    const shown = Math.min(this.limit, found.num_rows);
    setText(this.count, `${whole(shown)} of the ${whole(found.num_rows)} rows of step ${found.step}`);
    this.more.hidden = shown >= found.num_rows;
  }

  failed(/** @type {Error} */ error) {
    fill(this.list, empty(error.message));
    setText(this.count, "");
    this.more.hidden = true;
  }

  close() {
    hideTip();
  }
}

/** @param {Row} row */
function drawRow(row) {
  const isLong = row.tokens.length > LONGEST;
  const [head, end] = isLong ? [row.tokens.slice(0, LONGEST - END), row.tokens.slice(-END)] : [row.tokens, []];
  const left = row.tokens.length - head.length - end.length;
  return el("section.panel.row", { data: { kind: row.kind } },
    el("div.block-head", null, el("h3", null, row.name), row.kind ? el("span.tag", null, row.kind) : null,
      el("span.dim", null, row.size)),
    el("div.text.tokens", {
      onmouseover: (/** @type {MouseEvent} */ event) => explain(event, row.tokens), onmouseleave: hideTip,
    }, head.map((token, i) => span(token, i)), left ? el("p.dim", null, `… ${whole(left)} more tokens …`) : null,
      end.map((token, i) => span(token, row.tokens.length - end.length + i))),
    el("dl.row-facts", null, row.facts.map(([name, value]) => el("div", { data: { fact: name } },
      el("dt", null, name), el("dd", null, value)))));
}

/** @param {Token} token @param {number} place */
function span(token, place) {
  const tag = `span.token${token.is_special ? ".special" : ""}${token.is_learned ? ".learned" : ""}`;
  return el(tag, { data: { token: String(place) } }, token.count > 1 ? `${token.text} × ${whole(token.count)}`
    : token.text);
}

/** @param {MouseEvent} event @param {Token[]} tokens */
function explain(event, tokens) {
  const place = /** @type {HTMLElement} */ (event.target).dataset.token;
  if (place === undefined) { hideTip(); return; }
  const token = tokens[Number(place)];
  showTip(event, el("b.mono", null, JSON.stringify(token.text)), el("dl", null, el("dt", null, "token"),
    el("dd", null, token.id), el("dt", null, ""), el("dd", null, token.is_learned ? "learned" : "not learned")));
}
