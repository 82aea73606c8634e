// Saving curves as a CSV file from the data within the file: the means of their buckets of steps.

import { ofRun } from "../api.js";
import { save } from "../save.js";

/** @param {string} name of the file, without the ending
 * @param {{run: number, name: string, label: string}[]} columns
 * @param {Record<string, any>} query the range of steps, and the axis */
export async function saveCsv(name, columns, query) {
  const found = await Promise.all(columns.map((column) => ofRun(column.run, "series", { ...query, names: column.name }),
  ));
  const values = columns.map((column, i) => {
    const { step, x, mean } = found[i][column.name];
    return new Map((x ?? step).map((/** @type {number} */ place, /** @type {number} */ at) => [place, mean[at]]));
  });
  const places = [...new Set(values.flatMap((of) => [...of.keys()]))].sort((a, b) => a - b);
  const axis = { tokens: "tokens", time: "seconds" }[/** @type {string} */ (query.along)] ?? "step";
  const rows = [[axis, ...columns.map((column) => column.label)],
    ...places.map((place) => [place, ...values.map((of) => of.get(place) ?? "")])];
  save(`${name}.csv`, "text/csv", `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`);
}

/** Write a cell: numbers with all digits, texts quoted if necessary, and never as a formula.
 * @param {string | number} value */
function cell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
