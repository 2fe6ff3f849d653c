// Light, dark or as the system says. A plain script in the head, so that the first paint has the right colours.
"use strict";
(() => {
  const KEY = "keystage-theme";
  const CHOICES = ["system", "light", "dark"];

  const kept = () => {
    try {
      const value = localStorage.getItem(KEY);
      return CHOICES.includes(value) ? value : "system";
    } catch {
      return "system"; // storage may be switched off
    }
  };

  const apply = (choice) => {
    const root = document.documentElement;
    if (choice === "system") delete root.dataset.theme;
    else root.dataset.theme = choice;
  };

  const mark = (choice) => {
    for (const button of document.querySelectorAll("[data-theme-choice]")) {
      button.setAttribute("aria-pressed", String(button.dataset.themeChoice === choice));
    }
  };

  apply(kept());
  document.addEventListener("DOMContentLoaded", () => {
    mark(kept());
    for (const button of document.querySelectorAll("[data-theme-choice]")) {
      button.addEventListener("click", () => {
        const choice = button.dataset.themeChoice;
        try {
          localStorage.setItem(KEY, choice);
        } catch {
          // it holds for this visit
        }
        apply(choice);
        mark(choice);
        document.dispatchEvent(new CustomEvent("themechange"));
      });
    }
  });
})();
