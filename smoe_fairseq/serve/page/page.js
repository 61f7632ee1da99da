// The form: languages and text, which a link can contain; the translation and its routing.

import { hide, sentence } from "./sentence.js";
import { element, level, mostOf, tagOf, title } from "./tokens.js";

const part = (id) => document.getElementById(id);
const ALL = "all";
const EXAMPLES = {
  en: ["Your strong friend will walk under the tree.", "Her two old dogs sleep beside the warm stove."],
  de: ["Zwei Kinder spielen im Garten.", "Ihre zwei alten Hunde schlafen neben dem warmen Ofen."],
  fr: ["Deux enfants jouent dans le jardin.", "Ses deux vieux chiens dorment près du poêle."],
};
let model; // the answer of GET /languages
let result = null; // the last answer of POST /translate
const layerOf = { encoder: ALL, decoder: ALL }; // name of the layer that is shown
let pending = null; // the AbortController of the current request

function nameOf(language) {
  const tag = tagOf(language);
  const names = new Intl.DisplayNames(["en"], { type: "language", fallback: "none" });
  const name = tag && (names.of(tag) ?? names.of(tag.split("-")[0])); // "fr-XX" has none
  return name ? `${name} (${language})` : language;
}

function fill(select, languages, chosen) {
  select.replaceChildren(
    ...languages.map((language) => element("option", { value: language, textContent: nameOf(language) })),
  );
  if (languages.includes(chosen)) select.value = chosen;
}

// Targets of a source: those of its directions, then those that the model was not trained for.
function targetsOf(source) {
  const trained = model.directions
    .filter((direction) => direction.startsWith(`${source}-`))
    .map((direction) => direction.slice(source.length + 1))
    .filter((language) => model.languages.includes(language));
  if (!model.any_pair) return trained;
  const others = model.languages.filter((each) => each !== source && !trained.includes(each));
  return [...trained, ...others];
}

function selectDirection(source, target) {
  part("source").value = source;
  fill(part("target"), targetsOf(source), target);
  const direction = `${source}-${part("target").value}`;
  part("unseen").hidden = model.directions.includes(direction);
  part("swap").disabled = !targetsOf(part("target").value).includes(source);
  showExamples();
}

function examplesIn(source) {
  return EXAMPLES[tagOf(source).split("-")[0]] ?? [];
}

// Before the first translation: what a stratum is, and examples in the source language.
function showExamples() {
  const sentences = examplesIn(part("source").value);
  part("empty").hidden = Boolean(result);
  part("what").hidden = !Object.keys(model.strata).length;
  part("examples").hidden = !sentences.length;
  part("examples").replaceChildren(
    "Try:",
    ...sentences.map((text) => {
      const button = element("button", { type: "button", textContent: text, lang: tagOf(part("source").value) });
      button.addEventListener("click", () => {
        part("text").value = text;
        translate();
      });
      return button;
    }),
  );
}

function showError(message) {
  part("error").textContent = message;
  part("error").hidden = !message;
}

function setBusy(busy) {
  part("form").setAttribute("aria-busy", busy);
  part("translate").setAttribute("aria-disabled", busy);
  part("status").textContent = busy ? "Translating\u2026" : "";
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: is smoe serve still running?");
  }
  const content = await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(content?.error ?? `The server answered with status ${answer.status}.`);
  if (!content) throw new Error("The answer is incomplete or not from smoe serve: reload the page.");
  return content;
}

// Ends the current request, and shows nothing of it or an earlier one beside what is asked or said now.
function forget() {
  pending?.abort();
  pending = result = null;
  setBusy(false);
  showError("");
  show();
}

async function translate() {
  const text = part("text").value.replace(/\p{Surrogate}/gu, "\ufffd"); // halves, which no link can contain
  const [source, target] = [part("source").value, part("target").value];
  showError("");
  if (!text.trim()) {
    forget();
    showError("There is no text: type a sentence.");
    part("text").focus();
    return;
  }
  history.replaceState(null, "", `#${link(source, target, text)}`);
  pending?.abort();
  const controller = (pending = new AbortController());
  setBusy(true);
  try {
    const start = performance.now();
    const answer = await request("translate", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text, source, target, routing: true, sentences: true }),
      signal: controller.signal,
    });
    const seconds = ((performance.now() - start) / 1000).toFixed(2);
    if (answer.model !== model.model) await load(); // another server was started in its place
    if (pending !== controller) return;
    result = { ...answer, ...answer.translations[0] };
    show();
    setBusy(false);
    part("status").textContent = `Translated in ${seconds} s`;
  } catch (error) {
    if (pending !== controller) return;
    forget();
    showError(error.message);
  }
}

