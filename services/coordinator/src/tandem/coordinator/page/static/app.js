// The page: the header, the panels, and who hears of what changes. A panel that is not shown asks for nothing.
//
//   api/stream ──▶ changes ──▶ header (state, step, ETA) and the panel that is open
//   the URL's hash ──▶ which panel, which run, and what it shows; panels write theirs there (state.js)

import { get, listen, ofRun } from "./api.js";
import { isDark, onTheme, toggleTheme } from "./colours.js";
import * as curves from "./curves.js";
import { el, empty, fill, hideTip, setText } from "./dom.js";
import * as events from "./events.js";
import { Header } from "./header.js";
import * as memory from "./memory.js";
import { refresher } from "./refresh.js";
import * as refits from "./refits.js";
import * as samples from "./samples.js";
import * as scheduler from "./scheduler.js";
import * as state from "./state.js";
import * as timeline from "./timeline.js";

/**
 * @typedef {object} Run
 * @property {number} index
 * @property {string} name
 * @property {string} path
 * @property {string} algorithm
 * @property {string} model
 * @property {number} created_at
 * @property {number} updated_at
 * @property {"running" | "finished" | "failed" | "interrupted" | "ended"} state
 * @property {number | null} last_step
 * @property {number | null} num_steps
 *
 * @typedef {object} Change
 * @property {boolean} steps a run that is shown did a step
 * @property {boolean} live what the scheduler of the run says is newer
 * @property {boolean} events there is more in its log
 *
 * @typedef {object} Context what panels know of the page
 * @property {() => Run[]} runs all
 * @property {() => Run} run the one that panels other than the curves are of
 * @property {() => Run[]} shown those whose curves are drawn
 * @property {(run: number) => number} colour of a run
 * @property {() => any} live what the scheduler of `run` says, or null
 *
 * @typedef {object} View
 * @property {(change: Change) => void} update
 * @property {() => void} [close]
 */

/** @type {[string, string, (root: HTMLElement, ctx: Context) => View][]} */
const TABS = [
  ["curves", "Curves", curves.mount], ["timeline", "Timeline", timeline.mount],
  ["scheduler", "Scheduler", scheduler.mount], ["refits", "Refits", refits.mount],
  ["memory", "Memory", memory.mount], ["log", "Log", events.mount], ["samples", "Samples", samples.mount],
];

const LOOK_MS = 3000;

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
    this.missed = false;
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
    document.getElementById("skip")?.addEventListener("click", (event) => { event.preventDefault(); this.main.focus(); });
    state.onMove(() => this.open());
    document.addEventListener("visibilitychange", () => { if (!document.hidden && this.missed) this.catchUp(); });
    try {
      await this.loadRuns();
    } catch (error) {
      fill(this.main, empty("The server cannot be reached.", "This page tries again by itself."));
    }
    listen((change) => this.changed(change), (isConnected, retryInS) => {
      this.header.connected(isConnected, retryInS);
      if (isConnected) this.catchUp();
    });
    if (this.runs.length) this.open();
    // How a run ended is known when its coordinator is gone, which changes no file.
    setInterval(() => { if (!document.hidden && this.runs.some((run) => run.state === "running")) this.refreshRuns(); }, LOOK_MS);
  }

  run() {
    return this.runs[state.numeric("run", 0)] ?? this.runs[0];
  }

  /** The runs of the curves: all, unless some were chosen. */
  shown() {
    const chosen = state.value("runs");
    const some = chosen ? this.runs.filter((run) => chosen.split(".").includes(String(run.index))) : this.runs;
    return some.length ? some : this.runs;
  }

  /** @param {number} index */
  pick(index) {
    state.set({ run: index || null });
    this.live = null;
    this.open(true);
  }

  /** @param {number} index */
  toggle(index) {
    const now = this.shown().map((run) => run.index);
    const next = now.includes(index) ? now.filter((other) => other !== index) : [...now, index].sort((a, b) => a - b);
    state.set({ runs: next.length === this.runs.length || !next.length ? null : next.join(".") });
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
    if (this.runs.length && !wereThere) this.open();
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

  /** @param {any} change what the stream said */
  changed(change) {
    const before = this.heard.get(change.run) ?? {};
    this.heard.set(change.run, change);
    const isOfRun = change.run === (this.run()?.index ?? 0);
    const isNew = (/** @type {string} */ what) => change[what] !== before[what];
    const run = this.runs[change.run];
    if (run && isNew("last_step") && change.last_step !== null) run.last_step = change.last_step;
    this.refreshRuns();
    if (document.hidden) { this.missed = true; return; }
    if (isOfRun && isNew("live_at")) this.refreshLive();
    const isShown = isOfRun || this.shown().some((other) => other.index === change.run);
    const what = { steps: isShown && isNew("last_step"), live: false, events: isOfRun && isNew("last_event") };
    if (what.steps && isOfRun) this.header.stepDone();
    if (what.steps || what.events) this.view?.update(what);
  }

  /** Nothing was heard for a while. */
  catchUp() {
    this.missed = false;
    this.refreshRuns();
    this.refreshLive();
    this.header.stepDone();
    this.view?.update({ steps: true, live: true, events: true });
  }

  /** Show the panel that the hash names. @param {boolean} [isAgain] even if it is shown */
  open(isAgain = false) {
    if (!this.runs.length) return;
    const [tab, name, mount] = TABS.find(([id]) => id === state.tab()) ?? TABS[0];
    this.header.draw();
    this.refreshLive();
    this.header.stepDone();
    hideTip();
    for (const link of document.querySelectorAll("#tabs a")) {
      const isThis = /** @type {HTMLElement} */ (link).dataset.tab === tab;
      if (isThis) { link.setAttribute("aria-current", "page"); link.scrollIntoView({ block: "nearest", inline: "nearest" }); } else link.removeAttribute("aria-current");
    }
    this.view?.close?.();
    const root = el("div.view", { data: { view: tab } });
    fill(this.main, root);
    document.title = `${this.run().name} · ${name} · Tandem`;
    if (tab !== this.tab || isAgain) scrollTo(0, 0);
    this.tab = tab;
    this.view = mount(root, this.ctx);
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

