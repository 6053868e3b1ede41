// Tabs of the panel, with arrow keys as in the ARIA pattern for tabs.

import { $ } from "../dom.js";

const TABS = ["settings", "output", "server"];

export class Tabs {
  // `onSelect` receives the name of the tab that is shown.
  constructor(onSelect) {
    this.onSelect = onSelect;
    for (const name of TABS) {
      $(`tab-${name}`).addEventListener("click", () => this.select(name));
      $(`tab-${name}`).addEventListener("keydown", (event) => this.#move(name, event));
    }
  }

  select(name) {
    this.selected = name;
    for (const other of TABS) {
      const isSelected = other === name;
      $(`tab-${other}`).setAttribute("aria-selected", String(isSelected));
      $(`tab-${other}`).tabIndex = isSelected ? 0 : -1;
      $(`panel-${other}`).hidden = !isSelected;
    }
    this.onSelect(name);
  }

  #move(name, event) {
    const at = TABS.indexOf(name), last = TABS.length - 1;
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const wanted = TABS[(next + TABS.length) % TABS.length];
    this.select(wanted);
    $(`tab-${wanted}`).focus();
  }
}
