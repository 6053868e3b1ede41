// Theme: light, dark, or that of the system.

import { $ } from "./dom.js";

const THEMES = ["auto", "light", "dark"];
const systemTheme = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("theme") ?? "auto";

function apply() {
  document.documentElement.dataset.theme = theme === "auto" ? (systemTheme.matches ? "dark" : "light") : theme;
  $("theme").textContent = `Theme: ${theme}`;
}

export function startTheme() {
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("theme", theme);
    apply();
  });
  systemTheme.addEventListener("change", apply);
  apply();
}
