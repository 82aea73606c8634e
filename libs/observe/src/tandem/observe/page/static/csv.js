// Saving all values of curves as a CSV file, which the server writes.

/** @param {string} name of the file, without the ending
 * @param {{run: number, name: string, label: string}[]} columns
 * @param {Record<string, any>} query null values are left out */
export function saveCsv(name, columns, query) {
  const words = new URLSearchParams();
  for (const column of columns) {
    words.append("run", String(column.run));
    words.append("name", column.name);
    words.append("label", column.label);
  }
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined) words.set(key, String(value));
  }
  const link = document.createElement("a");
  link.href = `api/csv?${words}`;
  link.download = `${name.replace(/[^\w.+-]+/g, "_")}.csv`;
  link.click();
}
