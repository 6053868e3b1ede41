// The prompt: text, files, Send and Stop. A prompt that was not answered comes back.

import { $, fitHeight } from "../dom.js";
import { Attachments } from "./attachments.js";

export class Composer {
  constructor(session, transcript, onError) {
    this.session = session;
    this.attachments = new Attachments(onError);
    const prompt = $("prompt");
    prompt.addEventListener("input", () => fitHeight(prompt));
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("request").requestSubmit();
      } else if (event.key === "ArrowUp" && !prompt.value) {
        event.preventDefault();
        transcript.editLast();
      }
    });
    $("request").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => session.stop());
    session.addEventListener("running", () => this.#showState());
    this.#showState();
  }

  async send() {
    const text = $("prompt").value.trim(), files = this.attachments.files;
    if ((!text && !files.length) || this.session.isBusy()) return;
    this.#set("", []);
    if (await this.session.send(text, files)) return;
    const typed = $("prompt").value;   // while the request was in progress
    this.#set(typed ? `${text}\n\n${typed}` : text, [...files, ...this.attachments.files]);
  }

  #set(text, files) {
    $("prompt").value = text;
    this.attachments.set(files);
    fitHeight($("prompt"));
  }

  #showState() {
    const isRunning = this.session.running !== null;
    const hadFocus = [$("send"), $("stop")].includes(document.activeElement);
    $("send").hidden = isRunning;
    $("stop").hidden = !isRunning;
    if (hadFocus) (isRunning ? $("stop") : $("send")).focus();
  }
}
