// Text files beside the prompt: chosen, dropped or pasted.

import { $, button, make } from "../dom.js";

const MAX_FILE_BYTES = 1 << 20;

export class Attachments {
  files = [];   // {name, text}

  // `onError` shows why a file was not taken.
  constructor(onError) {
    this.onError = onError;
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => {
      this.add($("files").files);
      $("files").value = "";   // the same file may be chosen again
    });
    const chat = $("chat");
    chat.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      chat.classList.add("dropping");
    });
    chat.addEventListener("dragleave", () => chat.classList.remove("dropping"));
    chat.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      chat.classList.remove("dropping");
      this.add(event.dataTransfer.files);
    });
    $("prompt").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  async add(files) {
    for (const file of [...files]) {   // the list of an input changes
      try {
        this.files.push({ name: file.name, text: await readText(file) });
      } catch (error) { this.onError(error); }
    }
    this.#show();
  }

  set(files) {
    this.files = [...files];
    this.#show();
  }

  #show() {
    $("attachments").replaceChildren(...this.files.map((file, i) => make("li", {},
      `${file.name} (${size(file.text)}) `,
      button("×", () => {
        this.set(this.files.filter((_, other) => other !== i));
        $("attach").focus();
      }, { "aria-label": `Remove ${file.name}` }))));
  }
}

async function readText(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is larger than 1 MiB.`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new Error();
    return text;
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8.`);
  }
}

export function size(text) {
  const lines = text.split("\n").length;
  return `${lines} ${lines === 1 ? "line" : "lines"}`;
}
