// The timeline: each process's activities over the last steps, in a lane each, and one step as a flame graph.

import { ofRun } from "./api.js";
import { activityColour, colour, css, ink, onTheme, painted } from "./colours.js";
import { el, empty, fill, hideTip, panel, segmented, setText, showTip } from "./dom.js";
import { clock, duration, percent } from "./format.js";
import { refresher } from "./refresh.js";
import { save } from "./save.js";
import * as state from "./state.js";

/** @typedef {import("./app.js").Context} Context */
/** @typedef {{what: string, step: number, start: number, end: number | null, detail: string}} Span */
/** @typedef {{process: string, spans: Span[]}} Lane */
/** @typedef {{name: string, start: number, end: number | null, process: string, depth: number}} Phase */

const LANE = 26; // pixels
const FONT = '11px "Helvetica Neue", Arial, system-ui, sans-serif';
const COUNTS = /** @type {[string, string][]} */ ([["3", "3"], ["10", "10"], ["30", "30"], ["100", "100"]]);

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  return new Timeline(root, ctx);
}

class Timeline {
  /** @param {HTMLElement} root @param {Context} ctx */
  constructor(root, ctx) {
    this.ctx = ctx;
    /** @type {{steps: {step: number, start: number, end: number | null}[], lanes: Lane[], flame?: Phase[]} | null} */
    this.data = null;
    /** @type {[number, number] | null} */
    this.zoom = null;
    this.names = el("div.lane-names");
    this.canvas = /** @type {HTMLCanvasElement} */ (el("canvas", {
      onmousemove: (/** @type {MouseEvent} */ event) => this.point(event), onmouseleave: hideTip,
      onmousedown: (/** @type {MouseEvent} */ event) => this.grab(event), ondblclick: () => this.setZoom(null),
      "aria-label": "Spans of each process over time", role: "img",
    }));
    this.selection = el("div.selection", { hidden: true });
    this.stepRow = el("div.step-row");
    this.axis = el("div.time-axis");
    this.field = el("div.field", null, this.stepRow, this.canvas, this.selection, this.axis);
    this.shares = el("div.lane-shares");
    this.legend = el("div.legend");
    this.unzoom = el("button", { type: "button", hidden: true, onclick: () => this.setZoom(null) }, "All steps");
    this.lanes = el("div.lanes", null, this.names, this.field, this.shares);
    this.body = el("div");
    this.flame = el("div.flame-body");
    this.flameTitle = el("h2", null, "One step");
    this.observer = new ResizeObserver(() => this.paint());
    this.observer.observe(this.field);
    this.stopTheme = onTheme(() => { this.paint(); if (this.data) this.drawFlame(state.numeric("flame")
      ?? this.ctx.run().last_step); });
    fill(root,
      panel("Timeline", [
        el("label", null, "steps ", segmented("Steps shown", COUNTS, state.value("steps", "10"),
          (value) => this.choose(value))),
        this.unzoom,
        el("button", { type: "button", title: "The steps shown, in Chrome's trace format: ui.perfetto.dev opens it",
          onclick: () => this.save() }, "Save as trace"),
      ], this.body, this.legend),
      el("section.panel", { "aria-label": "Flame of one step" },
        el("div.panel-head", null, this.flameTitle, el("div.beside", null, this.walker())), this.flame));
    this.refresh = refresher(() => this.load(), (error) => fill(this.body, empty(error.message)), 900);
    this.refresh();
  }

  walker() {
    return [
      el("button", { type: "button", "aria-label": "Step before", onclick: () => this.walk(-1) }, "←"),
      el("button", { type: "button", "aria-label": "Step after", onclick: () => this.walk(1) }, "→"),
      el("button", { type: "button", onclick: () => this.open(null) }, "Follow the newest"),
    ];
  }

  /** @param {import("./app.js").Change} change */
  update(change) {
    if (change.steps) this.refresh(); // a step's spans are written once it is done
  }

  async load() {
    const flame = state.numeric("flame") ?? this.ctx.run().last_step;
    const query = { steps: state.value("steps", "10"), to: state.numeric("to"), flame };
    this.data = await ofRun(this.ctx.run().index, "timeline", query);
    if (this.data && !this.data.lanes.some((lane) => lane.spans.length)) {
      fill(this.body, empty("No spans are recorded.", "A run that was recorded by an earlier version has none."));
      fill(this.flame, empty("No step to show."));
      return;
    }
    if (this.lanes.parentElement !== this.body) fill(this.body, this.lanes);
    this.draw();
    this.drawFlame(flame);
  }

  /** Save the steps shown for Perfetto. */
  save() {
    if (!this.data?.lanes.length) return;
    const name = `${this.ctx.run().name}-timeline.json`;
    save(name, "application/json", JSON.stringify({ traceEvents: traceEvents(this.data) }));
  }

