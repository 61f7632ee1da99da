// Tokens as buttons in the colour of their requested capacity, and the details of one of them.

const LEVELS = 5;
const WORD_BEGINS = "\u2581"; // sentencepiece's mark
const THIN_SPACE = "\u2009"; // shown instead
// The first letter is Hebrew, Arabic or another that is read so.
const RIGHT_TO_LEFT = /^\P{L}*[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
const OPEN_BOX = "\u2423"; // shown for a token that consists only of the mark

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// A language's code as browsers know it: "en-Latn" of "eng_Latn"; empty for what is no code.
export function tagOf(language) {
  try {
    return new Intl.Locale(language.replaceAll("_", "-")).baseName;
  } catch {
    return "";
  }
}

// "encoder.layer.1" -> "encoder layer 1"
export function title(layer) {
  return layer.name.replaceAll(".", " ");
}

// The mean requested capacity of a token over the layers.
export function requested(layers, token) {
  return layers.reduce((sum, layer) => sum + layer.stops[token].length, 0) / layers.length;
}

export function mostOf(layers) {
  return Math.max(1, ...layers.map((layer) => layer.strata.length));
}

// The number of a colour in page.css.
export function level(value, most) {
  return most > 1 ? Math.round(((value - 1) / (most - 1)) * (LEVELS - 1)) : 0;
}

function shortNumber(value) {
  return Number.isInteger(value) ? String(value) : value.toFixed(1);
}

export function piece(token) {
  return token.replaceAll(WORD_BEGINS, THIN_SPACE).trim() || OPEN_BOX;
}

function spoken(token) {
  return piece(token) === OPEN_BOX ? "space" : piece(token);
}

// A row of one side's tokens: one tab stop; arrow keys move within it. `chosen(index)` is called when a token
// is pointed at, tapped or focused, and with null when the pointer or focus leaves.
export function tokenRow(side, layers, most, language, chosen) {
  const pieces = side.tokens.some((token) => token.startsWith(WORD_BEGINS));
  const text = side.tokens.filter((_, index) => !side.special[index]).join("");
  const dir = RIGHT_TO_LEFT.test(text) ? "rtl" : "ltr";
  const row = element("div", { className: "tokens", role: "group", dir });
  side.tokens.forEach((token, index) => {
    const button = element("button", { type: "button", className: "token" });
    button.tabIndex = index ? -1 : 0;
    const shown = element("span", { className: "piece", textContent: piece(token), dir: "auto" });
    button.append(shown);
    if (side.special[index]) button.classList.add("special");
    else shown.lang = tagOf(language);
    if (!pieces || side.special[index] || token.startsWith(WORD_BEGINS)) button.classList.add("begins");
    if (layers.length) {
      const value = requested(layers, index);
      button.classList.add(`level-${level(value, most)}`);
      button.append(element("span", { className: "number", textContent: shortNumber(value) }));
      const words = `${spoken(token)}: ${shortNumber(value)} of ${mostOf(layers)} strata`;
      button.setAttribute("aria-label", words);
    }
    button.addEventListener("pointerenter", (event) => {
      if (event.pointerType === "mouse") chosen(index);
    });
    button.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") chosen(null);
    });
    button.addEventListener("focus", () => chosen(index));
    button.addEventListener("blur", () => chosen(null));
    button.addEventListener("click", () => {
      button.focus(); // which not all browsers do
      chosen(index);
    });
    row.append(button);
  });
  row.addEventListener("keydown", moveFocus);
  return row;
}

function moveFocus(event) {
  const buttons = [...event.currentTarget.children];
  const current = buttons.indexOf(document.activeElement);
  const last = buttons.length - 1;
  const step = event.currentTarget.dir === "rtl" ? -1 : 1;
  const next = { ArrowRight: current + step, ArrowLeft: current - step, Home: 0, End: last }[event.key];
  if (current < 0 || next === undefined) return;
  event.preventDefault();
  const button = buttons[Math.min(Math.max(next, 0), last)];
  for (const each of buttons) each.tabIndex = each === button ? 0 : -1;
  button.focus();
}

// The content of the box: a token's experts and weights, by layer and stratum.
export function detailsOf(side, layers, index) {
  const parts = [element("h4", { textContent: spoken(side.tokens[index]) })];
  for (const layer of layers) {
    const stops = layer.stops[index];
    const count = `${title(layer)}: ${stops.length} of ${layer.strata.length} strata`;
    const table = element("table");
    layer.strata.forEach((size, stratum) => {
      const stop = stops.find((each) => each.stratum === stratum);
      const cell = element("td");
      if (!stop) cell.append("skipped");
      else if (!stop.experts.length) cell.append("no expert of a stratum");
      else cell.append(...stop.experts.map(share));
      const head = element("th", { scope: "row", textContent: `stratum ${stratum + 1}` });
      table.append(element("tr", {}, head, cell));
    });
    parts.push(element("h5", { textContent: count }), table);
  }
  return parts;
}

function share({ expert, weight }) {
  const bar = element("span", { className: "bar" });
  bar.style.width = `${weight * 100}%`;
  return element(
    "div",
    { className: "share" },
    element("span", { textContent: `expert ${expert}` }),
    element("b", { textContent: `${Math.round(weight * 100)}\u202f%` }),
    element("span", { className: "track" }, bar),
  );
}
