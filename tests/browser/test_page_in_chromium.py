"""The page as people use it, in Chromium, with the fake engine behind a real server.

With JAXPAGE_SCREENSHOTS=FOLDER, pictures of both colour schemes on a desk and on a phone are left there.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fake_engine import CHAT_TEMPLATE, FakeEngine, Script
from served import served, wait_until

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig
from jaxpage.text.chat_template import ChatTemplates

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: ./scripts/test_browser")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: ./scripts/test_browser")

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
GUARD_MS = 30_000
LONG = "one two three four five six seven eight nine ten " * 4
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Ends with the module: while it runs, no other test of this process could start an event loop."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=400)
    engine.is_ready = True
    engine.scripts = {"slowly": Script(text=LONG, delay=0.03), "forever": Script(text=LONG, stall_after=5)}
    return engine


@pytest.fixture
def open_page(browser: Any, engine: FakeEngine) -> Iterator[OpenPage]:
    """Opens the page, and fails if anything on it has thrown, was refused by its policy, or asked someone else."""
    faults: list[str] = []
    with served(build_app(engine, ServerConfig(served_model_name=("fake-model",)))) as url:  # type: ignore[arg-type]

        def open_page(*, is_ready: bool = True, **options: Any) -> Any:
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(GUARD_MS)
            expect.set_options(timeout=GUARD_MS)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda said: faults.append(said.text) if "Policy" in said.text else None)
            page.on("request", lambda sent: None if sent.url.startswith(url) else faults.append(sent.url))
            page.goto(url)
            if is_ready:
                expect(page.locator("#state")).to_have_text("ready")
            return page

        yield open_page
        for context in browser.contexts:
            context.close()
    assert faults == []


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answer(page: Any) -> Any:
    return page.locator(".message.assistant .body").last


def test_a_message_is_sent_by_enter_and_its_answer_streams_in(open_page: OpenPage, engine: FakeEngine) -> None:
    page = open_page()
    ask(page, "tell me slowly")
    expect(answer(page)).to_have_text(re.compile("^one two"))
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    assert len(answer(page).inner_text()) < len(LONG)
    assert page.get_by_role("log").get_attribute("aria-busy") == "true"
    expect(page.get_by_text("Answer complete")).to_be_attached()
    assert answer(page).text_content() == LONG
    assert page.get_by_role("log").get_attribute("aria-busy") == "false"
    expect(page.locator(".note").last).to_contain_text(f"{len(LONG)} out")
    expect(page.get_by_label("Message")).to_be_focused()


def test_reasoning_streams_in_above_the_answer_folded_until_someone_opens_it(
    open_page: OpenPage, engine: FakeEngine
) -> None:
    """It is no part of what is copied, or of what the next question goes with."""
    engine.chat_templates = ChatTemplates({"default": CHAT_TEMPLATE + "{# <think></think> #}"})
    page = open_page()
    thoughts, reply = "I wonder. " * 8, "It rains. " * 8
    whole = f"<think>{thoughts}</think>{reply}"
    engine.scripts = {"stuck": Script(text=whole, stall_after=40), "": Script(text=whole)}
    seen = []
    page.on("request", lambda sent: seen.append(sent.post_data_json) if sent.method == "POST" else None)
    ask(page, "get stuck")
    summary = page.locator(".reasoning summary")
    expect(summary).to_have_text("Reasoning…")
    expect(page.locator(".thoughts")).to_be_hidden()
    summary.press("Enter")
    expect(page.locator(".thoughts")).to_be_visible()
    expect(page.locator(".thoughts")).to_contain_text("I wonder. I wonder.")
    assert answer(page).text_content() == ""
    page.keyboard.press("Escape")
    expect(page.locator(".message")).to_have_count(0)
    ask(page, "hello")
    expect(page.get_by_text("Answer complete")).to_be_attached()
    expect(summary).to_have_text("Reasoning")
    assert page.locator(".thoughts").text_content() == thoughts.rstrip()
    assert answer(page).text_content() == reply.rstrip()
    ask(page, "and now?")
    expect(page.locator(".reasoning")).to_have_count(2)
    assert seen[-1]["messages"][1] == {"role": "assistant", "content": reply.rstrip()}


def test_the_next_question_goes_with_all_that_was_said_and_a_new_chat_with_nothing(
    open_page: OpenPage, engine: FakeEngine
) -> None:
    page = open_page()
    seen = []
    page.on("request", lambda sent: seen.append(sent.post_data_json) if sent.method == "POST" else None)
    page.get_by_text("Sampling and system prompt").click()
    page.get_by_label("System prompt").fill("be brief")
    for question in ("first", "second"):
        ask(page, question)
        expect(page.locator(".note").last).to_contain_text("out")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    ask(page, "third")
    expect(page.locator(".note").last).to_contain_text("out")
    roles = [[message["role"] for message in body["messages"]] for body in seen]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert seen[1]["messages"][2]["content"] == Script().text


def test_what_is_filled_in_of_the_sampling_fields_is_what_the_engine_gets(
    open_page: OpenPage, engine: FakeEngine
) -> None:
    page = open_page()
    page.get_by_text("Sampling and system prompt").click()
    for label, value in (("Temperature", "0.3"), ("Top p", ""), ("Max tokens", "5"), ("Seed", "7")):
        page.get_by_label(label).fill(value)
    ask(page, "hello")
    expect(page.locator(".note").last).to_contain_text("ended at max tokens")
    params: Any = engine.seen_params[-1]
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.3, 1.0, 5, 7)


def test_shift_enter_breaks_the_line(open_page: OpenPage) -> None:
    page = open_page()
    box = page.get_by_label("Message")
    box.press_sequentially("a")
    box.press("Shift+Enter")
    box.press_sequentially("b")
    expect(box).to_have_value("a\nb")
    expect(page.locator(".message")).to_have_count(0)


@pytest.mark.parametrize("by", ["button", "escape"])
def test_an_answer_is_stopped_and_frees_what_it_held(open_page: OpenPage, engine: FakeEngine, by: str) -> None:
    page = open_page()
    ask(page, "talk forever")
    expect(answer(page)).to_have_text(LONG[:5].strip())
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".note").last).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    wait_until(lambda: engine.num_open == 0, "the engine holds nothing")
    assert answer(page).text_content() == LONG[:5]


def test_an_error_is_shown_its_field_marked_and_the_question_given_back(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_text("Sampling and system prompt").click()
    page.get_by_label("Temperature").fill("-3")
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("temperature is -3")
    expect(page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Message")).to_have_value("hello")
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Message").press("Enter")
    expect(answer(page)).to_have_text(Script().text)
    expect(page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "false")


def test_an_error_in_the_middle_of_an_answer_is_shown_below_what_came(open_page: OpenPage, engine: FakeEngine) -> None:
    engine.scripts["break"] = Script(text="abcdef", fail_after=3)
    page = open_page()
    ask(page, "break")
    expect(page.get_by_role("alert")).to_contain_text("internal server error")
    assert answer(page).text_content() == "abc"
    expect(page.locator(".note").last).to_have_text("ended early")


def test_an_answer_is_copied(open_page: OpenPage) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    ask(page, "hello")
    expect(page.locator(".note").last).to_contain_text("out")
    page.get_by_role("button", name="Copy").last.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == Script().text


def test_an_answer_is_copied_where_the_browser_gives_no_clipboard(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    ask(page, "hello")
    expect(page.locator(".note").last).to_contain_text("out")
    page.get_by_role("button", name="Copy").last.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("getSelection().toString()") == Script().text


def pixels(page: Any) -> str:
    data: str = page.evaluate("document.getElementById('map').toDataURL()")
    return data


def test_the_map_and_the_numbers_move_while_the_engine_runs(open_page: OpenPage, engine: FakeEngine) -> None:
    page = open_page()
    expect(page.locator("#map-text")).to_contain_text("600 blocks: 0 held")
    at_rest = pixels(page)
    ask(page, "tell me slowly")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#requests tbody th")).to_contain_text("(this chat)")
    early = pixels(page)
    blocks = page.locator("#requests tbody td").last
    before = int(blocks.inner_text())
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9]"))
    wait_until(lambda: int(blocks.inner_text()) > before, "the request holds more blocks")
    late = pixels(page)
    assert len({at_rest, early, late}) == 3
    expect(page.locator("#ttft")).to_have_text("250 ms")
    expect(page.locator("#hits")).to_have_text("25 %")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#requests")).to_be_hidden()
    expect(page.locator("#map-text")).to_contain_text("600 blocks: 0 held")
    assert pixels(page) == at_rest


def test_shared_blocks_are_counted_and_each_request_has_its_colour(open_page: OpenPage, engine: FakeEngine) -> None:
    first, second = open_page(), open_page()
    for page in (first, second):
        ask(page, "talk forever")
    expect(first.locator("#requests tbody tr")).to_have_count(2)
    expect(first.locator("#map-text")).to_contain_text("1 of them shared")
    keys = first.locator("#requests .key")
    colours = {keys.nth(index).evaluate("key => getComputedStyle(key).backgroundColor") for index in range(2)}
    assert len(colours) == 2
    for page in (first, second):
        page.keyboard.press("Escape")
    expect(first.locator("#running")).to_have_text("0")


def test_the_arrow_keys_tell_one_block_after_the_other(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#map-text")).to_contain_text("600 blocks")
    page.locator("#map").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#map-cell")).to_have_text("Block 1: free, kept for prompts that begin alike.")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#map-cell")).to_have_text("Block 2: free.")
    page.locator("#map").hover(position={"x": 2, "y": 2})
    expect(page.locator("#map-cell")).to_contain_text("Block 1:")


def test_a_map_of_thousands_of_blocks_is_painted_between_two_frames(open_page: OpenPage, engine: FakeEngine) -> None:
    page = open_page()
    milliseconds = page.evaluate(
        """async () => {
            const { BlockMap } = await import(new URL("web/block_map.js", document.baseURI));
            const map = new BlockMap();
            await new Promise((laidOut) => requestAnimationFrame(() => requestAnimationFrame(laidOut)));
            const blocks = (shift) => ({
                num_blocks: 20000, num_used: 20000, num_shared: 0, num_cached: 0,
                requests: Array.from({ length: 50 }, (_, index) => ({ id: String(index), num_sequences: 1,
                    num_tokens: 1, num_cached_tokens: 0, num_blocks: 400 })),
                runs: Array.from({ length: 20000 }, (_, cell) => [1, (cell + (cell < 200 ? shift : 0)) % 50, 1, 0]),
            });
            map.show(blocks(0), "");
            const started = performance.now();
            for (let shift = 1; shift <= 20; shift++) map.show(blocks(shift), "");
            return (performance.now() - started) / 20;
        }"""
    )
    assert milliseconds < 50, "a poll has 500"


def test_the_page_tells_that_the_model_loads_and_opens_when_it_is_ready(
    open_page: OpenPage, engine: FakeEngine
) -> None:
    engine.is_ready = False
    page = open_page(is_ready=False)
    expect(page.locator("#notice")).to_contain_text("The model is loading")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    engine.is_ready = True
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#notice")).to_be_hidden()
    ask(page, "hello")
    expect(answer(page)).to_have_text(Script().text)


def test_the_page_tells_that_the_engine_has_died(open_page: OpenPage, engine: FakeEngine) -> None:
    page = open_page()
    engine.is_dead = True
    expect(page.locator("#notice")).to_contain_text("The engine has died")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_the_page_tells_that_nobody_answers_and_goes_on_when_somebody_does(open_page: OpenPage) -> None:
    page = open_page()
    page.route("**/live", lambda route: route.abort())
    expect(page.locator("#notice")).to_contain_text("The server does not answer")
    page.unroute("**/live")
    expect(page.locator("#state")).to_have_text("ready")


def test_a_page_that_nobody_sees_asks_nothing(open_page: OpenPage) -> None:
    page = open_page()
    asked = []
    page.on("request", lambda sent: asked.append(sent.url))
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.wait_for_timeout(700)  # what was under way is over
    asked.clear()
    page.wait_for_timeout(1500)
    assert asked == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(1500)
    assert len(asked) >= 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("device", "width", "height"), [("desk", 1280, 900), ("phone", 360, 740)])
def test_it_fits_its_window_in_both_schemes(
    open_page: OpenPage, engine: FakeEngine, scheme: str, device: str, width: int, height: int
) -> None:
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    page, other = open_page(**options), open_page()
    ask(other, "talk forever and do not stop before the map has been looked at")
    ask(page, "hello")
    expect(page.locator(".note").last).to_contain_text("out")
    ask(page, "talk forever")
    page.get_by_text("Sampling and system prompt").click()
    expect(page.locator("#requests tbody tr")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour))) > 3 * 128) == (scheme == "light")
    if folder := os.environ.get("JAXPAGE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{device}-{scheme}.png", full_page=True)
    for used in (page, other):
        used.keyboard.press("Escape")
    expect(page.locator("#running")).to_have_text("0")


def test_a_server_with_keys_asks_for_one_and_tells_nothing_without(browser: Any, engine: FakeEngine) -> None:
    with served(build_app(engine, ServerConfig(api_key=("right",)))) as url:  # type: ignore[arg-type]
        page = browser.new_context().new_page()
        page.set_default_timeout(GUARD_MS)
        page.goto(url)
        for key, state in (("wrong", "locked"), ("right", "ready")):
            expect(page.locator("#state")).to_have_text("locked")
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use").click()
            expect(page.locator("#state")).to_have_text(state)
        expect(page.get_by_label("API key")).to_be_hidden()
        ask(page, "hello")
        expect(page.get_by_text("Answer complete")).to_be_attached()
        page.context.close()
