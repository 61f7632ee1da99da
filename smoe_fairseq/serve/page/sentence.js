// One sentence and its translation: tokens of both sides, the box with the details of one, and their flow.

import { flow, point } from "./flow.js";
import { detailsOf, element, mostOf, title, tokenRow } from "./tokens.js";

const LINGER = 150; // milliseconds that the box stays, so that the pointer can enter it
const box = document.getElementById("details");
let current = null; // marks the token of the box at its side
let leaving; // the timer that hides the box

export function hide() {
  clearTimeout(leaving);
  box.hidden = true;
  current?.(null);
  current = null;
}

function leave() {
  clearTimeout(leaving);
  leaving = setTimeout(() => {
    const { activeElement } = document;
    if (activeElement.matches(".token")) activeElement.click(); // its details again
    else hide();
  }, LINGER);
}

box.addEventListener("pointerenter", () => clearTimeout(leaving));
box.addEventListener("pointerleave", leave);
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest(".token, .strand, #details")) hide();
});

// Above its anchor, so that the strands stay visible; below it if there is no room.
function show(content, anchor) {
  clearTimeout(leaving);
  box.replaceChildren(...content);
  box.hidden = false;
  const at = anchor.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  const left = Math.min(Math.max(at.left, 8), Math.max(8, width - size.width - 8));
  const above = at.top - size.height - 6;
  const below = Math.min(at.bottom + 6, Math.max(8, window.innerHeight - size.height - 8));
  const top = above > 0 ? above : below;
  box.style.left = `${left + window.scrollX}px`;
  box.style.top = `${top + window.scrollY}px`;
}

// An article. `shown(side)` returns the layers to show of each side.
export function sentence(number, routing, languages, most, shown) {
  return element(
    "article",
    { className: "sentence", ariaLabel: `Sentence ${number}` },
    sideOf(routing.encoder, "Source", languages.source, most, shown("encoder")),
    sideOf(routing.decoder, "Translation", languages.target, most, shown("decoder")),
  );
}

function sideOf(side, words, language, most, layers) {
  const part = element("section", { className: "side", ariaLabel: `${words}, token by token` });
  const pictures = [];

  function choose(index) {
    for (const picture of pictures) point(picture.firstElementChild, index);
    [...row.children].forEach((button, each) => {
      button.classList.toggle("chosen", each === index);
      if (each === index) button.setAttribute("aria-describedby", box.id);
      else button.removeAttribute("aria-describedby");
    });
  }

  // Shows a token's details; with null they go soon.
  function chosen(index, strand) {
    if (!layers.length) return;
    if (index === null) return leave();
    if (current !== choose) current?.(null);
    current = choose;
    choose(index);
    const button = row.children[index];
    const inSight = button.getBoundingClientRect().top > 0;
    show(detailsOf(side, layers, index), inSight || !strand ? button : strand);
  }

  const row = tokenRow(side, layers, most, language, chosen);
  row.setAttribute("aria-label", `Tokens: ${words.toLowerCase()}`);
  part.append(element("h3", { textContent: words }), row);
  for (const layer of layers.filter((each) => mostOf([each]) > 1)) {
    const holder = element("div");
    const caption = element("figcaption", { textContent: captionOf(layer) });
    part.append(element("figure", {}, caption, holder));
    pictures.push(holder);
    draw(holder, side, layer, most, chosen);
  }
  return part;
}

function captionOf(layer) {
  const way = layer.fixed_depth ? ", each of whose gates routes every token" : "";
  return `${title(layer)}${way}: stops, with the expert of the first choice`;
}

// Draws a picture, again whenever its width changes.
function draw(holder, side, layer, most, chosen) {
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.round(holder.clientWidth);
    if (width && width !== drawn) {
      drawn = width;
      holder.replaceChildren(flow(side, layer, most, width, chosen));
    }
  }).observe(holder);
  holder.replaceChildren(flow(side, layer, most, 480, chosen));
}
