// Refits: how fast each version of the weights reached the engines, and its verification.

import { ofRun } from "./api.js";
import { Chart } from "./chart.js";
import { el, empty, fill, panel } from "./dom.js";
import { bytes, duration, percent, whole } from "./format.js";
import { refresher } from "./refresh.js";
import { heads } from "./scheduler.js";

/** @typedef {import("./app.js").Context} Context */

const LIMIT = 200;
/** @type {[string, string, number][]} */
const DRAWN = [["transfer", "transfer", 0], ["copy", "of which copy", 5], ["verify", "verification", 4],
  ["commit", "commit", 1]];

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  const plot = el("div.plot", { role: "img", "aria-label": "Seconds of each refit" });
  const legend = el("div.legend");
  const table = el("div.scroll.tall");
  const count = el("span");
  const chart = new Chart(plot, { sync: "versions", format: duration });
  const seconds = panel("Seconds by version", null, plot, legend);
  fill(root, seconds, panel("Refits", count, table));
  /** @type {Set<number>} */
  const opened = new Set();
  /** @type {any[]} */
  let refits = [];

  const draw = () => {
    seconds.hidden = !refits.length;
    if (!refits.length) { fill(table, empty("No refit yet.", "An algorithm over a data set needs none.")); return; }
    fill(count, `the newest ${refits.length}${refits.length === LIMIT ? ", newest first" : ""}`);
    fill(table, el("table", { data: { table: "refits" } },
      heads(">version", "engines", ">bytes", ">copy", ">transfer", ">verification", ">predicted", ">share of bound",
        "digest", ""),
      el("tbody", null, [...refits].reverse().flatMap((refit) => rows(refit, opened.has(refit.version), () => {
        if (!opened.delete(refit.version)) opened.add(refit.version);
        draw();
      })))));
    const step = refits.map((refit) => refit.version);
    const lines = DRAWN.map(([key, label, own]) => {
      const mean = refits.map((refit) => refit.seconds[key] ?? null);
      return { label, colour: own, dashed: key === "copy", step, mean, low: mean, high: mean };
    });
    chart.draw(lines, { smoothing: 0, isLog: true, isStacked: false, along: "version",
      range: [step[0], Math.max(step[0] + 1, step[step.length - 1])] });
    fill(legend, DRAWN.map(([key, label, own]) => el("span.key", null,
      el(key === "copy" ? "i.swatch.dashed" : "i.swatch", { style: { "--c": `var(--c${own})` } }), label,
      el("b", null, duration(refits[refits.length - 1].seconds[key])))));
  };

  const refresh = refresher(async () => {
    const found = await ofRun(ctx.run().index, "refits", { limit: LIMIT });
    refits = [...found].sort((a, b) => a.version - b.version);
    draw();
  }, (error) => fill(table, empty(error.message)), 1500);
  refresh();
  return { update: (/** @type {import("./app.js").Change} */ change) => { if (change.steps) refresh(); },
    close: () => chart.close() };
}

/** @param {any} refit @param {boolean} isOpen @param {() => void} toggle */
function rows(refit, isOpen, toggle) {
  const links = Object.entries(refit.num_bytes);
  const total = links.reduce((sum, [, count]) => sum + Number(count), 0);
  const troubles = Object.entries(refit.quarantined ?? {});
  const row = el("tr", { data: { version: String(refit.version) } },
    el("td.num", null, el("b", null, whole(refit.version))),
    el("td", null, refit.engines.length > 3 ? `${refit.engines.length} engines` : refit.engines.join(", ")),
    el("td.num", null, el("button.small.link", {
      type: "button", "aria-expanded": String(isOpen), title: "Bytes by link",
      data: { place: String(refit.version) }, disabled: links.length === 0, onclick: toggle,
    }, refit.aliased ? "none" : bytes(total), links.length ? (isOpen ? " ▾" : " ▸") : "")),
    el("td.num", null, duration(refit.seconds.copy)), el("td.num", null, duration(refit.seconds.transfer)),
    el("td.num", null, duration(refit.seconds.verify)), el("td.num", null, duration(refit.predicted_s)),
    el("td.num.meter", { style: { "--share": Math.min(1, refit.share_of_bound) },
      title: `bound ${duration(refit.bound_s)}` },
      refit.aliased ? "–" : percent(refit.share_of_bound)),
    el("td.mono", { title: refit.digest }, refit.digest ? `${String(refit.digest).slice(0, 10)}…` : "not verified"),
    el("td", null,
      refit.aliased ? el("span.tag", { title: "Engines read the trainer's own memory: nothing is copied" },
      "aliased") : null,
      refit.verify && refit.verify !== "full" ? el("span.tag", null, `verified: ${refit.verify}`) : null,
      troubles.length ? el("span.tag.bad", { title: troubles.map(([name, why]) => `${name}: ${why}`).join("\n") },
        `${troubles.length} quarantined`) : null));
  if (!isOpen) return [row];
  return [row, el("tr.more", null, el("td", { colspan: 10 }, links.map(([link, count]) =>
    el("span.link-bytes", null, el("span.mono", null, link.replace(">", " → ")), " ",
      el("b", null, bytes(Number(count)))))))];
}
