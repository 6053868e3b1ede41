// The list and the panel beside the conversation: columns on a wide screen, drawers on a narrow one.

import { $ } from "./dom.js";

const DRAWER_WIDTHS = { list: matchMedia("(max-width: 56rem)"), panel: matchMedia("(max-width: 72rem)") };

export class Layout {
  // `onChange` is called after a side was opened or closed.
  constructor(onChange) {
    this.onChange = onChange;
    for (const [side, query] of Object.entries(DRAWER_WIDTHS)) {
      $(`toggle-${side}`).addEventListener("click", () => {
        const isOpen = this.isOpen(side);
        this.set(side, !isOpen);
        if (!isOpen && query.matches) $(side).querySelector("button, input, textarea").focus();
      });
      $(`close-${side}`).addEventListener("click", () => this.close(side));
      query.addEventListener("change", () => this.set(side, !query.matches));
      this.set(side, !query.matches);
    }
  }

  isOpen(side) {
    return !$(side).hidden;
  }

  set(side, isOpen) {
    if (isOpen && DRAWER_WIDTHS[side].matches) {
      const other = side === "list" ? "panel" : "list";
      if (DRAWER_WIDTHS[other].matches) this.set(other, false);
    }
    $(side).hidden = !isOpen;
    $(`toggle-${side}`).setAttribute("aria-expanded", String(isOpen));
    this.onChange();
  }

  close(side) {
    this.set(side, false);
    $(`toggle-${side}`).focus();
  }

  // Close the list after a choice on a narrow screen.
  closeDrawer(side) {
    if (DRAWER_WIDTHS[side].matches) this.set(side, false);
  }

  // Close the drawer that is open; return whether there was one.
  closeAny() {
    const side = Object.keys(DRAWER_WIDTHS).find((name) => this.isOpen(name) && DRAWER_WIDTHS[name].matches);
    if (side) this.close(side);
    return Boolean(side);
  }
}
