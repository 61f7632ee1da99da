// The route of a sentence's tokens through the strata of one layer: a strand for each token, with a dot where
// it stops and a bridge over strata that it skips.

import { level, piece, requested } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 24; // pixels per strand
const HEAD = 40; // above the strands
const BRIDGE = 8; // radius of a bridge
const RADIUS = 9;

function shape(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A drawing of `width` pixels. `chosen(index, shape)` is called when the pointer enters a strand or taps it,
// and with null when it leaves.
export function flow(side, layer, most, width, chosen) {
  const strata = layer.strata.length;
  const labels = Math.min(120, Math.round(width * 0.27));
  const letters = Math.floor((labels - 16) / 7);
  const step = (width - labels - 36) / strata;
  const x = (column) => labels + 14 + column * step;
  const end = HEAD + side.tokens.length * ROW;
  const svg = shape("svg", { class: "flow", viewBox: `0 0 ${width} ${end + 4}`, role: "img" });
  const counts = layer.strata.map(() => 0); // tokens that stop
  for (const { stratum } of layer.stops.flat()) counts[stratum] += 1;
  const words = counts.map((count, stratum) => `${count} at stratum ${stratum + 1}`);
  svg.setAttribute("aria-label", `Of ${layer.stops.length} tokens stop ${words.join(", ")}`);

  const narrow = step < 78;
  if (narrow) svg.append(shape("text", { class: "head label", x: labels, y: 14 }, "stratum"));
  svg.append(shape("text", { class: "head label", x: labels - 12, y: 29 }, "tokens"));
  const number = side.tokens.length;
  const share = step < 7 * `${number}/${number}`.length ? "" : `/${number}`; // where there is room
  counts.forEach((count, stratum) => {
    const name = narrow ? stratum + 1 : `stratum ${stratum + 1}`;
    svg.append(shape("text", { class: "head", x: x(stratum), y: 14 }, name));
    svg.append(shape("text", { class: "head", x: x(stratum), y: 29 }, `${count}${share}`));
    svg.append(shape("line", { class: "bar", x1: x(stratum), x2: x(stratum), y1: HEAD, y2: end }));
  });
  svg.append(shape("text", { class: "head", x: x(strata), y: 14 }, "out"));

  side.tokens.forEach((token, index) => {
    const strand = shape("g", { class: `strand level-${level(requested([layer], index), most)}` });
    const y = HEAD + (index + 0.5) * ROW;
    const stops = layer.stops[index];
    const way = path(stops, y, strata, x);
    const text = piece(token);
    const short = text.length > letters ? `${text.slice(0, letters - 1)}\u2026` : text;
    strand.append(
      shape("path", { class: "hit", d: way }),
      shape("path", { d: way }),
      shape("text", { class: "label", x: labels, y: y + 4 }, short),
    );
    for (const stop of stops) {
      const at = x(stop.stratum);
      strand.append(shape("circle", { cx: at, cy: y, r: RADIUS }));
      strand.append(shape("text", { class: "expert", x: at, y: y + 4 }, stop.first));
    }
    strand.append(shape("text", { class: "count", x: x(strata) + 8, y: y + 4 }, stops.length));
    strand.addEventListener("pointerenter", () => chosen(index, strand));
    strand.addEventListener("pointerleave", () => chosen(null, strand));
    strand.addEventListener("click", () => chosen(index, strand));
    svg.append(strand);
  });
  return svg;
}

// A line from the first stratum out of the last.
function path(stops, y, strata, x) {
  let d = `M${x(0)} ${y}`;
  for (let stratum = 1; stratum < strata; stratum++) {
    if (stops.some((stop) => stop.stratum === stratum)) continue;
    d += `H${x(stratum) - BRIDGE}a${BRIDGE} ${BRIDGE} 0 0 1 ${2 * BRIDGE} 0`;
  }
  return `${d}H${x(strata)}`;
}

// Dims all strands except one; with null none.
export function point(svg, index) {
  svg.classList.toggle("choosing", index !== null);
  svg.querySelectorAll(".strand").forEach((strand, each) => strand.classList.toggle("chosen", each === index));
}
