// Pictures that a model was shown: a marker in a text stands for each. A thumbnail of it is loaded once it is in view.

import { pictureOf } from "./api.js";
import { el } from "./dom.js";

const MARKER = /⟦image ([0-9a-f]{64}) ([1-9]\d{0,5})x([1-9]\d{0,5})⟧/;
const SIDE = 96; // of a thumbnail, at most

/** @param {string} digest @param {string} width @param {string} height */
const label = (digest, width, height) => `[image ${width}×${height} ${digest.slice(0, 6)}]`;

/** A text with labels for its pictures. @param {string | null} text */
export const labelled = (text) => (text ?? "").replaceAll(new RegExp(MARKER, "g"),
  (_, digest, width, height) => label(digest, width, height));

/** The parts of a text: pictures, each with its label, and what `rest` makes of the text between them.
 * @param {number} run @param {string} text @param {(text: string) => (Node | string)[]} rest */
export function withPictures(run, text, rest) {
  /** @type {(Node | string)[]} */
  const parts = [];
  const pieces = text.split(MARKER); // text, digest, width, height, text, ...
  for (let i = 0; i < pieces.length; i += 4) {
    if (i) parts.push(figure(run, pieces[i - 3], pieces[i - 2], pieces[i - 1]));
    if (pieces[i]) parts.push(...rest(pieces[i]));
  }
  return parts;
}

/** The first pictures of a text. @param {number} run @param {string | null} text @param {number} most */
export function picturesIn(run, text, most) {
  const found = [...(text ?? "").matchAll(new RegExp(MARKER, "g"))].slice(0, most);
  return found.map(([, digest, width, height]) => thumbnail(run, digest, label(digest, width, height),
    Number(width), Number(height)));
}

/** Pictures of which only the names are known. @param {number} run @param {string[]} digests */
export const picturesNamed = (run, digests) => digests.map((digest) =>
  thumbnail(run, digest, `[image ${digest.slice(0, 6)}]`));

/** @param {number} run @param {string} digest @param {string} width @param {string} height */
function figure(run, digest, width, height) {
  const text = label(digest, width, height);
  return el("span.picture", { data: { digest } }, thumbnail(run, digest, text, Number(width), Number(height)),
    el("span.dim", null, text));
}

/** @param {number} run @param {string} digest @param {string} text @param {number} [width] @param {number} [height] */
function thumbnail(run, digest, text, width, height) {
  const src = pictureOf(run, digest);
  if (!src) return null;
  const scale = width && height ? Math.min(1, SIDE / Math.max(width, height)) : null;
  const size = (/** @type {number | undefined} */ side) =>
    (scale && side ? Math.max(1, Math.round(side * scale)) : null);
  const image = el("img", {
    src, loading: "lazy", decoding: "async", alt: text, title: text, width: size(width), height: size(height),
    onerror: () => image.remove(), // the label stays
  });
  return image;
}
