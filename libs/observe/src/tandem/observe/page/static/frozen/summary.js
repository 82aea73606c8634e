// Summary: the tables of a report, with a column for each of its runs.

import { get } from "../api.js";
import { el, empty, fill, panel } from "../dom.js";
import { heads } from "../scheduler.js";

/** @typedef {{title: string, note: string, rows: [string, string[]][]}} Table */

/** @param {HTMLElement} root @param {import("../app.js").Context} ctx */
export function mount(root, ctx) {
  const show = async () => {
    /** @type {Table[]} */
    const tables = await get("runs/0/tables");
    const names = ctx.runs().map((run) => run.name);
    fill(root, tables.map(({ title, note, rows }) => panel(title, note, !rows.length ? empty("None.")
      : el("div.scroll", null, el("table", { data: { table: title } }, heads("", ...names),
        el("tbody", null, rows.map(([what, values]) => el("tr", null, el("th", { scope: "row" }, what),
          values.map((value) => el("td", null, value))))))))));
  };
  void show();
  return { update: () => {} };
}
