// A small chart of lines over steps, on uPlot: smoothed, with the raw values behind, and a cursor shared by all charts.

import { css, faded, onTheme, painted } from "./colours.js";
import { number } from "./format.js";

/**
 * @typedef {object} Line
 * @property {string} label
 * @property {number} colour
 * @property {boolean} [dashed]
 * @property {number[]} step
 * @property {(number | null)[]} mean
 * @property {(number | null)[]} low
 * @property {(number | null)[]} high
 */

/**
 * @typedef {object} Look
 * @property {number} smoothing from 0, none, to below 1
 * @property {boolean} isLog
 * @property {boolean} isStacked lines are parts of a whole
 * @property {boolean} [isWhole] outliers are within the axis too
 * @property {[number, number]} shown range of steps
 * @property {string} [along] what the axis counts
 * @property {((x: number) => string) | null} [mark] label of a place on the axis, if it is not a step
 */

const COLUMNS = 4; // of a line: low, high, unsmoothed, smoothed
const FEW_POINTS = 16;
const FEWEST_WITH_OUTLIERS = 8; // values of a line; of fewer, none can be told from the others
const TAIL = 0.05; // share of a line's values, at either end, among which outliers may be
const BEYOND = 3; // spreads of the other values at which one is an outlier
const BEGINNING = 3; // outliers in a row with which a line begins that are how training begins, and stay
const FINER = 2; // times that an axis must separate values better without its outliers, or they stay
const MARK = 4; // half the width of an outlier's mark, in pixels
const ROUNDING = 2e-4; // relative difference below which an axis does not separate values
const FONT = '11px "Helvetica Neue", Arial, system-ui, sans-serif';

/**
 * Smooth by an exponential moving average that starts without a bias.
 * @param {(number | null)[]} values @param {number} weight of earlier values
 */
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null || Number.isNaN(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

/**
 * Limits that a line's values have but for its outliers, or null if it has none. The spread is that from the low to the
 * high values without `TAIL` at either end. Where these are all equal, as for what is mostly zero, nothing is cut.
 * @param {Line} line @returns {[number, number] | null}
 */
export function limits(line) {
  const [lows, highs] = [line.low, line.high].map((values) => known(values).sort((a, b) => a - b));
  if (lows.length < FEWEST_WITH_OUTLIERS) return null;
  const least = lows[Math.ceil(TAIL * (lows.length - 1))];
  const most = highs[Math.floor((1 - TAIL) * (highs.length - 1))];
  const beyond = BEYOND * (most - least);
  if (beyond <= BEYOND * ROUNDING * Math.max(Math.abs(least), Math.abs(most))) return null;
  const inside = (/** @type {number} */ value) => value >= least - beyond && value <= most + beyond;
  const begin = line.low.findIndex((low, i) => low !== null && inside(low) && inside(line.high[i] ?? low));
  const first = begin >= BEGINNING ? begin : 0;
  const low = Math.min(lows.find(inside) ?? least, ...known(line.low.slice(0, first)));
  const high = Math.max(highs.findLast(inside) ?? most, ...known(line.high.slice(0, first)));
  return highs[highs.length - 1] - lows[0] > FINER * (high - low) ? [low, high] : null;
}

/**
 * Join lines over one x, all of their steps, with null for missing values.
 * @param {Line[]} lines @param {Look} look @param {([number, number] | null)[]} within limits, which keep outliers
 *   from what is smoothed
 */
function columns(lines, look, within) {
  const steps = [...new Set(lines.flatMap((line) => line.step))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, place) => [step, place]));
  const spread = (/** @type {Line} */ line, /** @type {(number | null)[]} */ values) => {
    const column = new Array(steps.length).fill(look.isStacked ? 0 : null);
    values.forEach((value, i) => {
      const isDrawn = value !== null && !(look.isLog && value <= 0);
      column[/** @type {number} */ (places.get(line.step[i]))] = isDrawn ? value : null;
    });
    return column;
  };
  // Rare values, such as those of validations, are not smoothed.
  const weight = (/** @type {Line} */ line) => (line.step.length <= FEW_POINTS ? 0 : look.smoothing);
  const blank = new Array(steps.length).fill(null);
  if (look.isStacked) return [steps, ...stacked(lines.map((line) => spread(line, smooth(line.mean, weight(line)))))];
  const data = [steps];
  for (const [i, line] of lines.entries()) {
    const limit = weight(line) ? within[i] : null;
    const usual = limit ? line.mean.map((v) => (v !== null && (v < limit[0] || v > limit[1]) ? null : v)) : line.mean;
    const hasBand = line.low.some((low, i) => low !== line.high[i]);
    data.push(hasBand ? spread(line, line.low) : blank, hasBand ? spread(line, line.high) : blank,
      weight(line) ? spread(line, line.mean) : blank, spread(line, smooth(usual, weight(line))));
  }
  return data;
}

