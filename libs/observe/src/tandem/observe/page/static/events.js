// The event log of processes and warnings; it follows the run.

import { ofRun } from "./api.js";
import { el, empty, fill, select, setText } from "./dom.js";
import { clock, day } from "./format.js";
import { refresher } from "./refresh.js";
import * as state from "./state.js";

/** @typedef {import("./app.js").Context} Context */
/** @typedef {{id: number, at: number, source: string, text: string}} Event */

const PAGE = 1000; // events shown, the newest
const MOST_SHOWN = 2000;

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  return new Log(root, ctx);
}

class Log {
  /** @param {HTMLElement} root @param {Context} ctx */
  constructor(root, ctx) {
    this.ctx = ctx;
    /** @type {Event[]} */
    this.events = [];
    this.follows = true;
    this.list = el("ol.log", { tabindex: 0, "aria-label": "Events", onscroll: () => this.scrolled() });
    this.count = el("span.dim");
    this.sources = el("span");
    this.follow = el("button", { type: "button", "aria-pressed": "true",
      onclick: () => this.setFollows(!this.follows) }, "Follow");
    const find = el("input", {
      type: "search", placeholder: "Filter…", "aria-label": "Filter by text", value: state.value("find"),
      oninput: (/** @type {any} */ event) => { state.set({ find: event.target.value }); this.draw(); },
    });
    fill(root, el("section.panel.fills", { "aria-label": "Event log" },
      el("div.toolbar", null, find, this.sources, this.count, el("span.grow"), this.follow), this.list));
    this.refresh = refresher(() => this.load(), (error) => fill(this.list, empty(error.message)));
    this.refresh();
  }

  /** @param {import("./app.js").Change} change */
  update(change) {
    if (change.events) this.refresh();
  }

  async load() {
    const after = this.events[this.events.length - 1]?.id ?? 0;
    this.events.push(...await ofRun(this.ctx.run().index, "events", { after, limit: PAGE }));
    this.draw();
  }

  draw() {
    const sources = [...new Set(this.events.map((event) => event.source))].sort();
    const options = /** @type {[string, string][]} */ ([["", "all sources"],
      ...sources.map((source) => [source, source])]);
    if (sources.join("\n") !== this.known) { // otherwise an open menu would close
      this.known = sources.join("\n");
      fill(this.sources, select("Source", options, state.value("source"),
        (value) => { state.set({ source: value }); this.draw(); }));
    }
    const words = state.value("find").toLowerCase();
    const source = state.value("source");
    const found = this.events.filter((event) => (!source || event.source === source)
      && (!words || `${event.source} ${event.text}`.toLowerCase().includes(words)));
    setText(this.count, `${found.length} of ${this.events.length}`);
    const shown = found.slice(-MOST_SHOWN);
    if (!shown.length) fill(this.list, empty(this.events.length ? "Nothing matches." : "Nothing has happened yet."));
    else fill(this.list, shown.map((event, i) => line(event, i === 0 || day(event.at) !== day(shown[i - 1].at))));
    if (this.follows) this.list.scrollTop = this.list.scrollHeight;
  }

  /** @param {boolean} follows */
  setFollows(follows) {
    this.follows = follows;
    this.follow.setAttribute("aria-pressed", String(follows));
    if (follows) this.list.scrollTop = this.list.scrollHeight;
  }

  scrolled() {
    const isAtEnd = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 8;
    if (isAtEnd !== this.follows) { this.follows = isAtEnd; this.follow.setAttribute("aria-pressed", String(isAtEnd)); }
  }
}

/** @param {Event} event @param {boolean} isFirstOfDay */
function line(event, isFirstOfDay) {
  const kind = /^(warning|error|failed)/i.exec(event.text)?.[0].toLowerCase() ?? "";
  return el("li", { data: { kind, event: String(event.id) } }, isFirstOfDay ? el("div.day", null, day(event.at)) : null,
    el("time", null, clock(event.at)), el("span.source", null, event.source), el("span.words", null, event.text));
}
