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
  const found = event.target.closest ? event.target.closest("[data-words]") : null;
  if (found) showTooltip(found.dataset.words, event.clientX, event.clientY);
  else if (!event.target.closest || !event.target.closest("[data-n]")) hideTooltip();
}

document.addEventListener("pointermove", onPoint);
document.addEventListener("pointerdown", onPoint);
document.addEventListener("scroll", hideTooltip, { passive: true });
