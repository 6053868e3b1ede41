// Elements of the page. Text is added as text, never as markup.

export const $ = (id) => document.getElementById(id);

// Return a new element. Functions are listeners (`onclick`), true is an attribute without value, null is none.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(label, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, label);
}

// Read a text out to users of screen readers.
export function announce(text) {
  $("announcer").textContent = text;
}

// Copy a text; pages from other hosts without TLS have no `navigator.clipboard`.
export async function copyText(text, source) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    source.focus();
  }
  const label = source.textContent;
  source.textContent = "Copied";
  announce("Copied");
  setTimeout(() => { source.textContent = label; }, 1200);
}

export function copyButton(read, what) {
  const element = button("Copy", () => { if (element.textContent === "Copy") copyText(read(), element); },
    { class: "small", "aria-label": `Copy ${what}` });
  return element;
}

// Grow a text area with its text up to the limit of its style sheet.
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

export function randomId() {
  return [...crypto.getRandomValues(new Uint32Array(3))].map((part) => part.toString(36)).join("");
}
