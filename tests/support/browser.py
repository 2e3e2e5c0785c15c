"""A headless Chromium, driven by the DevTools protocol over two pipes: no port, no further package."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress

# Text of a page, also inside shadow roots, where TensorBoard's older tabs have theirs.
DEEP_TEXT = """(function () {
  function text(node) {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (['SCRIPT', 'STYLE', 'TEMPLATE'].includes(node.nodeName)) return '';
    const style = node.nodeType === Node.ELEMENT_NODE ? getComputedStyle(node) : null;
    if (style && style.display === 'none') return '';
    const children = [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes];
    return children.map(text).join(style && style.display.startsWith('inline') ? '' : '\\n');
  }
  return (document.body ? text(document.body) : '').replace(/[ \\t]*\\n\\s*/g, '\\n');
})()"""
# All elements that match a selector, also inside shadow roots: `deep('img')` in an expression.
DEEP_QUERY = """function deep(selector, root = document) {
  const found = [...root.querySelectorAll(selector)];
  for (const node of root.querySelectorAll('*')) if (node.shadowRoot) found.push(...deep(selector, node.shadowRoot));
  return found;
}
"""


def find_chromium():
    """The path of a Chromium, None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of 1700 x 1000 pixels. profile: an empty folder, for Chromium's own files."""

    def __init__(self, path, profile):
        commands, self._to_browser = os.pipe()
        self._from_browser, answers = os.pipe()
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"),
            *(f"--user-data-dir={profile}", "--window-size=1700,1000", "about:blank"),
        ]
        # Chromium reads commands from file descriptor 3 and answers on 4.
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', path, *options]
        pipes = {"pass_fds": (commands, answers), "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(shell, **pipes, start_new_session=True)
        os.close(commands)
        os.close(answers)
        self._unread, self._number, self._session = b"", 0, {}
        (page,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        size = {"width": 1700, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method, **params):
        """The result of a command of the DevTools protocol. Events are passed over."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                chunk = os.read(self._from_browser, 1 << 20)
                assert chunk, f"Chromium has ended with {self.process.wait()}"
                self._unread += chunk
            text, _, self._unread = self._unread.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, url):
        """Load another page, or another tab of a page."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def evaluate(self, expression):
        """The value of a JavaScript expression, which may use `deep(selector)`."""
        answer = self.call("Runtime.evaluate", expression=DEEP_QUERY + expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self):
        """What the page shows."""
        return str(self.evaluate(DEEP_TEXT) or "")

    def wait_for(self, *words, limit=60):
        """The text of the page, once it has all `words`. Fails the test after `limit` seconds."""
        deadline = time.monotonic() + limit
        while True:
            shown = self.text()
            if not (missing := [word for word in words if word not in shown]):
                return shown
            assert time.monotonic() < deadline, f"the page does not show {missing}:\n{shown}"
            time.sleep(0.2)

    def screenshot(self, path, height):
        """The upper `height` pixels of the page."""
        clip = {"x": 0, "y": 0, "width": 1700, "height": height, "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", clip=clip)["data"]))

    def close(self):
        with suppress(OSError):
            os.close(self._to_browser)  # Chromium ends when nothing can send it commands
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._from_browser)
