// The choice of a step: a slider, the steps beside it, a field for its number, and the newest.

import { el } from "./dom.js";

export class Stepper {
  /** @param {(step: number | null) => void} chosen null for the newest */
  constructor(chosen) {
    this.chosen = chosen;
    /** @type {[number, number] | null} */
    this.range = null;
    this.step = /** @type {number | null} */ (null);
    this.slider = /** @type {HTMLInputElement} */ (el("input.step-slider", {
      type: "range", min: 0, max: 1, step: 1, "aria-label": "Step", oninput: () => chosen(Number(this.slider.value)),
    }));
    this.field = /** @type {HTMLInputElement} */ (el("input.step-field", {
      type: "number", min: 0, "aria-label": "Step number", onchange: () => chosen(Number(this.field.value)),
    }));
    this.newest = el("button", { type: "button", onclick: () => chosen(null) }, "Newest");
    this.elements = [el("span.stepper", null,
      el("button", { type: "button", "aria-label": "Step before", onclick: () => this.walk(-1) }, "←"), this.slider,
      el("button", { type: "button", "aria-label": "Step after", onclick: () => this.walk(1) }, "→")),
      el("label.labelled", null, "step ", this.field), this.newest];
  }

  /** @param {number | null} step @param {[number, number] | null} range of the steps there are
   * @param {boolean} isNewest the newest is followed */
  draw(step, range, isNewest) {
    this.step = step;
    this.range = range;
    const [first, last] = range ?? [0, 0];
    Object.assign(this.slider, { min: first, max: Math.max(last, first), disabled: !range });
    this.slider.value = String(step ?? last);
    if (document.activeElement !== this.field) this.field.value = String(step ?? "");
    this.newest.setAttribute("aria-pressed", String(isNewest));
  }

  /** @param {number} by */
  walk(by) {
    if (!this.range) return;
    const to = (this.step ?? this.range[1]) + by;
    this.chosen(Math.max(this.range[0], Math.min(this.range[1], to)));
  }
}
