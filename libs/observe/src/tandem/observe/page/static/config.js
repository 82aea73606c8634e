// Configuration: all settings of the shown runs, or those that differ.

import { ofRun } from "./api.js";
import { el, empty, fill, panel, segmented } from "./dom.js";
import { refresher } from "./refresh.js";
import { heads } from "./scheduler.js";
import * as state from "./state.js";

/** @typedef {import("./app.js").Context} Context */

/** @param {HTMLElement} root @param {Context} ctx */
export function mount(root, ctx) {
  const table = el("div.scroll");
  const count = el("span");
  /** @type {[import("./app.js").Run, Map<string, string>][]} */
  let found = [];
  const only = segmented("Settings", [["all", "All"], ["differing", "Differing"]], state.value("settings", "all"),
    (chosen) => { state.set({ settings: chosen === "all" ? null : chosen }); draw(); });
  const search = /** @type {HTMLInputElement} */ (el("input", {
    type: "search", placeholder: "Find a setting…", "aria-label": "Find a setting", value: state.value("find"),
    oninput: () => { state.set({ find: search.value.trim() || null }); draw(); },
  }));
  fill(root, el("div.toolbar", null, search, only), panel("Configuration", count, table));

  const draw = () => {
    const keys = [...new Set(found.flatMap(([, settings]) => [...settings.keys()]))].sort();
    const differs = new Set(keys.filter((key) => new Set(found.map(([, settings]) => settings.get(key))).size > 1));
    const words = state.value("find").toLowerCase();
    const isWanted = (/** @type {string} */ key) => (state.value("settings") !== "differing" || differs.has(key))
      && (!words || `${key} ${found.map(([, of]) => of.get(key)).join(" ")}`.toLowerCase().includes(words));
    const wanted = keys.filter(isWanted);
    fill(count, found.length > 1 ? `${differs.size} of ${keys.length} differ` : `${keys.length} settings`);
    if (!wanted.length) {
      fill(table, empty("No such setting.", found.length > 1 ? undefined : "Open several runs to compare them."));
      return;
    }
    fill(table, el("table", { data: { table: "config" } },
      heads("setting", ...found.map(([run]) => run.name)),
      el("tbody", null, wanted.map((key) => el("tr", { data: { key, differs: String(differs.has(key)) } },
        el("td.mono", null, differs.has(key) ? el("b", null, key) : key),
        found.map(([, settings]) => el("td.mono", null, settings.get(key) ?? "–")))))));
  };

  const refresh = refresher(async () => {
    const runs = ctx.shown();
    found = await Promise.all(runs.map(async (run) => {
      /** @type {Map<string, string>} */
      const settings = new Map();
      flatten(await ofRun(run.index, "config"), "", settings);
      return /** @type {[import("./app.js").Run, Map<string, string>]} */ ([run, settings]);
    }));
    draw();
  }, (error) => fill(table, empty(error.message)), 1500);
  refresh();
  // A resumed run may have other settings.
  return { update: (/** @type {import("./app.js").Change} */ change) => { if (change.events) refresh(); } };
}

/** Write nested settings as key paths. @param {any} value @param {string} path @param {Map<string, string>} into */
function flatten(value, path, into) {
  if (value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    for (const [key, of] of Object.entries(value)) flatten(of, path ? `${path}.${key}` : key, into);
  } else {
    into.set(path, typeof value === "string" ? value : JSON.stringify(value));
  }
}
