// Curves: any metric over steps, of one run or several.

import { ofRun } from "./api.js";
import { Chart } from "./chart.js";
import { colour, activityColour } from "./colours.js";
import { saveCsv } from "./csv.js";
import { el, empty, fill, setText } from "./dom.js";
import { duration, number, title, unit, writer } from "./format.js";
import { refresher } from "./refresh.js";
import * as state from "./state.js";

/** @typedef {import("./app.js").Context} Context */
/** @typedef {import("./chart.js").Line} Line */

/** Default charts, drawn if the run has their metrics; metrics that share a chart are together. */
const DEFAULTS = [
  ["reward"], ["val_accuracy"], ["loss", "val_loss"], ["kl", "approx_kl"], ["entropy"],
  ["mean_generation_length", "max_generation_length"], ["truncated_fraction"], ["grad_norm"],
  ["token_mult_prob_error"], ["clip_fraction"], ["rewards_chosen_mean", "rewards_rejected_mean"],
  ["token_accuracy"], ["avg_trajectory_age", "max_trajectory_age"], ["learning_rate"], ["tokens_per_s"], ["seconds"],
];
const PHASES = "seconds"; // the chart of stacked seconds by phase
const NOTES = {
  token_mult_prob_error: "how many times likelier or less likely a token is to the trainer than to the engine",
  truncated_fraction: "responses that were cut off",
  clip_fraction: "share of tokens whose probability ratio is out of the clip range",
};
const TITLES = { [PHASES]: "Seconds by phase", kl: "KL", mean_generation_length: "Response length" };
/** Horizontal axes of curves, with the labels of places on them. */
const ALONG = {
  steps: (/** @type {number} */ x) => `step ${x}`,
  tokens: (/** @type {number} */ x) => `${number(Math.round(x))} tokens`,
  time: (/** @type {number} */ x) => duration(x),
};
const MOST_POINTS = 700;
const IN_VIEW = 6; // charts that a laptop shows without scrolling
const REREAD_NAMES_EVERY = 25; // steps

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  return new Curves(root, ctx);
}

class Curves {
  /** @param {HTMLElement} root @param {Context} ctx */
  constructor(root, ctx) {
    this.ctx = ctx;
    /** @type {Map<number, {names: string[], readAt: number}>} */
    this.names = new Map();
    /** @type {Map<number, Record<string, any>>} */
    this.series = new Map();
    /** @type {Map<string, Card>} */
    this.cards = new Map();
    this.grid = el("div.cards");
    this.options = el("datalist", { id: "metrics" });
    this.reset = el("button", { type: "button", hidden: true, onclick: () => this.zoom(null) }, "Reset zoom");
    this.standard = el("button", { type: "button", hidden: true, onclick: () => this.choose(null) }, "Default curves");
    fill(root, this.toolbar(), this.grid);
    fill(this.grid, empty("Loading the curves…"));
    this.refresh = refresher(() => this.load(), (error) => fill(this.grid, empty(error.message)), 900);
    this.refresh();
  }

