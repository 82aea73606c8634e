// Elements of the page. All text from users and models goes through here and stays text: nothing is parsed as HTML.

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Make an element.
 * @param {string} tag name, with classes after dots: "span.chip.warn"
 * @param {Record<string, any> | null} [attributes] properties that begin with "on" are listeners, `style` a mapping
 *   (of custom properties too), `data` a mapping for data-...; null and false leave an attribute out
 * @param {...(Child | Child[])} children text for strings
 * @returns {HTMLElement}
 */
export function el(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes ?? {})) setAttribute(element, key, value);
  element.append(.../** @type {(Node | string)[]} */ (children.flat().filter(isShown).map(asNode)));
  return element;
}

/** @param {HTMLElement} element @param {string} key @param {any} value */
function setAttribute(element, key, value) {
  if (value === null || value === undefined || value === false) return;
  if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
  else if (key === "style") for (const [name, of] of Object.entries(value)) element.style.setProperty(name, String(of));
  else if (key === "data") Object.assign(element.dataset, value);
  else if (key === "value") /** @type {HTMLInputElement} */ (element).value = value;
  else element.setAttribute(key, value === true ? "" : String(value));
}

/** @param {Child} child */
const isShown = (child) => child !== null && child !== undefined && child !== false;
/** @param {Child} child */
const asNode = (child) => (child instanceof Node ? child : String(child));

/**
 * Replace an element's children. Keyboard focus moves to the replacement of the focused child.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const before = focused && focused !== element && element.contains(focused) ? focused : null;
  element.replaceChildren(.../** @type {(Node | string)[]} */ (children.flat().filter(isShown).map(asNode)));
  if (!before || before.isConnected) return;
  const same = [...element.querySelectorAll(before.tagName)].find((other) => nameOf(other) === nameOf(before));
  /** @type {HTMLElement | undefined} */ (same)?.focus({ preventScroll: true });
}

/** The identity of an element among its neighbours. @param {Element} element */
const nameOf = (element) => /** @type {HTMLElement} */ (element).dataset.place ?? element.getAttribute("aria-label")
  ?? element.textContent;

/**
 * Change an element's text, if it differs.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * A choice among a few, as a row of buttons of which one is pressed.
 * @param {string} label
 * @param {[string, string][]} options value and label
 * @param {string} value
 * @param {(value: string) => void} chosen
 */
export function segmented(label, options, value, chosen) {
  const group = el("div.segmented", { role: "group", "aria-label": label });
  for (const [key, text] of options) {
    group.append(
      el("button", {
        type: "button", "aria-pressed": String(key === value), data: { value: key },
        onclick: () => { mark(group, key); chosen(key); },
      }, text),
    );
  }
  return group;
}

/** @param {Element} group @param {string} value */
export function mark(group, value) {
  for (const button of group.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.value === value));
  }
}

/**
 * A drop-down.
 * @param {string} label
 * @param {[string, string][]} options
 * @param {string} value
 * @param {(value: string) => void} chosen
 */
export function select(label, options, value, chosen) {
  const element = /** @type {HTMLSelectElement} */ (el("select", { "aria-label": label },
    options.map(([key, text]) => el("option", { value: key }, text))));
  element.value = value;
  element.addEventListener("change", () => chosen(element.value));
  return element;
}

/** A panel of a view: a heading, elements beside it, and the content.
 * @param {string} title @param {Child | Child[]} beside @param {...(Child | Child[])} children */
export function panel(title, beside, ...children) {
  return el("section.panel", { "aria-label": title },
    el("div.panel-head", null, el("h2", null, title), el("div.beside", null, beside)), ...children);
}

/** @param {string} text @param {string} [more] */
export function empty(text, more) {
  return el("div.empty", null, el("p", null, text), more ? el("p.dim", null, more) : null);
}

const tip = () => /** @type {HTMLElement} */ (document.getElementById("tip"));

/** Show a tooltip.
 * @param {{clientX: number, clientY: number}} at @param {...(Child | Child[])} children */
export function showTip(at, ...children) {
  const element = tip();
  fill(element, ...children);
  element.hidden = false;
  const { width, height } = element.getBoundingClientRect();
  const x = Math.min(at.clientX + 14, innerWidth - width - 8);
  const y = at.clientY + 18 + height > innerHeight ? at.clientY - height - 12 : at.clientY + 18;
  element.style.transform = `translate(${Math.max(8, x)}px, ${Math.max(8, y)}px)`;
}

export function hideTip() {
  tip().hidden = true;
}
