// Requests to the server, and its event stream.

/** An error of the server, in one line. */
export class ApiError extends Error {}

/** The panels that there are: all, where a server answers. @template Panels @param {Panels} all @returns {Panels} */
export const panels = (all) => all;

/**
 * Get JSON.
 * @param {string} path under "api/"
 * @param {Record<string, any>} [query] null and empty values are left out
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(path, query = {}, signal) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") words.set(key, String(value));
  }
  const url = `api/${path}${words.size ? `?${words}` : ""}`;
  const response = await fetch(url, { signal, headers: { accept: "application/json" } });
  const content = await response.json().catch(() => null);
  if (!response.ok) throw new ApiError(content?.error ?? `the server answered ${response.status} to ${url}`);
  return content;
}

/** @param {number} run @param {string} path @param {Record<string, any>} [query] @param {AbortSignal} [signal] */
export const ofRun = (run, path, query, signal) => get(`runs/${run}/${path}`, query, signal);

/** Where a thumbnail of a run's image is. @param {number} run @param {string} digest @returns {string | null} */
export const pictureOf = (run, digest) => `api/runs/${run}/images/${digest}`;

const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 15;

/**
 * Listen to changes while the page is open. A lost connection is made again, after increasing waits.
 * @param {(change: any) => void} changed extent of a run's record: `last_step`, `last_event`, `live_at` and `state`
 * @param {(isConnected: boolean, retryInS: number) => void} connected
 */
export function listen(changed, connected) {
  let wait_s = FIRST_WAIT_S;
  /** @type {number | undefined} */
  let timer;
  const connect = () => {
    clearTimeout(timer);
    const source = new EventSource("api/stream");
    source.onopen = () => { wait_s = FIRST_WAIT_S; connected(true, 0); };
    source.onmessage = (message) => changed(JSON.parse(message.data));
    source.onerror = () => {
      source.close();
      connected(false, wait_s);
      timer = setTimeout(connect, wait_s * 1000);
      wait_s = Math.min(LONGEST_WAIT_S, wait_s * 2);
    };
    addEventListener("pagehide", () => source.close(), { once: true });
  };
  addEventListener("online", () => { wait_s = FIRST_WAIT_S; });
  connect();
}