  toolbar() {
    const smoothing = state.numeric("smooth", 0);
    const shown = el("output", null, smoothing.toFixed(2));
    const slider = el("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: String(smoothing), "aria-label": "Smoothing",
      oninput: (/** @type {any} */ event) => {
        const value = Number(event.target.value);
        setText(shown, value.toFixed(2));
        state.set({ smooth: value || null });
        this.draw();
      },
    });
    const add = el("input", {
      type: "search", list: "metrics", autocomplete: "off", placeholder: "Add a metric…", "aria-label": "Add a metric",
      oninput: (/** @type {any} */ event) => this.add(event.target),
      onchange: (/** @type {any} */ event) => this.add(event.target),
    });
    const along = el("select", { "aria-label": "Draw over", onchange: (/** @type {any} */ event) => {
      state.set({ along: event.target.value === "steps" ? null : event.target.value, zoom: null });
      this.series.clear();
      this.refresh();
    } }, Object.keys(ALONG).map((name) => el("option", { value: name, selected: name === this.along() }, name)));
    return el("div.toolbar", null, el("label.slider", null, el("span", null, "Smoothing"), slider, shown),
      el("label", null, el("span", null, "Over "), along), add,
      this.options, this.standard, this.reset,
      el("span.hint", null, "drag to zoom, double click for all"));
  }

  /** The horizontal axis of the curves. @returns {keyof typeof ALONG} */
  along() {
    const name = state.value("along", "steps");
    return name in ALONG ? /** @type {keyof typeof ALONG} */ (name) : "steps";
  }

  /** @param {import("./app.js").Change} change */
  update(change) {
    if (change.steps) this.refresh();
  }

  /** Names of the metrics of all shown runs. @returns {Set<string>} */
  allNames() {
    return new Set(this.ctx.shown().flatMap((run) => this.names.get(run.index)?.names ?? []));
  }

  /** The charts that are wanted and can be drawn, each with its metrics. @returns {[string, string[]][]} */
  wanted() {
    const all = this.allNames();
    const phases = [...all].filter((name) => name.startsWith("seconds/") && name !== "seconds/total");
    const chosen = state.value("curves");
    const groups = chosen ? chosen.split(",").map((id) => DEFAULTS.find(([first]) => first === id) ?? [id]) : DEFAULTS;
    /** @type {[string, string[]][]} */
    const wanted = [];
    for (const [first, ...others] of groups) {
      const metrics = first === PHASES ? phases : [first, ...others].filter((name) => all.has(name));
      if (metrics.length) wanted.push([first, metrics]);
    }
    return !chosen && !all.has("reward") && all.has("accuracy") ? [["accuracy", ["accuracy"]], ...wanted] : wanted;
  }

  async load() {
    const runs = this.ctx.shown();
    await Promise.all(runs.map((run) => this.loadNames(run)));
    const charts = this.wanted();
    // Draw visible charts first.
    const parts = this.series.size ? [charts] : [charts.slice(0, IN_VIEW), charts.slice(IN_VIEW)];
    /** @type {Map<number, Record<string, any>>} */
    const loaded = new Map();
    for (const part of parts) {
      await Promise.all(runs.map((run) => this.loadSeries(run, part, loaded)));
      for (const [run, series] of loaded) this.series.set(run, series);
      this.draw();
    }
    const options = [...this.allNames()].sort();
    if (this.options.childElementCount !== options.length) {
      fill(this.options, options.map((name) => el("option", { value: name }, title(name))));
    }
  }

  /** Add the curves of these charts to the loaded curves of a run.
   * @param {import("./app.js").Run} run @param {[string, string[]][]} charts
   * @param {Map<number, Record<string, any>>} loaded */
  async loadSeries(run, charts, loaded) {
    const own = new Set(this.names.get(run.index)?.names);
    const names = [...new Set(charts.flatMap(([, metrics]) => metrics))].filter((name) => own.has(name));
    if (!names.length) return;
    const zoom = this.zoomed();
    const query = { names: names.join(","), points: MOST_POINTS, along: this.along(), from: zoom?.[0], to: zoom?.[1] };
    loaded.set(run.index, { ...loaded.get(run.index), ...await ofRun(run.index, "series", query) });
  }

  /** Read the names of metrics again: a live run gets new ones, for example at its first validation.
   * @param {import("./app.js").Run} run */
  async loadNames(run) {
    const known = this.names.get(run.index);
    const last = run.last_step ?? 0;
    const isLate = last > REREAD_NAMES_EVERY;
    if (known && (last === known.readAt || (isLate && last - known.readAt < REREAD_NAMES_EVERY))) return;
    const { names } = await ofRun(run.index, "metrics");
    this.names.set(run.index, { names: names.map((/** @type {any} */ metric) => metric.name), readAt: last });
  }

  draw() {
    const wanted = this.wanted();
    for (const [id, card] of this.cards) {
      if (wanted.some(([other]) => other === id)) continue;
      card.close();
      this.cards.delete(id);
    }
    for (const [id] of wanted) if (!this.cards.has(id)) this.cards.set(id, new Card(id, this));
    const elements = wanted.map(([id]) => /** @type {Card} */ (this.cards.get(id)).element);
    if (elements.length === 0) fill(this.grid, empty("No step is done yet.", "Curves appear with the first one."));
    else if (!isSame([...this.grid.children], elements)) fill(this.grid, elements);
    for (const [id, metrics] of wanted) this.cards.get(id)?.draw(metrics);
    this.reset.hidden = !this.zoomed();
    this.standard.hidden = !state.value("curves");
  }

  /** Places of the steps of all loaded lines. @returns {{step: number, x: number}[]} */
  places() {
    return this.ctx.shown().flatMap((run) => Object.values(this.series.get(run.index) ?? {})).flatMap((series) =>
      series.step.map((/** @type {number} */ step, /** @type {number} */ i) => ({ step, x: series.x?.[i] ?? step })));
  }

  /** The range of all charts along the horizontal axis. @returns {[number, number]} */
  range() {
    const zoom = this.zoomed();
    if (this.along() !== "steps") {
      const places = this.places();
      const low = zoom ? places.reduce((least, { x }) => Math.min(least, x), Infinity) : 0;
      const high = places.reduce((most, { x }) => Math.max(most, x), 0);
      return low < high ? [low, high] : [0, high || 1];
    }
    if (zoom) return zoom;
    const lasts = this.ctx.shown().map((run) => run.last_step ?? 0);
    return [0, Math.max(1, ...lasts)];
  }

  /** @returns {[number, number] | null} */
  zoomed() {
    const [low, high] = state.value("zoom").split("-").map(Number);
    return high > low ? [low, high] : null;
  }

  /** @param {[number, number] | null} range along the horizontal axis */
  zoom(range) {
    if (range && this.along() !== "steps") {
      const inside = this.places().filter(({ x }) => x >= range[0] && x <= range[1]).map(({ step }) => step);
      range = inside.length ? [Math.min(...inside), Math.max(...inside)] : null;
    }
    state.set({ zoom: range && range[1] > range[0] ? `${Math.max(0, range[0])}-${range[1]}` : null });
    this.draw();
    this.refresh();
  }

  /** @param {HTMLInputElement} input */
  add(input) {
    const name = input.value.trim();
    if (!this.allNames().has(name)) return;
    input.value = "";
    const ids = this.wanted().map(([id]) => id);
    this.choose([...ids.filter((id) => id !== name), name]);
    this.cards.get(name)?.element.scrollIntoView({ block: "nearest" });
  }

  /** @param {string[] | null} ids */
  choose(ids) {
    state.set({ curves: ids?.join(",") });
    this.draw();
    this.refresh();
  }

  /** @param {string} id */
  remove(id) {
    this.choose(this.wanted().map(([other]) => other).filter((other) => other !== id));
  }

  close() {
    for (const card of this.cards.values()) card.close();
  }
}