/** Sums from the last line up, so that the first is drawn first, and behind the others. @param {any[][]} parts */
function stacked(parts) {
  const sums = parts.map((part) => [...part]);
  for (let i = parts.length - 2; i >= 0; i -= 1) sums[i] = sums[i].map((value, at) => value + sums[i + 1][at]);
  return sums;
}

export class Chart {
  /**
   * @param {HTMLElement} root sets the width
   * @param {object} options
   * @param {number} [options.height]
   * @param {(range: [number, number] | null) => void} [options.zoomed] a range was selected, or null to show all
   * @param {(index: number | null) => void} [options.pointed] at a step, or at none
   * @param {string} [options.sync] key of the charts that share a cursor
   * @param {(value: number) => string} [options.format] of the values beside the chart
   */
  constructor(root, { height = 168, zoomed = () => {}, pointed = () => {}, sync = "steps", format = number } = {}) {
    this.root = root;
    this.height = height;
    this.zoomed = zoomed;
    this.pointed = pointed;
    this.sync = sync;
    this.format = format;
    /** @type {any} */
    this.plot = null;
    this.shape = "";
    /** @type {Line[]} */
    this.lines = [];
    /** @type {Look} */
    this.look = { smoothing: 0, isLog: false, isStacked: false, range: [0, 1] };
    /** Values beyond the axis. @type {{line: number, x: number, value: number, isHigh: boolean}[]} */
    this.outliers = [];
    /** @type {[number, number] | null} */
    this.limits = null;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(root);
    this.stopTheme = onTheme(() => this.plot?.redraw(false, true));
    root.addEventListener("keydown", (event) => this.walk(event));
    root.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }, true, true));
  }

  /** @param {Line[]} lines @param {Look} look */
  draw(lines, look) {
    this.lines = lines;
    this.look = look;
    const kinds = lines.map((line) => [line.label, line.colour, line.dashed]);
    const shape = JSON.stringify([kinds, look.isLog, look.isStacked, !look.mark]);
    const isWhole = look.isLog || look.isStacked || Boolean(look.isWhole);
    const within = lines.map((line) => (isWhole ? null : limits(line)));
    this.cut(within);
    const data = columns(lines, look, within);
    if (!this.plot || shape !== this.shape) this.build(data, shape);
    else this.plot.setData(data);
  }

  /** Set the limits of the axis, and list what is beyond them. @param {([number, number] | null)[]} within */
  cut(within) {
    this.outliers = [];
    this.limits = null;
    if (within.every((limit) => !limit)) return;
    const ends = this.lines.map((line, i) => within[i] ?? endsOf(line));
    const [low, high] = [Math.min(...ends.map(([least]) => least)), Math.max(...ends.map(([, most]) => most))];
    this.limits = [low, high];
    this.lines.forEach(({ step, low: lows, high: highs }, line) => step.forEach((x, i) => {
      const [least, most] = [lows[i], highs[i]];
      if (most !== null && most > high) this.outliers.push({ line, x, value: most, isHigh: true });
      if (least !== null && least < low) this.outliers.push({ line, x, value: least, isHigh: false });
    }));
  }

  /** @param {any[]} data @param {string} shape */
  build(data, shape) {
    this.plot?.destroy();
    this.shape = shape;
    const width = this.root.clientWidth || 300;
    this.plot = new window.uPlot(this.options(width), data, this.root);
  }

  /** @param {number} width */
  options(width) {
    const axis = { stroke: () => css("--dim"), font: FONT, ticks: { show: false } };
    const log = this.look.isLog;
    const filter = log ? { filter: (/** @type {any} */ _, splits) => splits.map(wholePower) } : {};
    const grid = { stroke: () => css("--grid"), width: 1, ...filter };
    const range = log ? {} : { range: (/** @type {any} */ _, low, high) => this.yRange(low, high) };
    return {
      width, height: this.height, padding: [8, 10, 0, 0], legend: { show: false },
      scales: {
        x: { time: false, range: () => this.look.range },
        y: { distr: log ? 3 : 1, ...range },
      },
      axes: [
        {
          ...axis, grid: { show: false }, size: 22, gap: 4, space: 60,
          values: (_, places) => places.map(this.look.mark ?? stepLabel),
        },
        {
          // Wide enough for what the other axis counts, whose name is below it.
          ...axis, grid, size: Math.max(46, 7 * (this.look.along ?? "").length + 8), gap: 4, space: 30,
          values: (_, values, _axis, _space, increment) =>
            values.map((value) => (value === null ? "" : this.tick(value, increment))),
        },
      ],
      cursor: {
        y: false, points: { size: 6, width: 0, show: !this.look.isStacked },
        drag: { x: true, y: false, setScale: false },
        sync: { key: this.sync, setSeries: false, scales: ["x", null] },
        bind: { dblclick: () => () => { this.zoomed(null); return null; } },
      },
      hooks: {
        setCursor: [(/** @type {any} */ plot) => this.pointed(plot.cursor.left >= 0 ? plot.cursor.idx ?? null : null)],
        setSelect: [(/** @type {any} */ plot) => this.selected(plot)],
        draw: [(/** @type {any} */ plot) => { this.drawUnit(plot); this.drawOutliers(plot); }],
      },
      series: [{}, ...(this.look.isStacked ? this.areas() : this.strokes())],
      bands: this.look.isStacked ? [] : this.lines.map((line, i) => ({
        series: [COLUMNS * i + 2, COLUMNS * i + 1], fill: () => faded(painted(line.colour), 0.14),
      })),
    };
  }

  /** A value beside the chart, with enough digits to tell it from the next.
   * @param {number} value @param {number} increment */
  tick(value, increment) {
    const isTold = increment >= 1 || Math.abs(value) < 1000 * increment;
    if (this.format !== number || this.look.isLog || isTold) return this.format(value);
    return value.toFixed(Math.min(8, Math.ceil(-Math.log10(increment)))).replace("-", "−");
  }

  areas() {
    return this.lines.map((line) => ({
      label: line.label, stroke: () => painted(line.colour), width: 1, points: { show: false },
      fill: () => faded(painted(line.colour), 0.75),
    }));
  }

  strokes() {
    const invisible = { points: { show: false }, stroke: "transparent", spanGaps: true, width: 0 };
    return this.lines.flatMap((line, i) => {
      const isSparse = () => this.lines[i].step.length <= FEW_POINTS;
      return [
        { ...invisible }, { ...invisible },
        { ...invisible, width: 1, stroke: () => faded(painted(line.colour), 0.28) },
        {
          label: line.label, spanGaps: true, width: 1.6, stroke: () => painted(line.colour),
          dash: line.dashed ? [5, 4] : undefined,
          points: { show: isSparse, size: 4.5, width: 0, fill: () => painted(line.colour) },
        },
      ];
    });
  }

  /** @param {number | null} low @param {number | null} high @returns {[number, number]} */
  yRange(low, high) {
    if (this.limits) [low, high] = this.limits;
    if (low === null || high === null) return [0, 1];
    if (low === high) return low === 0 ? [0, 1] : [low - 0.1 * Math.abs(low), low + 0.1 * Math.abs(low)];
    const least = ROUNDING * Math.max(Math.abs(low), Math.abs(high));
    if (high - low < least) return [low - least, high + least];
    const pad = 0.07 * (high - low);
    if (this.look.isStacked) return [0, high + pad];
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  /** Name what the horizontal axis counts, below the vertical one. @param {any} plot */
  drawUnit(plot) {
    if (!this.look.along) return;
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.fillStyle = css("--dim");
    ctx.font = FONT.replace("11px", `${11 * scale}px`);
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    ctx.fillText(this.look.along, 4 * scale, bbox.top + bbox.height + 4 * scale);
    ctx.restore();
  }

  /** Mark values beyond the axis by triangles at its end. @param {any} plot */
  drawOutliers(plot) {
    const { ctx, bbox } = plot;
    const size = MARK * devicePixelRatio;
    ctx.save();
    for (const { line, x, isHigh } of this.outliers) {
      const left = plot.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      const tip = isHigh ? bbox.top : bbox.top + bbox.height;
      const base = tip + (isHigh ? 1.6 : -1.6) * size;
      ctx.fillStyle = painted(this.lines[line].colour);
      ctx.beginPath();
      ctx.moveTo(left, tip);
      ctx.lineTo(left - size, base);
      ctx.lineTo(left + size, base);
      ctx.fill();
    }
    ctx.restore();
  }

  /** @param {any} plot */
  selected(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    const range = /** @type {[number, number]} */ ([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoomed(this.look.mark ? range : [Math.floor(range[0]), Math.ceil(range[1])]);
  }

  /** The arrow keys move the cursor. @param {KeyboardEvent} event */
  walk(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.plot?.data[0].length) return;
    event.preventDefault();
    const last = this.plot.data[0].length - 1;
    const from = this.plot.cursor.left >= 0 ? this.plot.cursor.idx ?? last : last - move;
    const to = Math.max(0, Math.min(last, from + move));
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][to], "x"), top: 10 }, true, true);
  }

  /** The newest value of a line up to the cursor, or its last value.
   * @param {number} line @param {number | null} index @returns {{step: number, value: number} | null} */
  at(line, index) {
    const { step, mean } = this.lines[line];
    const limit = index === null ? Infinity : this.plot?.data[0][index] ?? Infinity;
    for (let i = step.length - 1; i >= 0; i -= 1) {
      const value = mean[i];
      if (step[i] <= limit && value !== null) return { step: step[i], value };
    }
    return null;
  }

  resize() {
    const width = this.root.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  close() {
    this.observer.disconnect();
    this.stopTheme();
    this.plot?.destroy();
    this.plot = null;
  }
}

/** Values without those that are missing. @param {(number | null)[]} values @returns {number[]} */
const known = (values) => /** @type {number[]} */ (values.filter((value) => value !== null));

/** The least and the greatest value of a line. @param {Line} line @returns {[number, number]} */
function endsOf(line) {
  return [known(line.low).reduce((a, b) => Math.min(a, b), Infinity),
    known(line.high).reduce((a, b) => Math.max(a, b), -Infinity)];
}

/** @param {number} step */
function stepLabel(step) {
  if (!Number.isInteger(step)) return "";
  return step >= 10000 ? `${step / 1000}k` : String(step);
}

/** A value with a grid line on a logarithmic scale, or null. @param {number} value */
function wholePower(value) {
  const power = Math.log10(value);
  return Math.abs(power - Math.round(power)) < 1e-6 ? value : null;
}