  /** @param {string} steps */
  choose(steps) {
    this.zoom = null;
    state.set({ steps: steps === "10" ? null : steps });
    this.refresh();
  }

  /** @param {[number, number] | null} range */
  setZoom(range) {
    this.zoom = range;
    this.unzoom.hidden = !range;
    this.draw();
  }

  /** @param {number | null} step */
  open(step) {
    state.set({ flame: step });
    this.draw();
    this.refresh();
  }

  /** @param {number} by */
  walk(by) {
    const last = this.ctx.run().last_step ?? 0;
    this.open(Math.max(1, Math.min(last, (state.numeric("flame") ?? last) + by)));
  }

  /** The shown range of time. @returns {[number, number]} */
  range() {
    if (this.zoom) return this.zoom;
    const { steps, lanes } = /** @type {NonNullable<typeof this.data>} */ (this.data);
    const spans = lanes.flatMap((lane) => lane.spans);
    const starts = steps.length ? steps.map((step) => step.start) : spans.map((span) => span.start);
    const ends = [...steps.map((step) => step.end ?? 0), ...spans.map(endOf)];
    const low = least(starts);
    return [low, Math.max(low + 1e-3, -least(ends.map((end) => -end)))];
  }

  draw() {
    if (!this.data) return;
    const [low, high] = this.range();
    const at = (/** @type {number} */ time) => `${(100 * (time - low)) / (high - low)}%`;
    const chosen = state.numeric("flame");
    fill(this.names, el("div.lane-name.head", null, "step"),
      this.data.lanes.map((lane) => el("div.lane-name", { title: lane.process }, lane.process)));
    fill(this.stepRow, this.data.steps.filter((step) => (step.end ?? high) > low && step.start < high).map((step) => {
      const [from, to] = [Math.max(low, step.start), Math.min(high, step.end ?? high)];
      return el("button.step-button", {
        type: "button", "aria-pressed": String(step.step === chosen),
          title: `Step ${step.step}: ${duration((step.end ?? high) - step.start)}`,
        "aria-label": `Flame of step ${step.step}`, onclick: () => this.open(step.step),
        style: { left: at(from), width: `${(100 * (to - from)) / (high - low)}%` },
      }, String(step.step));
    }));
    fill(this.axis, [0, 0.25, 0.5, 0.75, 1].map((share) => el("span", { style: { left: `${100 * share}%` } },
      share === 0 ? clock(low) : `+${duration(share * (high - low))}`)));
    fill(this.shares, el("div.lane-share.head", null, "busy"), this.data.lanes.map((lane) => {
      const busy = covered(lane.spans.filter((span) => activityColour(span.what) !== null), low, high) / (high - low);
      return el("div.lane-share", { title: "Share of the time shown in which it did something" },
        busy > 0 && busy < 0.005 ? "<1%" : percent(busy));
    }));
    this.drawLegend(low, high);
    this.paint();
  }

  /** @param {number} low @param {number} high */
  drawLegend(low, high) {
    /** @type {Map<string, number>} */
    const totals = new Map();
    for (const lane of this.data?.lanes ?? []) {
      for (const span of lane.spans) {
        const seconds = Math.min(high, endOf(span)) - Math.max(low, span.start);
        if (seconds > 0) totals.set(span.what, (totals.get(span.what) ?? 0) + seconds);
      }
    }
    const order = [...totals].sort((a, b) => b[1] - a[1]);
    fill(this.legend, order.map(([what, seconds]) => {
      const own = activityColour(what);
      return el("span.key", { data: { what } },
        el(own === null ? "i.swatch.waiting" : "i.swatch", { style: { "--c": own === null ? "var(--line)"
          : colour(own) } }),
        what, el("b", null, duration(seconds)));
    }));
  }

  paint() {
    if (!this.data || !this.canvas.isConnected) return;
    const width = this.field.clientWidth;
    const height = this.data.lanes.length * LANE;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    context.scale(ratio, ratio);
    context.font = FONT;
    context.textBaseline = "middle";
    const [low, high] = this.range();
    const x = (/** @type {number} */ time) => ((time - low) / (high - low)) * width;
    this.data.lanes.forEach((lane, i) => {
      context.fillStyle = css("--grid");
      context.fillRect(0, i * LANE + LANE - 1, width, 1);
      const spans = inOrder(lane.spans);
      for (const { span, isBeside } of spans) {
        paintSpan(context, span, x(span.start), x(endOf(span)), i * LANE, width, isBeside);
      }
      const lower = spans.filter((each) => each.isBeside).map(({ span }) => [x(span.start), x(endOf(span))]);
      for (const { span, isBeside } of spans) {
        if (!isBeside) paintLabel(context, span, x(span.start), x(endOf(span)), i * LANE, width, lower);
      }
    });
    context.fillStyle = css("--line");
    for (const step of this.data.steps) context.fillRect(Math.round(x(step.start)), 0, 1, height);
  }

