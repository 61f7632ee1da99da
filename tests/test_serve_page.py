"""The page of ``smoe serve`` in a headless Chromium: as it is seen, pointed at and typed into.

Where there is no Chromium, all is skipped: ``apt-get install chromium``, or ``CHROMIUM=/path/to/it``.
"""

import json
import os
import shutil
import signal
from contextlib import suppress

import fairseq  # noqa: F401  (by which torch takes its checkpoints)
import pytest
from handmade import ROUTES
from sampling import soak
from serving import Serving

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
PHONE, DESKTOP = (390, 844), (1280, 900)
SENTENCE = "aa0 aa1 aa2 aa5"  # of these classes, by the gates of `handmade`
CLASSES = [3, 0, 1, 2, 2, 3]  # with the language's token and the end of sentence
EXPECTED = [str(len(ROUTES[kind])) for kind in CLASSES]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(three_languages, gates_by_hand):
    with Serving(gates_by_hand, "--data", three_languages) as serving:
        yield serving


@pytest.fixture(scope="module")
def talking(three_languages, multilingual):
    """The same model before its gates were fixed: it translates to words, if to few."""
    with Serving(multilingual, "--data", three_languages) as serving:
        yield serving


@pytest.fixture
def opened(browser):
    """Opens pages; whatever they ask for of elsewhere, or complain of, fails the test at its end.

    ``answers`` are given in place of the server's.
    """
    contexts, wrong = [], []

    def open_page(
        serving, link="", size=DESKTOP, colours="light", touch=False, quiet=True, **answers
    ):
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=colours, has_touch=touch
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30000)
        page.on("request", lambda r: r.url.startswith(serving.url) or wrong.append(r.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        if quiet:
            page.on("console", lambda m: m.type in ("log", "info") or wrong.append(m.text))
        for path, answer in answers.items():
            page.route(
                f"**/{path}", lambda route, request, content=answer: route.fulfill(**content)
            )
        page.goto(f"{serving.url}/{link}")
        page.wait_for_selector("#source option, #error:not([hidden])", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def numbers(page, side="Source"):
    """The strata that the tokens of a side asked for, as they stand under the tokens."""
    return page.locator(f"section[aria-label^={side}] .token .number").all_inner_texts()


def translated(page):
    page.wait_for_selector(".token")
    return page


def test_type_and_touch(server, opened):
    page = opened(server, size=PHONE, touch=True)
    page.get_by_label("From", exact=True).select_option("aa")
    page.get_by_label("To", exact=True).select_option("cc")
    assert page.locator("#unseen").is_hidden()
    page.get_by_label("Text").fill(SENTENCE)
    page.get_by_role("button", name="Translate", exact=True).click()
    translated(page)
    assert numbers(page) == EXPECTED
    shown = page.locator("section[aria-label^=Source] .token .piece").all_inner_texts()
    assert shown == ["__cc__", *SENTENCE.split(), "</s>"]
    levels = page.locator("section[aria-label^=Source] .token").evaluate_all(
        "tokens => tokens.map(t => getComputedStyle(t).backgroundColor)"
    )
    assert len(set(levels)) == len(set(EXPECTED))  # a colour for each number
    assert page.locator("#legend .swatch").all_inner_texts() == ["1", "2", "3", "4"]
    assert "Translated in" in page.locator("#status").inner_text()
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide == [PHONE[0], PHONE[0]]  # nothing to scroll sideways
    page.locator(".token").nth(1).tap()
    assert details(page)[0] == "aa0"
    page.locator("h1").tap()
    page.wait_for_selector("#details", state="hidden")


def test_translations_are_the_servers(talking, opened):
    texts = ["aa0 aa1 .", "aa2 aa1 .", "aa4"]
    expected = [each["translation"] for each in talking.translate("aa", "bb", *texts)]
    assert all(expected)
    page = opened(talking)
    page.get_by_label("From", exact=True).select_option("aa")
    page.get_by_label("To", exact=True).select_option("bb")
    page.get_by_label("Text").fill("{}  {}\n\n{}".format(*texts))
    page.get_by_role("button", name="Translate", exact=True).click()
    translated(page)
    region = page.get_by_role("region", name="Translation", exact=True)
    assert region.inner_text() == "{}  {}\n\n{}".format(*expected)
    assert region.get_attribute("aria-live") == "polite" and region.get_attribute("lang") == "bb"
    assert page.locator("article").count() == 3


def details(page):
    page.wait_for_selector("#details:not([hidden])")
    return page.locator("#details").inner_text().replace("\u202f", " ").split("\n")


def test_flow_experts_and_weights_by_pointer(server, opened):
    page = translated(opened(server, f"#aa-bb:{SENTENCE}"))
    flows = page.locator("section[aria-label^=Source] svg.flow")
    assert flows.count() == 2  # a picture for each layer
    for n in range(2):
        flow = flows.nth(n)
        assert flow.locator(".strand").count() == len(CLASSES)
        for index, kind in enumerate(CLASSES):
            experts = flow.locator(".strand").nth(index).locator(".expert").all_text_contents()
            assert experts == [str(expert) for expert in ROUTES[kind].values()]
        heads = flow.locator(".head").all_text_contents()
        assert heads[1:-1:2] == [f"stratum {i}" for i in range(1, 5)] and heads[-1] == "out"
        assert heads[2:-1:2] == ["6/6", "3/6", "4/6", "3/6"]
    flows.first.locator(".strand").nth(2).locator(".expert").first.hover()
    assert page.locator(".token.chosen .piece").all_inner_texts() == ["aa1"]
    assert "choosing" in flows.first.get_attribute("class")
    answer = server.translate("aa", "bb", SENTENCE, routing=True)[0]["routing"]["encoder"]
    page.locator(".token").nth(2).hover()  # aa1: past stratum 2
    lines = details(page)
    assert lines[0] == "aa1" and "encoder layer 1: 3 of 4 strata" in lines
    text = " ".join(lines)
    for layer in answer["layers"]:
        for stop in layer["stops"][2]:
            for each in stop["experts"]:
                assert f"expert {each['expert']} {round(each['weight'] * 100)} %" in text
    assert text.count("skipped") == 2  # a stratum in each of two layers
    page.mouse.move(5, 5)
    page.wait_for_selector("#details", state="hidden")
    assert page.locator(".chosen").count() == 0
    page.locator("section[aria-label^=Source] .token").nth(1).focus()
    page.locator("section[aria-label^=Translation] .token").first.hover()
    assert details(page)[0] != "aa0"
    page.mouse.move(5, 5)  # the focused token comes back
    sync_api.expect(page.locator("#details h4")).to_have_text("aa0")
    assert page.locator(".token.chosen .piece").all_inner_texts() == ["aa0"]


def test_by_keyboard_alone(server, opened):
    page = opened(server)
    page.get_by_label("Text").focus()
    page.keyboard.type(SENTENCE)
    page.keyboard.press("Control+Enter")
    translated(page)
    for _ in range(2):
        page.keyboard.press("Tab")  # past the button
    while not page.evaluate("document.activeElement.classList.contains('token')"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert details(page)[0] == "aa0"
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "details"
    assert page.evaluate("document.activeElement.ariaLabel") == "aa0: 1 of 4 strata"
    page.keyboard.press("End")
    assert details(page)[0] == "</s>"
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    unnamed = page.locator("select, textarea, button").evaluate_all(
        "all => all.filter(e => !(e.labels?.length || e.ariaLabel || e.innerText.trim())).length"
    )
    assert unnamed == 0


def test_links_can_be_shared(talking, opened):
    page = opened(talking)
    page.get_by_label("From", exact=True).select_option("bb")
    page.get_by_label("To", exact=True).select_option("aa")
    text = "bb1 %#&: <img src=x onerror=document.title=1>\nbb3"
    page.get_by_label("Text").fill(text)
    page.keyboard.press("Control+Enter")
    translated(page)
    assert page.locator("article").count() == 2  # a sentence per line
    assert page.locator("main img").count() == 0 and page.title() != "1"
    other = translated(opened(talking, page.url[len(talking.url) + 1 :]))
    assert other.locator("#text").input_value() == text
    assert other.locator("#source").input_value() == "bb"
    assert other.locator("#target").input_value() == "aa"
    same = [p.locator("#translation").inner_text() for p in (page, other)]
    assert same[0] == same[1] != ""
    wrong = opened(talking, "#xx-aa:text")
    assert "xx-aa" in wrong.get_by_role("alert").inner_text()


def test_errors_are_seen(three_languages, gates_by_hand, opened):
    with Serving(gates_by_hand, "--data", three_languages, "--max-tokens", 5) as serving:
        page = opened(serving, "#aa-bb:aa1", quiet=False)  # a browser logs each status from 400 on
        translated(page)
        page.get_by_label("Text").fill(" ")
        page.keyboard.press("Control+Enter")
        alert = page.get_by_role("alert")
        assert "no text" in alert.inner_text()
        page.get_by_label("Text").fill("aa1 " * 6)
        page.keyboard.press("Control+Enter")
        sync_api.expect(alert).to_contain_text("at most 5")
        assert page.locator(".token").count() == 0  # nothing old beside it
        serving.stop(signal.SIGKILL)
        page.get_by_label("Text").fill("aa1")
        page.keyboard.press("Control+Enter")
        sync_api.expect(alert).to_contain_text("does not answer")
        assert page.locator("#status").inner_text() == ""


def answer_of(server, change=None) -> dict:
    """The answer to `SENTENCE`, for `opened`; ``change`` is called with the routing of each side."""
    asked = {"text": SENTENCE, "source": "aa", "target": "bb", "routing": True, "sentences": True}
    _, content = server.post(**asked)
    for side in content["translations"][0]["sentences"][0]["routing"].values():
        if change:
            change(side)
    return {"json": content}


def translation(page):
    return page.get_by_role("region", name="Translation", exact=True)


DOORS = {  # what the user does while a text is translated or its translation is shown
    "swap": lambda page: page.get_by_role("button", name="Swap the languages").click(),
    "to": lambda page: page.get_by_label("To", exact=True).select_option("cc"),
    "no text": lambda page: (page.get_by_label("Text").fill(" "), submit(page)),
    "a link that cannot be read": lambda page: page.evaluate("location.hash = '#%:a'"),
}


def submit(page):
    page.get_by_label("Text").press("Control+Enter")


@pytest.mark.parametrize("door", ["swap", "to", *map(soak, list(DOORS)[2:])])
def test_nothing_stays_or_comes_beside_another_question(talking, opened, door):
    page = translated(opened(talking, f"#aa-bb:{SENTENCE}"))
    assert translation(page).inner_text()
    held = []
    page.route("**/translate", lambda route: held.append(route))
    with page.expect_request("**/translate"):
        submit(page)
    page.wait_for_selector("form[aria-busy=true]")
    while not held:  # the handler is called a little later than the request is seen
        page.wait_for_timeout(10)
    DOORS[door](page)
    sync_api.expect(page.locator(".token")).to_have_count(0)
    with suppress(sync_api.Error):  # the page has given it up
        held[0].fulfill(**answer_of(talking))
    page.wait_for_timeout(200)
    assert page.locator(".token").count() == 0 and translation(page).inner_text() == ""
    assert page.locator("#status").inner_text() == ""
    assert page.locator("form[aria-busy=true]").count() == 0


def test_swap_takes_the_translation_but_no_text_that_was_typed_since(talking, opened):
    page = translated(opened(talking, f"#aa-bb:{SENTENCE}"))
    text, swap = page.get_by_label("Text"), page.get_by_role("button", name="Swap the languages")
    text.fill("bb3")
    swap.click()
    assert page.get_by_label("From", exact=True).input_value() == "bb"
    assert text.input_value() == "bb3"
    submit(page)
    translated(page)
    found = translation(page).inner_text()
    swap.click()
    assert page.get_by_label("From", exact=True).input_value() == "aa"
    assert text.input_value() == found != ""


def colours(locator) -> list[tuple]:
    """Number and colour of each."""
    return locator.evaluate_all(
        "all => all.map(e => [e.lastChild.textContent, getComputedStyle(e).backgroundColor])"
    )


def test_a_number_has_one_colour(server, opened):
    """Where the sides have different strata, too."""

    def halve(side):
        for layer in side["layers"] if len(side["tokens"]) == len(CLASSES) else []:
            layer["strata"] = [2, 2]
            of_both = [[s for s in stops if s["stratum"] < 2] for stops in layer["stops"]]
            layer["stops"] = [[s | {"experts": []} for s in stops] for stops in of_both]

    page = translated(opened(server, f"#aa-bb:{SENTENCE}", translate=answer_of(server, halve)))
    legend = dict(colours(page.locator("#legend .swatch")))
    assert len(set(legend.values())) == len(legend) == 4
    found = dict(colours(page.locator("section[aria-label^=Source] .token")))
    assert found == {number: legend[number] for number in ("1", "2")}
    page.locator("#layers select").first.select_option(index=1)  # one layer
    assert dict(colours(page.locator("section[aria-label^=Source] .token"))) == found
    strand = page.locator("section[aria-label^=Source] .strand").nth(3)  # of a token with 2 stops
    level = page.locator("#legend .swatch").nth(1).get_attribute("class").split()[-1]
    assert level in strand.get_attribute("class")
    page.locator(".token").first.focus()
    assert "no expert" in " ".join(details(page))


def test_languages_have_names(server, opened):
    codes = {"eng_Latn": "English", "zho_Hans": "Chinese", "fr_XX": "French", "ger": "German"}
    codes |= {"a.b": "a.b"}
    offered = server.get("/languages") | {"languages": [*codes], "directions": [], "any_pair": True}
    page = opened(server, languages={"json": offered}, translate=answer_of(server))
    names = page.locator("#source option").all_inner_texts()
    for name, (code, expected) in zip(names, codes.items(), strict=True):
        assert expected in name and code in name
    examples = page.locator("#examples button")
    assert examples.first.get_attribute("lang") == "en-Latn"  # as browsers name it
    page.get_by_label("From", exact=True).select_option("ger")
    assert examples.first.get_attribute("lang") == "de"


def test_another_model_in_the_servers_place(server, opened):
    offered = server.get("/languages")
    other = {"model": "other", "languages": ["bb", "aa"], "directions": ["aa-bb", "bb-aa"]}
    page = opened(server, languages={"json": offered | other | {"any_pair": False}})
    assert page.locator("#model").inner_text().startswith("other")
    page.unroute("**/languages")
    page.get_by_label("From", exact=True).select_option("aa")
    page.get_by_label("Text").fill(SENTENCE)
    submit(page)
    translated(page)
    assert page.locator("#model").inner_text().startswith(offered["model"])
    languages = [page.get_by_label(name, exact=True) for name in ("From", "To")]
    assert [each.input_value() for each in languages] == ["aa", "bb"]
    assert [each.locator("option").count() for each in languages] == [3, 2]


def test_other_answers_are_told(server, opened):
    login = {"body": "<html>", "content_type": "text/html"}
    page = opened(server, "#aa-bb:aa1", translate=login)
    alert = page.get_by_role("alert")
    sync_api.expect(alert).to_contain_text("smoe serve")
    page.unroute("**/translate")
    page.evaluate("document.getElementById('text').value = 'aa1 \\ud83d'")  # half an emoji
    submit(page)
    translated(page)
    stopping = {"status": 503, "body": json.dumps({"error": "the server is stopping"})}
    alert = opened(server, quiet=False, languages=stopping).get_by_role("alert")
    assert "the server is stopping" in alert.inner_text() and "reload" in alert.inner_text()


def test_rows_from_right_to_left(server, opened):
    def translate(side):
        side["tokens"] = [
            token if special else "\u2581\u0645" * (n + 1)
            for n, (token, special) in enumerate(zip(side["tokens"], side["special"]))
        ]

    page = translated(opened(server, f"#aa-bb:{SENTENCE}", translate=answer_of(server, translate)))
    tokens = page.locator("section[aria-label^=Source] .token")
    lefts = tokens.evaluate_all("all => all.map(e => e.getBoundingClientRect().left)")
    assert lefts == sorted(lefts, reverse=True)
    tokens.first.press("ArrowLeft")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")


@pytest.mark.soak
def test_light_and_dark_can_be_read(server, opened):
    """Text on each colour, by the contrast that WCAG asks for (4.5)."""
    backs = set()
    for colours in ("light", "dark"):
        page = translated(opened(server, f"#aa-bb:{SENTENCE}", colours=colours))
        pairs = page.evaluate(
            """() => [...document.querySelectorAll('.swatch, .token, body, #model, button[type=submit]')]
            .map(e => [e, getComputedStyle(e)])
            .map(([e, s]) => [s.color, s.backgroundColor === 'rgba(0, 0, 0, 0)'
                ? getComputedStyle(document.body).backgroundColor : s.backgroundColor])
            .concat([0, 1, 2, 3, 4].map(level => {  // numbers in the circles of strands
                const strand = document.querySelector('.strand');
                strand.setAttribute('class', `strand level-${level}`);
                return ['.expert', 'circle'].map(e => getComputedStyle(strand.querySelector(e)).fill);
            }))"""
        )
        for pair in pairs:
            low, high = sorted(map(luminance, pair))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (colours, pair)
        backs.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backs) == 2


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
