// Markdown of a model as elements: highlighted code with copy buttons, no images, no markup of its own.

import { copyButton, make } from "../dom.js";
import hljs from "../vendor/highlight.min.js";
import { Marked } from "../vendor/marked.esm.js";
import "../vendor/purify.min.js";

const MAX_HIGHLIGHTED_CHARACTERS = 50_000;
const TAGS = ["p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "input",
  "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"];
const ALLOWED = {
  ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i, ADD_URI_SAFE_ATTR: ["start", "align", "type"],
  RETURN_DOM_FRAGMENT: true,
};

const marked = new Marked({ gfm: true });
marked.use({ renderer: {
  html: ({ text }) => escaped(text),   // shown as it was written
  image: ({ text, href }) => escaped(`[image: ${text || href}]`),   // loading it would send a request
} });

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
}

// Return the elements of a Markdown text.
export function renderMarkdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroller = make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    code.parentElement.replaceWith(codeBlock(code.textContent, language));
  }
  return fragment;
}

// Return a block of code with its language and a copy button.
export function codeBlock(text, language) {
  const code = make("code", {}, text);
  if (hljs.getLanguage(language) && text.length <= MAX_HIGHLIGHTED_CHARACTERS) {
    code.className = `language-${language}`;
    hljs.highlightElement(code);
  }
  const bar = make("div", { class: "bar" }, make("span", {}, language || "text"), copyButton(() => text, "the code"));
  const label = language ? `Code, ${language}` : "Code";
  return make("div", { class: "code" }, bar, make("pre", { tabindex: "0", role: "region", "aria-label": label }, code));
}
