// Work that is asked for often and done when it is worth it.

import { ApiError } from "./api.js";

const SHORTEST_PAUSE_MS = 400;

/**
 * Return a function that has the work done soon: never twice at the same time, and once more if it was asked for again
 * meanwhile. What fails is shown by `failed`; a server that is not there shows in the header.
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
