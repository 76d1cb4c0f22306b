// Elements without HTML: every text is a text node, so nothing that a model or a person wrote can become markup.

/** An element with properties (names with a dash, and ``role``, as attributes) and children, nodes or texts. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "role" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** The element with an id. */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`no element #${id}`);
  return element;
}

/** Show a message in an element that is hidden while there is none. */
export function tell(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

/** Have a screen reader say something. */
export function announce(text) {
  byId("announce").textContent = text;
}
