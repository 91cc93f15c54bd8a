// Tooltips of charts: the words of an element's <title>, beside the pointer. Without this script browsers show them
// as plain titles, a moment later.
"use strict";

document.documentElement.classList.add("js");

const tooltip = document.createElement("div");
tooltip.id = "tooltip";
tooltip.hidden = true;
tooltip.setAttribute("role", "tooltip");
document.body.append(tooltip);

function showTooltip(words, x, y) {
  tooltip.textContent = words;
  tooltip.hidden = false;
  const room = tooltip.getBoundingClientRect();
  const right = document.documentElement.clientWidth;
  const left = x + 14 + room.width > right ? x - 14 - room.width : x + 14;
  const above = y - 12 - room.height;
  tooltip.style.left = `${Math.max(4, Math.min(left, right - room.width - 4))}px`;
  tooltip.style.top = `${above < 4 ? y + 18 : above}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

// A title would be shown a second time, so it moves into an attribute.
for (const title of document.querySelectorAll(".chart g > title")) {
  title.parentNode.dataset.words = title.textContent;
  title.remove();
}

function onPoint(event) {
  const target = event.target.closest ? event.target : document.body;
  const found = target.closest("[data-words]");
  if (found) showTooltip(found.dataset.words, event.clientX, event.clientY);
  else if (!target.closest(".t")) hideTooltip();
}

document.addEventListener("pointermove", onPoint);
document.addEventListener("pointerdown", onPoint);
document.addEventListener("scroll", hideTooltip, { passive: true });

// A page of a run that goes on loads itself again, and then is where it was: scrolled, with what was open and chosen.
const live = document.querySelector('meta[name="refresh-seconds"]');
const stateName = `jaxft ${location.pathname}`;
const keepers = {};
let before = {};
try {
  before = JSON.parse(sessionStorage.getItem(stateName)) ?? {};
  sessionStorage.removeItem(stateName);
} catch {
  // Some browsers keep nothing for files.
}

// A part of the page with a state of its own; `otherwise` runs where there is none to restore.
async function keepState(name, { save, restore, otherwise }) {
  keepers[name] = save;
  await (before[name] ? restore(before[name]) : otherwise?.());
  if (before.scroll !== undefined) scrollTo(0, before.scroll);
}

const folds = () => [...document.querySelectorAll("main details:not(.episode, .episode details)")];
keepState("folds", {
  save: () => folds().map((each) => each.open),
  restore: (state) => folds().forEach((each, order) => (each.open = state[order] ?? each.open)),
});

if (live) {
  history.scrollRestoration = "manual";
  let lastUsed = 0;
  for (const kind of ["pointerdown", "keydown", "wheel", "touchmove"]) {
    document.addEventListener(kind, () => (lastUsed = Date.now()), { passive: true });
  }
  setInterval(() => {
    // Not under the reader's hands, and not while something is selected to be copied.
    if (document.hidden || Date.now() - lastUsed < 4000 || !getSelection().isCollapsed) return;
    const state = { scroll: scrollY };
    for (const [name, save] of Object.entries(keepers)) state[name] = save();
    try {
      sessionStorage.setItem(stateName, JSON.stringify(state));
    } catch {
      // Then the page begins at its top.
    }
    location.reload();
  }, 1000 * Number(live.content));
}
