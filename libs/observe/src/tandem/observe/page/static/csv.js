// Saving files that are created in the browser: a table as CSV, or any text.

/** @param {string} name without the ending @param {(string | number)[][]} rows */
export function saveCsv(name, rows) {
  save(`${name}.csv`, "text/csv", `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`);
}

/** @param {string} name @param {string} type @param {string} text */
export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name.replace(/[^\w.+-]+/g, "_");
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
