// The page: the header, the panels, and the distribution of changes. A hidden panel requests nothing.
//
//   api/stream ──▶ changes ──▶ header (state, step, ETA) and the panel that is open
//   the URL's hash ──▶ which panel, which run, and what it shows; panels write theirs there (state.js)
//
// A panel's module is loaded when the panel is opened, and the others a little later. So the first panel appears
// sooner, and the others can be opened even if the server is gone by then.

import { get, listen, ofRun, panels } from "./api.js";
import { isDark, onTheme, toggleTheme } from "./colours.js";
import { el, empty, fill, hideTip, setText } from "./dom.js";
import { Header } from "./header.js";
import { refresher } from "./refresh.js";
import * as state from "./state.js";

/**
 * @typedef {object} Run
 * @property {number} index
 * @property {string} name
 * @property {string} path
 * @property {string} algorithm
 * @property {string} stage what it shares an axis with: those that generate, or its algorithm
 * @property {string} model
 * @property {number} created_at
 * @property {number} updated_at
 * @property {"running" | "finished" | "failed" | "interrupted" | "ended"} state
 * @property {number | null} last_step
 * @property {number | null} num_steps
 * @property {boolean} has_calls clients have driven it
 *
 * @typedef {object} Change
 * @property {boolean} steps a shown run finished a step
 * @property {boolean} live the run's live status is newer
 * @property {boolean} events its log has grown
 *
 * @typedef {object} Context the page, as panels see it
 * @property {() => Run[]} runs all
 * @property {() => Run} run the run of all panels but the curves
 * @property {() => Run[]} shown those with curves drawn
 * @property {(run: number) => number} colour of a run
 * @property {() => any} live live status of `run`, or null
 *
 * @typedef {object} View
 * @property {(change: Change) => void} update
 * @property {() => void} [close]
 */

/** @typedef {{mount: (root: HTMLElement, ctx: Context) => View}} Panel */

/** @type {[string, string, () => Promise<Panel>][]} */
const TABS = panels([
  ["curves", "Curves", () => import("./curves.js")],
  ["timeline", "Timeline", () => import("./timeline.js")],
  ["scheduler", "Scheduler", () => import("./scheduler.js")],
  ["refits", "Refits", () => import("./refits.js")],
  ["calls", "Calls", () => import("./calls.js")],
  ["memory", "Memory", () => import("./memory.js")],
  ["config", "Configuration", () => import("./config.js")],
  ["log", "Log", () => import("./events.js")],
  ["samples", "Samples", () => import("./samples.js")],
]);

const LOOK_MS = 3000;
const OTHER_PANELS_MS = 1500;

class Page {
  constructor() {
    /** @type {Run[]} */
    this.runs = [];
    /** @type {any} */
    this.live = null;
    /** @type {View | null} */
    this.view = null;
    this.tab = "";
    /** @type {Map<number, any>} */
    this.heard = new Map();
    this.missed = false; // changes may have been missed or ignored
    this.main = /** @type {HTMLElement} */ (document.getElementById("main"));
    /** @type {Context} */
    this.ctx = {
      runs: () => this.runs, run: () => this.run(), shown: () => this.shown(), colour: (run) => run,
      live: () => this.live,
    };
    this.header = new Header(this.ctx, { picked: (run) => this.pick(run), toggled: (run) => this.toggle(run) });
    this.refreshRuns = refresher(() => this.loadRuns(), undefined, 1000);
    this.refreshLive = refresher(() => this.loadLive(), undefined, 500);
  }

  async start() {
    this.buildTabs();
    this.buildTheme();
    document.getElementById("skip")?.addEventListener("click",
      (event) => { event.preventDefault(); this.main.focus(); });
    state.onMove(() => void this.open());
    document.addEventListener("visibilitychange", () => { if (!document.hidden && this.missed) this.catchUp(); });
    try {
      await this.loadRuns();
    } catch (error) {
      this.missed = true;
      this.unreachable();
    }
    listen((change) => this.changed(change), (isConnected, retryInS) => {
      this.header.connected(isConnected, retryInS);
      if (!isConnected) this.missed = true;
      else if (this.missed) this.catchUp();
    });
    // A run's end is known once its coordinator is gone, which changes no file.
    setInterval(() => {
      if (!document.hidden && this.runs.some((run) => run.state === "running")) this.refreshRuns();
    }, LOOK_MS);
    setTimeout(() => { for (const [, , load] of TABS) load().catch(() => {}); }, OTHER_PANELS_MS);
  }

  unreachable() {
    fill(this.main, empty("The server cannot be reached.", "This page tries again by itself."));
  }

  run() {
    return this.runs[state.numeric("run", 0)] ?? this.runs[0];
  }

  /** Runs with curves drawn: those of one stage, unless some were chosen. */
  shown() {
    const chosen = state.value("runs");
    const some = chosen ? this.runs.filter((run) => chosen.split(".").includes(String(run.index))) : [];
    return some.length ? some : this.ofStage();
  }