/** One chart, with a heading that shows the values at the cursor, or the last ones. */
class Card {
  /** @param {string} id @param {Curves} curves */
  constructor(id, curves) {
    this.id = id;
    this.curves = curves;
    const name = TITLES[/** @type {keyof typeof TITLES} */ (id)] ?? title(id);
    this.readout = el("div.readout");
    this.plot = el("div.plot",
      { tabindex: 0, role: "img", "aria-label": `${name} over steps; arrow keys move the cursor` });
    this.log = el("button.small", {
      type: "button", title: "Logarithmic scale", "aria-pressed": String(this.isIn("log")),
      onclick: () => this.toggle("log"),
    }, "log");
    const csv = el("button.small", {
      type: "button", title: "Save all values of these lines as a CSV file", "aria-label": `Save ${name} as CSV`,
      onclick: () => this.save(),
    }, "csv");
    this.cut = el("button.small.cut", { type: "button", hidden: true, onclick: () => this.toggle("whole") });
    const remove = el("button.small", {
      type: "button", title: "Take this chart away", "aria-label": `Take away ${name}`,
      onclick: () => curves.remove(id),
    }, "×");
    this.element = el("article.card", { data: { metric: id } },
      el("div.card-head", null, el("h2", { title: NOTES[/** @type {keyof typeof NOTES} */ (id)] ?? id }, name,
        unit(id, curves.ctx.run().algorithm) ? el("span.unit", null, unit(id, curves.ctx.run().algorithm)) : null),
        el("span.tools", null, this.cut, id === PHASES ? null : this.log, csv, remove)),
      this.readout, this.plot);
    this.chart = new Chart(this.plot, {
      zoomed: (range) => curves.zoom(range), pointed: (index) => this.read(index), format: writer(id),
    });
    /** @type {Line[]} */
    this.lines = [];
    this.index = /** @type {number | null} */ (null);
  }

