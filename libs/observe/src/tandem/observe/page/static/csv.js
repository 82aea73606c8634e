// Saving a table as a CSV file, created in the browser.

/** @param {string} name without the ending @param {(string | number)[][]} rows */
export function saveCsv(name, rows) {
  const text = rows.map((row) => row.map(cell).join(",")).join("\r\n");
  const url = URL.createObjectURL(new Blob([`${text}\r\n`], { type: "text/csv" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${name.replace(/[^\w.+-]+/g, "_")}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 0);
}

/** Write a cell: numbers with all digits, texts quoted if necessary, and never as a formula.
 * @param {string | number} value */
function cell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