  /** @param {MouseEvent} event @returns {[number, Lane | undefined]} */
  locate(event) {
    const box = this.canvas.getBoundingClientRect();
    const [low, high] = this.range();
    const time = low + ((event.clientX - box.left) / box.width) * (high - low);
    return [time, this.data?.lanes[Math.floor((event.clientY - box.top) / LANE)]];
  }

  /** @param {MouseEvent} event */
  point(event) {
    if (!this.data) return;
    const [time, lane] = this.locate(event);
    const span = lane?.spans.findLast((each) => each.start <= time && time <= endOf(each));
    if (!span || !lane) { hideTip(); return; }
    showTip(event, el("b", null, `${lane.process}: ${span.what}`), el("dl", null,
      el("dt", null, "step"), el("dd", null, span.step), el("dt", null, "for"),
        el("dd", null, duration(endOf(span) - span.start)),
      el("dt", null, "from"), el("dd", null, clock(span.start))),
        span.detail ? el("div.dim", null, span.detail) : null);
  }

  /** A drag zooms; a click opens the step. @param {MouseEvent} event */
  grab(event) {
    if (event.button !== 0 || !this.data) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    const from = event.clientX;
    const [start] = this.locate(event);
    const move = (/** @type {MouseEvent} */ to) => {
      const [a, b] = [Math.max(box.left, Math.min(from, to.clientX)), Math.min(box.right, Math.max(from, to.clientX))];
      this.selection.hidden = b - a < 5;
      Object.assign(this.selection.style, { left: `${a - box.left}px`, width: `${b - a}px` });
    };
    const end = (/** @type {MouseEvent} */ to) => {
      removeEventListener("mousemove", move);
      removeEventListener("mouseup", end);
      this.selection.hidden = true;
      const [stop] = this.locate(to);
      if (Math.abs(to.clientX - from) >= 5) this.setZoom([Math.min(start, stop), Math.max(start, stop)]);
      else {
        const step = this.data?.steps.find((each) => each.start <= start && start <= (each.end ?? Infinity));
        if (step) this.open(step.step);
      }
    };
    addEventListener("mousemove", move);
    addEventListener("mouseup", end);
  }

  /** @param {number | null} step */
  drawFlame(step) {
    const flame = this.data?.flame ?? [];
    setText(this.flameTitle, step === null ? "One step" : `Step ${step}`);
    if (!flame.length) {
      fill(this.flame, empty("No phases are recorded of this step."));
      return;
    }
    const low = least(flame.map((phase) => phase.start));
    const high = Math.max(low + 1e-6, -least(flame.map((phase) => -endOf(phase))));
    const processes = [...new Set(flame.map((phase) => phase.process))];
    fill(this.flame, processes.map((process) => {
      const phases = inRows(flame.filter((phase) => phase.process === process));
      const height = 22 * (1 + Math.max(...phases.map(({ row }) => row)));
      return el("div.flame-process", { data: { process } }, el("div.lane-name", { title: process }, process),
        el("div.flame-field", { style: { height: `${height}px` } },
          phases.map(({ phase, row }) => phaseBar(phase, row, low, high))));
    }));
  }

  close() {
    hideTip();
    this.observer.disconnect();
    this.stopTheme();
  }
}

/** The steps and the activities of processes, but not their waits, in Chrome's trace format: a thread for each process.
 * @param {{steps: {step: number, start: number, end: number | null}[], lanes: Lane[]}} data */
function traceEvents({ steps, lanes }) {
  const micros = (/** @type {number} */ seconds) => Math.round(seconds * 1e6);
  const event = (/** @type {number} */ tid, /** @type {string} */ name, /** @type {any} */ span, args = {}) =>
    ({ name, ph: "X", pid: 0, tid, ts: micros(span.start), dur: micros(endOf(span) - span.start), args });
  const names = ["steps", ...lanes.map((lane) => lane.process)];
  return [
    ...names.map((name, tid) => ({ name: "thread_name", ph: "M", pid: 0, tid, args: { name } })),
    ...names.map((_, tid) => ({ name: "thread_sort_index", ph: "M", pid: 0, tid, args: { sort_index: tid } })),
    ...steps.map((step) => event(0, `step ${step.step}`, step)),
    ...lanes.flatMap((lane, i) => lane.spans.filter((span) => activityColour(span.what) !== null)
      .map((span) => event(i + 1, span.what, span, { step: span.step, detail: span.detail }))),
  ];
}

