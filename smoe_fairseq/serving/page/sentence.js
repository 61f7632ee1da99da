// One sentence and its translation: tokens of both sides, the box with the details of one, and their flow.

import { flow, point } from "./flow.js";
import { detailsOf, element, mostOf, title, tokenRow } from "./tokens.js";

const box = document.getElementById("details");
let leaving; // the timer after which the box goes

function hide() {
  clearTimeout(leaving);
  box.hidden = true;
}

// The box stays while the pointer is in it, goes with Escape, and never has the focus.
box.addEventListener("pointerenter", () => clearTimeout(leaving));
box.addEventListener("pointerleave", () => box.dispatchEvent(new Event("leave")));
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());

function show(content, anchor) {
  clearTimeout(leaving);
  box.replaceChildren(...content);
  box.hidden = false;
  const at = anchor.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  const left = Math.min(Math.max(at.left, 8), Math.max(8, width - size.width - 8));
  const below = at.bottom + 6;
  const room = window.innerHeight - below >= size.height || at.top < size.height + 6;
  box.style.left = `${left + window.scrollX}px`;
  box.style.top = `${(room ? below : at.top - size.height - 6) + window.scrollY}px`;
}

// An article. `shown(side)` names the layers to show of each side, of which all are in `routing`.
export function sentence(number, routing, languages, shown) {
  const article = element("article", { className: "sentence", ariaLabel: `Sentence ${number}` });
  for (const [name, words, language] of [
    ["encoder", "Source", languages.source],
    ["decoder", "Translation", languages.target],
  ]) {
    article.append(sideOf(routing[name], words, language, shown(name)));
  }
  return article;
}

function sideOf(side, words, language, layers) {
  const part = element("section", { className: "side", ariaLabel: `${words}, token by token` });
  const pictures = [];
  let row;
  let held = null; // the token that has the focus

  function choose(index, anchor) {
    for (const button of row.children) button.classList.remove("chosen");
    for (const picture of pictures) point(picture.firstElementChild, index);
    if (index === null) return;
    row.children[index].classList.add("chosen");
    show(detailsOf(side, layers, index), anchor);
    row.children[index].setAttribute("aria-describedby", "details");
  }

  function leave() {
    leaving = setTimeout(() => {
      if (held === null) {
        choose(null);
        hide();
      } else choose(held, row.children[held]);
    }, 150);
  }

  function chosen(index, anchor, why) {
    if (!side.special.length || !layers.length) return;
    if (why === "focused") held = index;
    if (why === "blurred") held = null;
    if (index === null) leave();
    else choose(index, anchor);
  }

  row = tokenRow(side, layers, language, chosen);
  row.setAttribute("aria-label", `Tokens: ${words.toLowerCase()}`);
  box.addEventListener("leave", () => row.isConnected && leave());
  part.append(element("h3", { textContent: words }), row);
  for (const layer of layers) {
    if (mostOf([layer]) < 2) continue;
    const holder = element("div");
    const caption = element("figcaption", { textContent: captionOf(layer) });
    part.append(element("figure", {}, caption, holder));
    pictures.push(holder);
    draw(holder, side, layer, (index, strand) => chosen(index, strand, "pointed"));
  }
  return part;
}

function captionOf(layer) {
  const words = layer.fixed_depth ? "every token stops at each stratum" : "the way through the strata";
  return `${title(layer)}, ${words}; in a dot, the expert of the first choice`;
}

// Drawn anew when there is another width.
function draw(holder, side, layer, chosen) {
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.round(holder.clientWidth);
    if (width && width !== drawn) {
      drawn = width;
      holder.replaceChildren(flow(side, layer, width, chosen));
    }
  }).observe(holder);
  holder.replaceChildren(flow(side, layer, 480, chosen));
}