  /** Runs of the same stage as the current one: another stage, of other steps, would squeeze the curves. */
  ofStage() {
    return this.runs.filter((run) => run.stage === this.run().stage);
  }

  /** @param {number} index */
  pick(index) {
    state.set({ run: index || null });
    this.live = null;
    void this.open(true);
  }

  /** @param {number} index */
  toggle(index) {
    const now = this.shown().map((run) => run.index);
    const next = now.includes(index) ? now.filter((other) => other !== index) : [...now, index].sort((a, b) => a - b);
    const isUsual = next.join() === this.ofStage().map((run) => run.index).join();
    state.set({ runs: isUsual ? null : next.join(".") });
    this.header.draw();
    this.view?.update({ steps: true, live: false, events: false });
  }

  async loadRuns() {
    const wereThere = this.runs.length;
    const before = this.runs[this.run()?.index]?.state;
    this.runs = await get("runs");
    if (before === "running" && this.run()?.state !== before) this.refreshLive();
    if (!this.runs.length) fill(this.main, empty("There is no run to look at."));
    this.header.draw();
    this.drawTabs();
    if (this.runs.length && !wereThere) {
      for (const { index, last_step } of this.runs) this.heard.set(index, { last_step, isLoaded: true });
      void this.open();
    }
  }

  async loadLive() {
    const run = this.run();
    if (!run) return;
    const live = await ofRun(run.index, "live");
    if (run.index !== this.run().index) return;
    this.live = live;
    this.header.drawLive();
    this.view?.update({ steps: false, live: true, events: false });
  }

  /** @param {any} change from the stream */
  changed(change) {
    const before = this.heard.get(change.run) ?? {};
    this.heard.set(change.run, change);
    const isOfRun = change.run === (this.run()?.index ?? 0);
    const isNew = (/** @type {string} */ what) => change[what] !== before[what];
    const run = this.runs[change.run];
    if (run && isNew("last_step") && change.last_step !== null) run.last_step = change.last_step;
    if (run && run.state !== change.state) { // the last change that a run's page reports is its end
      run.state = change.state;
      this.header.draw();
    }
    if (!before.isLoaded || isNew("last_step")) this.refreshRuns(); // otherwise nothing has changed
    if (document.hidden) { this.missed = true; return; }
    if (isOfRun && isNew("live_at")) this.refreshLive();
    const isShown = isOfRun || this.shown().some((other) => other.index === change.run);
    const what = { steps: isShown && isNew("last_step"), live: false, events: isOfRun && isNew("last_event") };
    if (what.steps && isOfRun) this.header.stepDone();
    if (what.steps || what.events) this.view?.update(what);
  }

  /** Refresh after a silence of the stream. */
  catchUp() {
    this.missed = false;
    this.refreshRuns();
    this.refreshLive();
    this.header.stepDone();
    this.view?.update({ steps: true, live: true, events: true });
  }

  /** Show the panel that the hash names. @param {boolean} [isAgain] even if it is already shown */
  async open(isAgain = false) {
    if (!this.runs.length) return;
    const [tab, name, load] = TABS.find(([id]) => id === state.tab()) ?? TABS[0];
    this.header.draw();
    this.drawTabs();
    this.refreshLive();
    this.header.stepDone();
    hideTip();
    for (const link of document.querySelectorAll("#tabs a")) {
      const isThis = /** @type {HTMLElement} */ (link).dataset.tab === tab;
      if (!isThis) { link.removeAttribute("aria-current"); continue; }
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    this.view?.close?.();
    this.view = null;
    const root = el("div.view", { data: { view: tab } });
    fill(this.main, root);
    document.title = `${this.run().name} · ${name} · Tandem`;
    if (tab !== this.tab || isAgain) scrollTo(0, 0);
    this.tab = tab;
    try {
      const { mount } = await load();
      if (root.isConnected) this.view = mount(root, this.ctx); // otherwise another panel was opened meanwhile
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // a module could not be loaded
      this.missed = true;
      this.unreachable();
    }
  }

  buildTabs() {
    const nav = /** @type {HTMLElement} */ (document.getElementById("tabs"));
    fill(nav, TABS.map(([id, name]) => el("a", {
      href: `#${id}`, data: { tab: id },
      onclick: (/** @type {MouseEvent} */ event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        state.go(id);
      },
    }, name)));
  }

  /** Offer calls only of runs that have any. */
  drawTabs() {
    const calls = /** @type {HTMLElement | null} */ (document.querySelector("#tabs a[data-tab=calls]"));
    if (calls) calls.hidden = !this.run()?.has_calls;
  }

  buildTheme() {
    const button = /** @type {HTMLElement} */ (document.getElementById("theme"));
    const draw = () => {
      setText(button, isDark() ? "☀" : "☾");
      button.title = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
    };
    button.addEventListener("click", toggleTheme);
    onTheme(draw);
    draw();
  }
}

void new Page().start();

