// The header: the runs, and the progress and problems of the chosen one.

import { ofRun } from "./api.js";
import { colour } from "./colours.js";
import { el, fill, setText } from "./dom.js";
import { duration, whole } from "./format.js";
import { refresher } from "./refresh.js";
import * as state from "./state.js";

/** @typedef {import("./app.js").Context} Context */

export class Header {
  /** @param {Context} ctx @param {{picked: (run: number) => void, toggled: (run: number) => void}} on */
  constructor(ctx, on) {
    this.ctx = ctx;
    this.on = on;
    this.runs = byId("runs");
    this.status = byId("status");
    this.progress = byId("progress");
    this.state = el("span.state");
    this.step = fact("step", "step");
    this.eta = fact("ETA", "eta");
    this.rate = fact("tokens/s", "rate");
    this.notes = el("button.chip.warn", { type: "button", hidden: true,
      onclick: () => state.go("log", { find: "warning" }) });
    fill(this.status, this.state, this.step.element, this.eta.element, this.rate.element, this.notes);
    this.stepDone = refresher(() => this.loadRate(), undefined, 1500);
    this.shape = "";
  }

  draw() {
    const run = this.ctx.run();
    if (!run) return;
    this.drawRuns(run);
    setText(this.state, run.state === "ended" ? "ended" : run.state);
    this.state.dataset.state = run.state;
    this.state.title = `${run.path}\n${run.algorithm} · ${run.model}`;
    this.drawLive();
  }

  drawLive() {
    const run = this.ctx.run();
    const live = run.state === "running" ? this.ctx.live() : null;
    const last = Math.max(live?.step ?? 0, run.last_step ?? 0);
    const num = live?.num_steps ?? run.num_steps;
    setText(this.step.value, num ? `${whole(last)} / ${whole(num)}` : whole(last));
    const isOn = run.state === "running";
    setText(this.eta.label, isOn ? "ETA" : "took");
    setText(this.eta.value, duration(isOn ? live?.eta_s : run.updated_at - run.created_at));
    const share = num ? Math.min(1, last / num) : 0;
    this.progress.style.setProperty("--share", String(share));
    this.progress.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    const warnings = (live?.notes ?? []).filter((/** @type {string} */ note) => note.startsWith("warning"));
    this.notes.hidden = !warnings.length;
    setText(this.notes, warnings.length === 1 ? "1 warning" : `${warnings.length} warnings`);
    this.notes.title = warnings.join("\n");
  }

  /** @param {import("./app.js").Run} current */
  drawRuns(current) {
    const runs = this.ctx.runs();
    const shown = new Set(this.ctx.shown().map((run) => run.index));
    const shape = JSON.stringify([runs.map((run) => [run.name, run.path, run.state]), current.index, [...shown]]);
    if (shape === this.shape) return;
    this.shape = shape;
    if (runs.length === 1) {
      fill(this.runs, el("strong.run-name", { title: current.path }, current.name));
      return;
    }
    fill(this.runs, runs.map((run) => el("span.run", { data: { run: String(run.index), state: run.state } },
      el("button.swatch-button", {
        type: "button", "aria-pressed": String(shown.has(run.index)), title: "Draw its curves",
        "aria-label": `Draw the curves of ${run.name}`, style: { "--c": colour(this.ctx.colour(run.index)) },
        onclick: () => this.on.toggled(run.index),
      }),
      el("button.name", {
        type: "button", "aria-pressed": String(run.index === current.index), title: run.path,
        onclick: () => this.on.picked(run.index),
      }, run.name))));
  }

  async loadRate() {
    const run = this.ctx.run();
    if (!run?.last_step) return;
    const last = run.last_step;
    const series = await ofRun(run.index, "series", { names: "tokens_per_s", from: Math.max(0, last - 4), to: last });
    const values = series.tokens_per_s?.mean ?? []; // an algorithm over a data set generates none
    this.rate.element.hidden = !values.length;
    if (values.length) setText(this.rate.value, whole(values[values.length - 1]));
  }

  /** @param {boolean} isConnected @param {number} retryInS */
  connected(isConnected, retryInS) {
    const element = byId("connection");
    element.dataset.connected = String(isConnected);
    setText(element, isConnected ? "" : "disconnected");
    element.title = isConnected ? "Connected" : `The server does not answer; tried again in ${retryInS} s`;
  }
}

/** @param {string} name @param {string} id */
function fact(name, id) {
  const label = el("span.label", null, name);
  const value = el("b", { data: { fact: id } }, "–");
  return { element: el("span.fact", null, label, value), label, value };
}

/** @param {string} id */
const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
