// The samples within the file: some of the newest step and of the newest validation, where a model saw pictures.

const KEYS = /** @type {Record<string, (row: any) => number>} */ ({
  reward: (row) => row.reward, advantage: (row) => row.advantage ?? NaN, length: (row) => row.response_length,
});

/** The samples that a query chooses, in its order. @param {any} samples by purpose @param {Record<string, any>} query */
export function chosen(samples, query) {
  const purpose = query.purpose ?? "train";
  const all = /** @type {any[]} */ (samples?.[purpose] ?? []);
  const steps = Object.fromEntries(Object.entries(samples ?? {}).filter(([, rows]) => rows.length)
    .map(([name, rows]) => [name, [rows[0].step, rows[0].step]]));
  const step = query.step ?? all[0]?.step ?? null;
  const [text, low, high] = [String(query.contains ?? "").toLowerCase(), query.min_reward ?? -Infinity,
    query.max_reward ?? Infinity];
  const rows = all.filter((row) => row.step === step && row.reward >= low && row.reward <= high
    && ((query.group ?? null) === null || row.group === query.group)
    && [row.prompt, row.question, row.response, row.reference_answer, row.problem_id]
      .some((each) => String(each ?? "").toLowerCase().includes(text)));
  const key = KEYS[query.sort];
  const sign = query.descending === "1" ? -1 : 1;
  if (key) rows.sort((a, b) => sign * (key(a) - key(b)) || 0);
  return { step, total: rows.length, steps, rows: rows.slice(query.offset ?? 0) };
}

/** One sample. @param {any} samples @param {string} place "samples/3/0/1" @param {string} [purpose] */
export function one(samples, place, purpose = "train") {
  const [step, group, sample] = place.split("/").slice(1).map(Number);
  return (samples?.[purpose] ?? []).find((/** @type {any} */ row) => row.step === step && row.group === group
    && row.sample === sample);
}

/** All samples of a problem. @param {any} samples @param {string} path "problems/NAME/samples" */
export function ofProblem(samples, path) {
  const name = decodeURIComponent(path.slice("problems/".length, -"/samples".length));
  return Object.values(samples ?? {}).flat().filter((/** @type {any} */ row) => row.problem_id === name);
}
