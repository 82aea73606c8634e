// Memory by phase, and the GPUs.

import { get, ofRun } from "./api.js";
import { Chart } from "./chart.js";
import { el, empty, fill, panel } from "./dom.js";
import { gb, percent } from "./format.js";
import { refresher } from "./refresh.js";
import { heads } from "./scheduler.js";

/** @typedef {import("./app.js").Context} Context */

const NAME = /^memory_(.+)_([a-z0-9]+)_gb$/;

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  const table = el("div.scroll");
  const plot = el("div.plot.high", { role: "img", "aria-label": "Memory over the steps" });
  const legend = el("div.legend");
  const gpus = el("div");
  const chart = new Chart(plot, { height: 240, format: gb });
  const steps = panel("Over the steps", null, plot, legend);
  fill(root, el("div.columns", null, panel("Most memory by phase", "of the largest process of its kind", table),
    panel("GPUs", null, gpus)), steps);

  const refreshMemory = refresher(async () => {
    const run = ctx.run();
    /** @type {Record<string, any>} */
    const series = await ofRun(run.index, "memory");
    const names = Object.keys(series).filter((name) => series[name].step.length);
    steps.hidden = !names.length;
    if (!names.length) { fill(table, empty("No step has said yet what memory it took.")); return; }
    fill(table, byPhase(series, names));
    const lines = names.map((name, i) => ({ label: called(name), colour: i, dashed: i >= 8, ...series[name] }));
    chart.draw(lines, { smoothing: 0, isLog: false, isStacked: false, range: [0, Math.max(1, run.last_step ?? 1)],
      along: "steps" });
    fill(legend, lines.map((line, i) => el("span.key", null,
      el("i.swatch", { style: { "--c": `var(--c${i % 8})` } }), line.label,
      el("b", null, gb(line.mean[line.mean.length - 1])))));
  }, (error) => fill(table, empty(error.message)), 1500);

  const refreshGpus = refresher(async () => {
    const found = await get(`runs/${ctx.run().index}/gpus`);
    fill(gpus, found.length ? el("div.gpus", null, found.map(gpuCard))
      : el("p.sentence", null, ctx.run().state === "running" ? "This run computes on CPUs: there is no GPU to show."
        : "GPUs are shown while a run goes on."));
  }, (error) => fill(gpus, empty(error.message)), 1500);

  refreshMemory();
  refreshGpus();
  return {
    update: (/** @type {import("./app.js").Change} */ change) => {
      if (change.steps) refreshMemory();
      if (change.live) refreshGpus();
    },
    close: () => chart.close(),
  };
}

/** @param {string} name */
function called(name) {
  const parts = NAME.exec(name);
  return parts ? `${parts[2]}, ${parts[1].replaceAll("_", " ")}` : name;
}

/** @param {Record<string, any>} series @param {string[]} names */
function byPhase(series, names) {
  const parts = names.map((name) => ({ name, match: NAME.exec(name) })).filter(({ match }) => match);
  const phases = [...new Set(parts.map(({ match }) => /** @type {any} */ (match)[1]))];
  const kinds = [...new Set(parts.map(({ match }) => /** @type {any} */ (match)[2]))];
  const isNumber = (/** @type {number | null} */ value) => value !== null;
  const peak = (/** @type {string} */ name) => Math.max(...series[name].high.filter(isNumber));
  const most = Math.max(...names.map(peak));
  return el("table", { data: { table: "memory" } }, heads("process",
    ...phases.map((phase) => `>${phase.replaceAll("_", " ")}`)),
    el("tbody", null, kinds.map((kind) => el("tr", null, el("th", null, kind), phases.map((phase) => {
      const name = `memory_${phase}_${kind}_gb`;
      if (!series[name]?.step.length) return el("td.num.dim", null, "–");
      const mean = series[name].mean;
      return el("td.num.meter", { data: { metric: name }, style: { "--share": peak(name) / most },
        title: `last ${gb(mean[mean.length - 1])}, peak ${gb(peak(name))}` }, gb(peak(name)));
    })))));
}

/** @param {any} gpu */
function gpuCard(gpu) {
  const bar = (/** @type {string} */ label, /** @type {number} */ share,
    /** @type {string} */ text) => el("div.gauge", null, el("span.dim", null, label),
    el("span.gauge-bar", null, el("i", { style: { width: percent(Math.min(1, share ?? 0), 1) } })),
      el("b", null, text));
  return el("div.gpu", null, el("div", null, el("b", null, `${gpu.host} · ${gpu.index}`), " ",
    el("span.dim", null, gpu.name)),
    bar("memory", gpu.used_gb / gpu.memory_gb, `${gpu.used_gb.toFixed(1)} / ${gpu.memory_gb.toFixed(0)} GB`),
    gpu.utilisation === null || gpu.utilisation === undefined ? null
      : bar("busy", gpu.utilisation, percent(gpu.utilisation)));
}
