// Answers from the data within the file: what ../api.js asks a server for, of runs as they were when it was written.

import { chosen, ofProblem, one } from "./shown.js";

/** An error of the server, in one line. */
export class ApiError extends Error {}

/** @type {any[]} */
const runs = JSON.parse(document.getElementById("frozen")?.textContent ?? "[]");

/** The panels of a report: its tables first. Samples are in the file where a model saw pictures, calls never.
 * @template Tab @param {[string, string, Tab][]} all @returns {[string, string, any][]} */
export const panels = (all) => [["summary", "Summary", () => import("./summary.js")],
  ...all.filter(([id]) => id !== "calls" && (id !== "samples" || runs.some((run) => run.samples)))];

/** A thumbnail within the file. @param {number} run @param {string} digest @returns {string | null} */
export const pictureOf = (run, digest) => runs[run].pictures?.[digest] ?? null;

/**
 * @param {string} path under "api/"
 * @param {Record<string, any>} [query]
 * @returns {Promise<any>}
 */
export async function get(path, query = {}) {
  if (path === "runs") return runs.map(({ summary }) => ({ ...summary }));
  const [, index, ...what] = path.split("/");
  return ofRun(Number(index), what.join("/"), query);
}

/** @param {number} index @param {string} path @param {Record<string, any>} [query] */
export async function ofRun(index, path, query = {}) {
  const run = runs[index];
  if (path.startsWith("problems/")) return ofProblem(run.samples, path);
  if (path.startsWith("samples/")) {
    const found = one(run.samples, path, query.purpose);
    if (!found) throw new ApiError("This sample is not in the report.");
    return found;
  }
  switch (path) {
    case "samples": return chosen(run.samples, query);
    case "rows": throw new ApiError("The rows of a run are not in its report.");
    case "live": return null;
    case "gpus": return [];
    case "series": return series(run, String(query.names).split(","), query);
    case "memory": return series(run, run.metrics.filter((/** @type {any} */ metric) => metric.group === "memory")
      .map((/** @type {any} */ metric) => metric.name), query);
    case "metrics": return { names: run.metrics };
    case "events": return run.events.filter((/** @type {any} */ event) => event.id > (query.after ?? 0));
    case "timeline": return timeline(run, query);
    default: return run[path];
  }
}

/** @param {any} run @param {string[]} names @param {Record<string, any>} query */
function series(run, names, { from, to, along = "steps" }) {
  const [low, high] = [from ?? -Infinity, to ?? Infinity];
  return Object.fromEntries(names.filter((name) => name in run.series).map((name) => {
    const { at, mean, low: least = mean, high: most = mean } = run.series[name];
    const places = run.places[at];
    const isShown = places.steps.map((/** @type {number} */ step) => step >= low && step <= high);
    const shown = (/** @type {any[]} */ values) => values.filter((_, i) => isShown[i]);
    const x = places[along] && along !== "steps" ? { x: shown(places[along]) } : {};
    return [name, { step: shown(places.steps), mean: shown(mean), low: shown(least), high: shown(most), ...x }];
  }));
}

/** @param {any} run @param {Record<string, any>} query */
function timeline({ timeline: all, flames }, { steps: count, flame }) {
  const steps = all.steps.slice(-Number(count));
  if (!steps.length) return all;
  const [first, last] = [steps[0].start, steps[steps.length - 1].end];
  const clipped = (/** @type {any} */ span) =>
    ({ ...span, start: Math.max(first, span.start), end: Math.min(last, span.end) });
  const lanes = all.lanes.map((/** @type {any} */ lane) =>
    ({ ...lane, spans: lane.spans.map(clipped).filter((/** @type {any} */ span) => span.end > span.start) }));
  return { steps, lanes, flame: flames[flame] ?? [] };
}

/** Nothing changes any more. @param {(change: any) => void} _ @param {(isConnected: boolean, retryInS: number) => void}
 * connected */
export const listen = (_, connected) => connected(true, 0);
