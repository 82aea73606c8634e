// The scheduler's tables: groups by state, the buffer and its ages, engines and trainers with their versions.

import { ofRun } from "./api.js";
import { Chart } from "./chart.js";
import { colour } from "./colours.js";
import { el, empty, fill, panel, setText } from "./dom.js";
import { duration, title, whole, writer } from "./format.js";
import { refresher } from "./refresh.js";

/** @typedef {import("./app.js").Context} Context */

/** @type {[string, string, number][]} */
const STATES = [
  ["waiting", "waiting", 6], ["in_flight", "in flight", 0], ["ready", "ready", 4], ["taken", "taken", 1],
  ["dropped", "dropped", 3],
];
const OVER_STEPS = [
  "buffer_size", "avg_trajectory_age", "engine_idle_s", "trainer_idle_s", "groups_too_old", "groups_without_spread",
  "tokens_per_s",
];

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  return new SchedulerView(root, ctx);
}

class SchedulerView {
  /** @param {HTMLElement} root @param {Context} ctx */
  constructor(root, ctx) {
    this.ctx = ctx;
    this.now = el("div.view");
    this.trend = el("div.cards");
    /** @type {Map<string, {chart: Chart, value: HTMLElement}>} */
    this.charts = new Map();
    fill(root, this.now, panel("Over the steps", null, this.trend));
    this.refresh = refresher(() => this.loadTrend(), undefined, 1500);
    this.refresh();
    this.drawNow();
  }

  /** @param {import("./app.js").Change} change */
  update(change) {
    if (change.live) this.drawNow();
    if (change.steps) this.refresh();
  }

  drawNow() {
    const live = this.ctx.live();
    const run = this.ctx.run();
    if (!live) {
      fill(this.now, panel("Now", null, empty(
        run.state === "running" ? "Nothing is heard of the scheduler yet."
          : "This run does not go on, so nothing is in its tables.",
        "How they were filled over the steps is below.")));
      return;
    }
    fill(this.now, groupsPanel(live), el("div.columns", null, enginesPanel(live), trainersPanel(live)));
  }

  async loadTrend() {
    const run = this.ctx.run();
    const series = await ofRun(run.index, "series", { names: OVER_STEPS.join(","), points: 400 });
    const found = OVER_STEPS.filter((name) => series[name]?.step.length);
    if (!found.length) fill(this.trend, empty(run.last_step ? "This algorithm does not generate."
      : "No step is done yet."));
    for (const name of found) this.drawTrend(name, series[name], run.last_step ?? 1);
  }

  /** @param {string} name @param {any} series @param {number} last */
  drawTrend(name, series, last) {
    let found = this.charts.get(name);
    if (!found) {
      const plot = el("div.plot.low", { role: "img", "aria-label": title(name) });
      const value = el("b", { data: { metric: name } });
      if (!this.charts.size) fill(this.trend);
      this.trend.append(el("article.card.flat", null, el("div.card-head", null, el("h2", null, title(name)), value),
        plot));
      found = { chart: new Chart(plot, { height: 110, format: writer(name) }), value };
      this.charts.set(name, found);
    }
    found.chart.draw([{ label: title(name), colour: 0, ...series }],
      { smoothing: 0, isLog: false, isStacked: false, range: [0, Math.max(1, last)] });
    setText(found.value, writer(name)(series.mean[series.mean.length - 1]));
  }

  close() {
    for (const { chart } of this.charts.values()) chart.close();
  }
}

/** @param {any} live */
function groupsPanel(live) {
  const groups = STATES.map(([key, name, own]) => ({ key, name, own, count: live.groups?.[key] ?? 0 }));
  const total = groups.reduce((sum, group) => sum + group.count, 0) || 1;
  const ages = Object.entries(live.buffer?.by_age ?? {}).map(([age, count]) => ({ age, count: Number(count) }));
  const most = Math.max(1, ...ages.map(({ count }) => count));
  return panel("Groups", [live.phase ? el("span", null, "phase ", el("b", null, live.phase)) : null,
    el("span", null, "elapsed ", el("b", null, duration(live.elapsed_s)))],
    el("div.stack", { role: "img", "aria-label": groups.map((group) => `${group.count} ${group.name}`).join(", ") },
      groups.filter((group) => group.count).map((group) => el("i",
        { style: { "--c": colour(group.own), "flex-grow": group.count / total } }))),
    el("div.tiles", null,
      groups.map((group) => tile(group.name, whole(group.count), { group: group.key }, group.own)),
      tile("in the buffer", whole(live.buffer?.size ?? 0), { fact: "buffer" }),
      tile("version trained", version(live.versions?.trained), { fact: "trained" }),
      tile("published", version(live.versions?.published), { fact: "published" }),
      tile("verified", version(live.versions?.verified), { fact: "verified" }),
      tile("failures", whole(live.failures ?? 0), { fact: "failures" })),
    ages.length ? el("div.ages", null, el("span.dim", null, "ages in the buffer"), ages.map(({ age, count }) =>
      el("span.age", { title: `${count} groups with weights ${age} versions behind` }, el("span", null, age),
        el("i", { style: { width: `${(90 * count) / most}px` } }), el("b", null, whole(count))))) : null);
}

/** @param {string} name @param {string} value @param {Record<string, string>} data @param {number} [own] */
function tile(name, value, data, own) {
  return el("div.tile", null, el("span.label", null, own === undefined ? null
    : el("i.swatch", { style: { "--c": colour(own) } }), name), el("b", { data }, value));
}

/** @param {any} live */
function enginesPanel(live) {
  const engines = live.engines ?? [];
  const most = Math.max(1, ...engines.map((/** @type {any} */ engine) => engine.outstanding_tokens ?? 0));
  return panel("Engines", `${engines.length}`, engines.length === 0 ? empty("This algorithm does not generate.")
    : el("div.scroll", null, el("table", { data: { table: "engines" } },
    heads("engine", "status", ">version", ">in flight", ">outstanding tokens", "on"),
    el("tbody", null, engines.map((/** @type {any} */ engine) => el("tr", null, el("th", null, engine.name),
      el("td", null, engine.status),
      el("td.num", null, version(engine.version)), el("td.num", { title: "groups" }, whole(engine.in_flight ?? 0)),
      el("td.num.meter", { style: { "--share": (engine.outstanding_tokens ?? 0) / most } },
        whole(engine.outstanding_tokens ?? 0)),
      el("td.dim", null, [engine.host, engine.device].filter(Boolean).join(" · "))))))));
}

/** @param {any} live */
function trainersPanel(live) {
  const trainers = live.trainers ?? [];
  return panel("Trainers", `${trainers.length}`, el("div.scroll", null, el("table", { data: { table: "trainers" } },
    heads("trainer", "status", ">version", "doing", "on"),
    el("tbody", null, trainers.map((/** @type {any} */ trainer) => el("tr", null, el("th", null, trainer.name),
      el("td", null, trainer.status),
      el("td.num", null, version(trainer.version)), el("td", null, trainer.doing),
        el("td.dim", null, [trainer.host, trainer.device].filter(Boolean).join(" · "))))))));
}

/** @param {number | null | undefined} value */
const version = (value) => (value === null || value === undefined || value < 0 ? "–" : whole(value));

/** A table's heads; those that begin with ">" are of numbers. @param {...string} names */
export function heads(...names) {
  return el("thead", null, el("tr", null, names.map((name) =>
    (name.startsWith(">") ? el("th.num", { scope: "col" }, name.slice(1)) : el("th", { scope: "col" }, name)))));
}
