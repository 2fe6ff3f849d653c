// Small changes to the document: only what differs is touched, and what is kept by a key stays the same element.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; text children are texts, never markup. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The same for SVG. */
export function makeSvg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Sets a text if it is another one. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets an attribute if it differs; null removes it. */
export function setAttribute(node, name, value) {
  if (value === null) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, String(value));
  }
}

/** Adds or removes a class. */
export function setClass(node, name, on) {
  if (node.classList.contains(name) !== on) node.classList.toggle(name, on);
}

/** How full a bar is, 0 to 1. */
export function setFill(node, ratio) {
  const value = Number.isFinite(ratio) ? Math.min(1, Math.max(0, ratio)) : 0;
  const wanted = `scaleX(${value.toFixed(3)})`;
  if (node.style.transform !== wanted) node.style.transform = wanted;
}

/** Hides or shows. */
export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/**
 * Makes the children of a parent those of a list: one element per key, made once, updated, moved, removed.
 *
 * @param {Element} parent holds nothing else
 * @param {Array} items
 * @param {(item, index: number) => string} keyOf
 * @param {(item, index: number) => Element} build
 * @param {(node: Element, item, index: number) => void} update
 */
export function reconcile(parent, items, keyOf, build, update = () => {}) {
  const known = (parent.keyed ??= new Map());
  const keys = items.map(keyOf);
  const wanted = new Set(keys);
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      known.delete(key);
      node.remove();
    }
  }
  let at = parent.firstElementChild;
  items.forEach((item, index) => {
    let node = known.get(keys[index]);
    if (node === undefined) {
      node = build(item, index);
      known.set(keys[index], node);
    }
    update(node, item, index);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  });
}
