// The difference of two texts, word by word.

/** @typedef {{text: string, kind: "same" | "gone" | "new"}} Part */

const MOST_CELLS = 4e6; // in the table; longer texts are compared by lines, and the longest as a whole

/**
 * Compare two texts: the parts that both have, that were removed, and that are new.
 * @param {string} before @param {string} after @returns {Part[]}
 */
export function diffWords(before, after) {
  const parts = [/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu, /[^\n]*\n|[^\n]+/g].map((pattern) =>
    [before.match(pattern) ?? [], after.match(pattern) ?? []]);
  const [a, b] = parts.find(([x, y]) => x.length * y.length <= MOST_CELLS) ?? [[before], [after]];
  return merged(compare(a, b));
}

/** Compare by the longest common subsequence, after removing a common beginning and end.
 * @param {string[]} a @param {string[]} b @returns {Part[]} */
function compare(a, b) {
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  const most = Math.min(a.length, b.length) - head;
  while (tail < most && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const same = (/** @type {string} */ text) => /** @type {Part} */ ({ text, kind: "same" });
  return [
    ...a.slice(0, head).map(same),
    ...between(a.slice(head, a.length - tail), b.slice(head, b.length - tail)),
    ...a.slice(a.length - tail).map(same),
  ];
}

/** @param {string[]} a @param {string[]} b @returns {Part[]} */
function between(a, b) {
  const width = b.length + 1;
  const longest = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  /** @type {Part[]} */
  const found = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { found.push({ text: a[i], kind: "same" }); i += 1; j += 1; }
    else if (j === b.length || (i < a.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) {
      found.push({ text: a[i], kind: "gone" }); i += 1;
    } else { found.push({ text: b[j], kind: "new" }); j += 1; }
  }
  return found;
}

/** @param {Part[]} parts neighbours of one kind become one */
function merged(parts) {
  /** @type {Part[]} */
  const found = [];
  for (const part of parts) {
    const last = found[found.length - 1];
    if (last?.kind === part.kind) last.text += part.text;
    else found.push({ ...part });
  }
  return found;
}
