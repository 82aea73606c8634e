// Work that is requested often, and done when it is due.

import { ApiError } from "./api.js";

const SHORTEST_PAUSE_MS = 400;

/**
 * Return a function that starts the work soon: never twice at the same time, and once more if it was requested again
 * meanwhile. `failed` shows errors; the header shows if the server is unreachable.
 * @param {() => Promise<void>} work
 * @param {(error: Error) => void} [failed]
 * @param {number} [pause_ms] between two
 * @returns {() => void}
 */
export function refresher(work, failed = () => {}, pause_ms = SHORTEST_PAUSE_MS) {
  let isRunning = false;
  let isWanted = false;
  const run = async () => {
    isRunning = true;
    while (isWanted) {
      isWanted = false;
      try {
        await work();
      } catch (error) {
        if (error instanceof ApiError) failed(error);
        else if (!(error instanceof TypeError) && /** @type {Error} */ (error).name !== "AbortError") throw error;
      }
      if (!isWanted) await new Promise((resolve) => setTimeout(resolve, pause_ms));
    }
    isRunning = false;
  };
  return () => {
    isWanted = true;
    if (!isRunning) void run();
  };
}