const NEIGHBOURS = 6;

/** Mark spans beside a longer one, which are drawn lower, and over it.
 * @param {Span[]} spans in order of their start @returns {{span: Span, isBeside: boolean}[]} */
function inOrder(spans) {
  const length = (/** @type {Span} */ span) => endOf(span) - span.start;
  const found = spans.map((span, i) => {
    const near = spans.slice(Math.max(0, i - NEIGHBOURS), i + NEIGHBOURS);
    const isLonger = (/** @type {Span} */ other) => other !== span && activityColour(other.what) !== null
      && length(other) > length(span);
    const isDuring = (/** @type {Span} */ other) =>
      Math.min(endOf(other), endOf(span)) - Math.max(other.start, span.start) > 1e-3;
    return { span, isBeside: near.some((other) => isLonger(other) && isDuring(other)) };
  });
  return [...found.filter((each) => !each.isBeside), ...found.filter((each) => each.isBeside)];
}

/** Return a row for each phase: by depth, and further down if that row is taken at the time.
 * @param {Phase[]} phases */
function inRows(phases) {
  const least = Math.min(...phases.map((phase) => phase.depth));
  /** @type {number[]} */
  const ends = [];
  return [...phases].sort((a, b) => a.depth - b.depth || a.start - b.start).map((phase) => {
    let row = phase.depth - least;
    while ((ends[row] ?? 0) > phase.start + 1e-6) row += 1;
    ends[row] = endOf(phase);
    return { phase, row };
  });
}

/** @param {Phase} phase @param {number} row @param {number} low @param {number} high */
function phaseBar(phase, row, low, high) {
  const own = activityColour(phase.name);
  const seconds = endOf(phase) - phase.start;
  const told = `${phase.name}: ${duration(seconds)}, ${percent(seconds / (high - low))} of the step`;
  const isPlain = own === null || (phase.depth === 0 && phase.name.startsWith("step"));
  return el(isPlain ? "div.phase.whole" : "div.phase", {
    tabindex: 0, "aria-label": told, data: { phase: phase.name },
    onmousemove: (/** @type {MouseEvent} */ event) => showTip(event, el("b", null, phase.process),
      el("div", null, told)),
    onmouseleave: hideTip,
    style: {
      "--c": colour(own ?? 0), "--ink": ink(own ?? 0), top: `${row * 22}px`,
      left: `${(100 * (phase.start - low)) / (high - low)}%`, width: `${(100 * seconds) / (high - low)}%`,
    },
  }, el("span", null, `${phase.name} `, el("b", null, duration(seconds))));
}

/** @param {CanvasRenderingContext2D} context @param {Span} span @param {number} from @param {number} to
 * @param {number} top @param {number} limit @param {boolean} isBeside */
function paintSpan(context, span, from, to, top, limit, isBeside) {
  const [a, b] = [Math.max(0, from), Math.min(limit, to)];
  const width = Math.max(b - a, 1);
  if (b < 0 || a > limit) return;
  const own = activityColour(span.what);
  if (own === null) {
    context.fillStyle = css("--line");
    context.fillRect(a, top + LANE / 2 - 1, width, 2);
    return;
  }
  context.fillStyle = painted(own);
  context.fillRect(a + (width > 3 ? 0.5 : 0), top + (isBeside ? LANE - 11 : 4), width - (width > 3 ? 1 : 0),
    isBeside ? 6 : LANE - 9);
}

/** Name a span in its bar, where it has room: above those beside it, which are drawn lower.
 * @param {CanvasRenderingContext2D} context @param {Span} span @param {number} from @param {number} to
 * @param {number} top @param {number} limit @param {number[][]} lower left and right ends of what is drawn lower */
function paintLabel(context, span, from, to, top, limit, lower) {
  const own = activityColour(span.what);
  const [a, b] = [Math.max(0, from), Math.min(limit, to)];
  const length = context.measureText(span.what).width;
  if (own === null || b - a - 10 <= length) return;
  const isCrowded = lower.some(([left, right]) => (left ?? 0) < a + 5 + length && (right ?? 0) > a + 5);
  context.fillStyle = ink(own);
  context.fillText(span.what, a + 5, top + LANE / 2 - (isCrowded ? 3 : 0.5));
}

/** @param {{end: number | null}} span an unfinished one ends now */
const endOf = (span) => span.end ?? Date.now() / 1000;
/** @param {number[]} values */
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);

/** Seconds that spans cover together, of a range. @param {Span[]} spans @param {number} low @param {number} high */
function covered(spans, low, high) {
  let total = 0;
  let reached = low;
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    const from = Math.max(reached, span.start);
    const to = Math.min(high, endOf(span));
    if (to > from) { total += to - from; reached = to; }
  }
  return total;
}