  /** Whether the chart is one of a list in the address. @param {"log" | "whole"} list */
  isIn(list) {
    return state.value(list).split(",").includes(this.id);
  }

  /** @param {"log" | "whole"} list */
  toggle(list) {
    const others = state.value(list).split(",").filter((id) => id && id !== this.id);
    state.set({ [list]: (this.isIn(list) ? others : [...others, this.id]).join(",") });
    this.log.setAttribute("aria-pressed", String(this.isIn("log")));
    this.curves.draw();
  }

  /** @param {string[]} metrics */
  draw(metrics) {
    const isStacked = this.id === PHASES;
    // Stacked parts are those of one run, that of the other panels.
    const runs = isStacked ? [this.curves.ctx.run()] : this.curves.ctx.shown();
    const told = metrics.filter((name) => !this.isIdle(runs, name, metrics));
    this.lines = runs.flatMap((run) => told.flatMap((name, i) => {
      const series = this.curves.series.get(run.index)?.[name];
      return series?.step.length ? [this.line(run, name, i, series, runs.length > 1)] : [];
    }));
    if (isStacked) this.lines.sort((a, b) => sum(a.mean) - sum(b.mean));
    const look = { smoothing: state.numeric("smooth", 0), isLog: this.isIn("log"), isStacked,
      isWhole: this.isIn("whole"), range: this.curves.range(), along: this.curves.along(),
      mark: this.curves.along() === "steps" ? null : (/** @type {number} */ x) => this.mark(x) };
    this.element.classList.toggle("none", this.lines.length === 0);
    this.chart.draw(this.lines, look);
    this.drawCut();
    this.shape();
    this.read(this.index);
  }

  /** Say how many values are beyond the axis, and offer to show them. */
  drawCut() {
    const { outliers } = this.chart;
    const isWhole = this.isIn("whole");
    this.cut.hidden = !outliers.length && !isWhole;
    this.cut.setAttribute("aria-pressed", String(isWhole));
    setText(this.cut, isWhole ? "whole" : `${outliers.length} cut off`);
    const values = outliers.map(({ value }) => value);
    const write = writer(this.id);
    const [least, most] = [write(Math.min(...values)), write(Math.max(...values))];
    this.cut.title = isWhole ? "All values are within the axis: leave outliers out" : `Beyond the axis, marked by
      triangles: ${least === most ? least : `${least} to ${most}`}. Show them`.replaceAll(/\s+/g, " ");
  }

