"""The playground in a real browser: headless Chromium, which `ci/browser` installs, on real servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

sys.path += [str(Path(__file__).parents[1] / "cpu"), str(Path(__file__).parents[2] / "model_plugins/cosmos3/tests")]
import tiny_cosmos3
from conftest import Running, Serve, serve

__all__ = ["serve"]  # a fixture

QUIET = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
)
PATIENCE = 60


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    for flag in (*QUIET, "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    driver = Chrome(options, ChromeService("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


def ask(browser: Chrome, prompt: str, task: str, **settings: object) -> None:
    """Choose the task, say the prompt, set the settings, and press the button."""
    wait(browser, f"[name=task][value={task}]")
    browser.find_element(By.CSS_SELECTOR, f"[name=task][value={task}]").click()
    if settings:
        browser.execute_script("document.getElementById('more').open = true")
    for name, value in settings.items():
        field = browser.find_element(By.CSS_SELECTOR, f"#settings [name={name}]")
        if field.tag_name == "input":
            field.clear()
        field.send_keys(str(value))
    words = browser.find_element(By.ID, "prompt")
    words.clear()
    words.send_keys(prompt)
    browser.find_element(By.ID, "go").click()


def wait(browser: Chrome, css: str, true: str = "true") -> None:
    """Until there is an element for which a condition in JavaScript, on `e`, holds."""
    script = f"const e = document.querySelector({css!r}); return Boolean(e && ({true}))"
    WebDriverWait(browser, PATIENCE, 0.1).until(lambda _: browser.execute_script(script), f"{css} {true}")


def error(browser: Chrome) -> str:
    wait(browser, "#error", "!e.hidden")
    return str(browser.find_element(By.ID, "error").text)


def test_words_sound_and_pictures(browser: Chrome, serve: Serve) -> None:
    with serve("echo") as running:
        browser.get(f"{running.wait_ready().url}/playground")
        ask(browser, "hello out there", "text")
        wait(browser, "#answer pre", "e.textContent === 'hello out there'")
        ask(browser, "a red square", "image")
        wait(browser, "#answer img", "e.complete && e.naturalWidth > 8")
        ask(browser, "la la", "audio", voice="sine")
        wait(browser, "#answer audio", "e.duration > 0.1")
        ask(browser, "hello", "text", max_tokens=0)
        assert browser.execute_script("return !document.querySelector('[name=max_tokens]').checkValidity()")  # its bound is the server's
        assert browser.execute_script("return getComputedStyle(document.body).maxWidth") != "none", "it has no style"
        browser.get(f"{running.url}/playground")
        ask(browser, "  ", "image")
        assert error(browser) == "'prompt' is empty: say what the picture shows."


def test_a_key_is_asked_for_and_kept(browser: Chrome, serve: Serve) -> None:
    with serve("echo", key="secret") as running:
        browser.get(f"{running.wait_ready().url}/playground")
        assert "API key" in error(browser)
        browser.find_element(By.ID, "key").send_keys("secret")
        browser.find_element(By.ID, "prompt").send_keys("hello")
        browser.find_element(By.ID, "go").click()
        wait(browser, "#answer img", "e.complete && e.naturalWidth > 8")
        browser.refresh()
        wait(browser, "[name=task]")


@pytest.fixture(scope="module")
def cosmos3(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_cosmos3.write(tmp_path_factory.mktemp("nano"), "nano")
    with serve(str(folder), "--store", str(tmp_path_factory.mktemp("store"))) as running:
        yield running.wait_ready()


def test_a_video_is_made_and_plays(browser: Chrome, cosmos3: Running) -> None:
    browser.get(f"{cosmos3.url}/playground")
    ask(browser, "a dog", "video", size="64x96", num_frames=9, num_inference_steps=3)
    wait(browser, "#answer video", "e.videoWidth === 64 && e.videoHeight === 96 && e.currentTime > 0")


def test_a_video_that_is_cancelled_is_deleted(browser: Chrome, cosmos3: Running) -> None:
    browser.get(f"{cosmos3.url}/playground")
    ask(browser, "a dog", "video", size="64x96", num_frames=9, num_inference_steps=1000)
    wait(browser, "#progress", "!e.hidden && e.value > 0")
    browser.find_element(By.ID, "stop").click()
    wait(browser, "#go", "!e.disabled")
    WebDriverWait(browser, PATIENCE, 0.1).until(lambda _: not cosmos3.held(), "it goes on")