function show() {
  hide();
  const sentences = result?.sentences ?? [];
  part("translation").lang = result ? tagOf(result.target) : "";
  part("translation").textContent = result?.translation ?? "";
  part("strata").hidden = !sentences.length;
  showExamples();
  part("sentences").replaceChildren();
  if (!sentences.length) return;
  const { encoder, decoder } = sentences[0].routing;
  const layers = [...encoder.layers, ...decoder.layers];
  showNothing(layers);
  part("view").hidden = mostOf(layers) < 2;
  showLegend(mostOf(layers));
  part("layers").replaceChildren(
    ...[chooser("encoder", "Source", encoder.layers), chooser("decoder", "Translation", decoder.layers)].filter(Boolean),
  );
  showSentences();
}

// A sentence instead of a picture, for models with one stratum or none.
function showNothing(layers) {
  let words = "";
  if (!layers.length) words = "This model is dense: every token gets the same computation, and there are no strata.";
  else if (mostOf(layers) < 2) {
    words = "This model has one stratum: each token stops once, at its experts. Point at a token to see them.";
  }
  part("nothing").textContent = words;
  part("nothing").hidden = !words;
}

function showLegend(most) {
  const swatches = Array.from({ length: most }, (_, index) => {
    return element("span", { className: `swatch level-${level(index + 1, most)}`, textContent: index + 1 });
  });
  part("legend").replaceChildren("Requested capacity:", ...swatches, "Point at a token or tap it for its experts.");
}

function chooser(side, words, layers) {
  if (layers.length < 2) return null;
  const select = element("select");
  select.append(element("option", { value: ALL, textContent: "all layers (mean)" }));
  select.append(...layers.map((each) => element("option", { value: each.name, textContent: title(each) })));
  if (layers.some((each) => each.name === layerOf[side])) select.value = layerOf[side];
  else layerOf[side] = ALL;
  select.addEventListener("change", () => {
    layerOf[side] = select.value;
    showSentences();
  });
  return element("label", { textContent: `${words}: ` }, select);
}

function showSentences() {
  hide();
  const { encoder, decoder } = result.sentences[0].routing;
  const most = mostOf([...encoder.layers, ...decoder.layers]); // of all layers, as in the legend
  part("sentences").replaceChildren(
    ...result.sentences.map(({ routing }, index) =>
      sentence(index + 1, routing, result, most, (side) =>
        routing[side].layers.filter((each) => [ALL, each.name].includes(layerOf[side])),
      ),
    ),
  );
}

// Links: #de-en:text

function link(source, target, text) {
  return `${encodeURIComponent(source)}-${encodeURIComponent(target)}:${encodeURIComponent(text)}`;
}

function followLink() {
  const match = /^#([^:]+):(.*)$/s.exec(location.hash);
  if (!match) return;
  forget();
  let direction, text;
  try {
    [direction, text] = match.slice(1).map(decodeURIComponent);
  } catch {
    showError("The link cannot be read.");
    return;
  }
  for (const source of model.languages) {
    const target = direction.slice(source.length + 1);
    if (direction.startsWith(`${source}-`) && targetsOf(source).includes(target)) {
      selectDirection(source, target);
      part("text").value = text;
      translate();
      return;
    }
  }
  showError(`The link's direction is ${direction}, which this model does not translate.`);
}

function listen() {
  part("form").addEventListener("submit", (event) => {
    event.preventDefault();
    translate();
  });
  part("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translate();
  });
  for (const id of ["source", "target"]) {
    part(id).addEventListener("change", () => {
      selectDirection(part("source").value, part("target").value);
      forget();
    });
  }
  part("swap").addEventListener("click", () => {
    selectDirection(part("target").value, part("source").value);
    const { text, translation } = result ?? {};
    if (text === part("text").value && translation) part("text").value = translation;
    forget();
  });
  addEventListener("hashchange", followLink);
}

// The server's model and its languages, of which those in the form stay selected.
async function load() {
  model = await request("languages");
  const sources = [...new Set(model.languages.filter((each) => targetsOf(each).length))];
  const strata = [...new Set(Object.values(model.strata).map((sizes) => sizes.join("-")))];
  part("model").textContent = strata.length ? `${model.model}, strata ${strata.join(", ")}` : `${model.model}, dense`;
  const [source, target] = [part("source").value, part("target").value];
  fill(part("source"), sources);
  const first = sources.find((each) => examplesIn(each).length) ?? sources[0];
  selectDirection(sources.includes(source) ? source : first, target);
}

try {
  await load();
  listen();
  followLink();
} catch (error) {
  showError(`The page has no languages yet: reload it. ${error.message}`);
}