  /** Leave out metrics that are zero throughout, such as a disabled penalty, if others are not.
   * @param {import("./app.js").Run[]} runs @param {string} name @param {string[]} metrics */
  isIdle(runs, name, metrics) {
    const isZero = (/** @type {string} */ of) => runs.every((run) =>
      (this.curves.series.get(run.index)?.[of]?.mean ?? []).every((/** @type {number} */ v) => v === 0));
    return metrics.length > 1 && this.id !== PHASES && isZero(name) && !metrics.every(isZero);
  }

  /** @param {import("./app.js").Run} run @param {string} name @param {number} place @param {any} series
   * @param {boolean} isOneOfSeveral @returns {Line} */
  line(run, name, place, series, isOneOfSeveral) {
    const phase = name.replace(/^seconds\//, "");
    const own = this.id === PHASES ? activityColour(phase) ?? 7 : isOneOfSeveral ? this.curves.ctx.colour(run.index)
      : place;
    const several = this.curves.ctx.shown().length > 1 && this.id !== PHASES;
    const what = this.id === PHASES ? phase.replaceAll("_", " ") : title(name);
    return { run: run.index, runName: run.name, name, label: several ? `${run.name}: ${what}` : what, colour: own,
      dashed: place > 0 && this.id !== PHASES,
      ...series, step: series.x ?? series.step };
  }

  /** The parts of the heading, rebuilt only when the lines change. */
  shape() {
    const labels = this.lines.map((line) => `${line.label}|${line.colour}`).join("\n");
    if (labels === this.labels) return;
    this.labels = labels;
    this.values = this.lines.map((line) => el("b", { data: { line: line.label } }));
    this.step = el("span.step");
    // The heading already names a single line, and the metric of several runs.
    const isNamed = this.id === PHASES || this.lines.length > 1;
    const isOneMetric = this.id !== PHASES && new Set(this.lines.map((line) => line.name)).size === 1;
    const order = this.id === PHASES ? [...this.lines.keys()].reverse() : [...this.lines.keys()];
    fill(this.readout, this.step, order.map((i) => el("span.value", { title: this.lines[i].label },
      el(this.lines[i].dashed ? "i.swatch.dashed" : "i.swatch", { style: { "--c": colour(this.lines[i].colour) } }),
      isNamed ? el("span.label", null, isOneMetric ? this.lines[i].runName : this.lines[i].label) : null,
      /** @type {HTMLElement[]} */ (this.values)[i])));
  }

  /** @param {number | null} index where the cursor is */
  read(index) {
    this.index = index;
    let step = -1;
    this.lines.forEach((_, i) => {
      const found = this.chart.at(i, index);
      const value = this.values?.[i];
      if (!value) return;
      setText(value, found ? (this.id === PHASES ? duration : writer(this.id))(found.value) : "–");
      value.title = found ? `${this.place(found.step)}: ${found.value}` : "";
      if (found) { value.dataset.value = String(found.value); value.dataset.step = String(found.step); }
      step = Math.max(step, found?.step ?? -1);
    });
    if (this.step) setText(this.step, step < 0 ? "" : this.place(step));
  }

  /** The label of a place on the axis. @param {number} x */
  mark(x) {
    return this.place(x).replace(" tokens", "");
  }

  /** @param {number} x */
  place(x) {
    return ALONG[this.curves.along()](x);
  }

  /** Save the shown values, unsmoothed, with a row per step and a column per line. */
  save() {
    const runs = this.id === PHASES ? [this.curves.ctx.run()] : this.curves.ctx.shown();
    const zoom = this.curves.zoomed();
    saveCsv(`${runs.map((run) => run.name).join("+")}-${this.id}`, this.lines,
      { along: this.curves.along(), from: zoom?.[0], to: zoom?.[1] });
  }

  close() {
    this.chart.close();
    this.element.remove();
  }
}

/** @param {unknown[]} one @param {unknown[]} other */
const isSame = (one, other) => one.length === other.length && one.every((element, i) => element === other[i]);

/** @param {(number | null)[]} values */
const sum = (values) => values.reduce((/** @type {number} */ total, value) => total + (value ?? 0), 0);
