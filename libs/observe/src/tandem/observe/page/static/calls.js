// Calls: what clients ask of a run that they drive, by model and one by one.

import { ofRun } from "./api.js";
import { el, empty, fill, panel } from "./dom.js";
import { clock, day, duration, whole } from "./format.js";
import { refresher } from "./refresh.js";
import { heads } from "./scheduler.js";

/** @typedef {import("./app.js").Context} Context */

const LIMIT = 200;

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  const models = el("div.scroll");
  const newest = el("div.scroll.tall");
  const count = el("span");
  fill(root, panel("Models and sampling sessions", null, models), panel("Calls", count, newest));
  const refresh = refresher(async () => {
    const found = await ofRun(ctx.run().index, "calls", { limit: LIMIT });
    if (!found.newest.length) {
      fill(models, empty("No call has ended yet.", "Clients call runs that `coordinator tinker` serves."));
      fill(newest);
      return;
    }
    fill(count, `the newest ${found.newest.length}, newest first`);
    fill(models, el("table", { data: { table: "models" } },
      heads("model", "key", ">calls", ">sequences", ">tokens", ">seconds", ">failed", "last"),
      el("tbody", null, found.by_model.map(summary))));
    fill(newest, el("table", { data: { table: "calls" } },
      heads("ended", "call", "model", "key", ">sequences", ">tokens", ">seconds", "outcome"),
      el("tbody", null, found.newest.map(row))));
  }, (error) => fill(models, empty(error.message)), 1500);
  refresh();
  return { update: refresh };
}

/** @param {any} of */
function summary(of) {
  return el("tr", null, el("td.mono", null, of.model), el("td", null, of.key), el("td.num", null, whole(of.num_calls)),
    el("td.num", null, whole(of.num_sequences)), el("td.num", null, whole(of.num_tokens)),
    el("td.num", null, duration(of.seconds)),
    el("td.num", null, of.num_failed ? el("span.tag.bad", null, whole(of.num_failed)) : "0"),
    el("td", { title: day(of.ended_at) }, clock(of.ended_at)));
}

/** @param {any} call */
function row(call) {
  return el("tr", null, el("td", { title: day(call.ended_at) }, clock(call.ended_at)), el("td", null, call.kind),
    el("td.mono", null, call.model), el("td", null, call.key), el("td.num", null, whole(call.num_sequences)),
    el("td.num", null, whole(call.num_tokens)), el("td.num", null, duration(call.seconds)),
    el("td", null, call.outcome === "done" ? "done" : el("span.tag.bad", null, call.outcome)));
}
