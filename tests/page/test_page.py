"""The status page in a real browser, fed by a real HTTP server: its content, and attempts to inject scripts."""

import json
import re
from itertools import pairwise

import msgspec
import pytest

from kvserver.wire.status import Status
from tests.page.browser import Browser
from tests.page.story import MIB, Story, a_status, asked
from tests.process.harness import until
from tests.rigs.status_document import a_remote

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
QUICK = "const ask = setTimeout; window.setTimeout = (what, ms) => ask(what, ms && Math.min(ms, 20));"
"""The page polls once a second; tests do not wait that long."""


@pytest.fixture
def page(browser: Browser) -> Browser:
    browser.before_each_page(QUICK)
    return browser


def shown(page: Browser, selector: str, text: str) -> None:
    """Waits for that text there."""
    until(f"{selector} to say {text!r}: {page.text('body')}", lambda: text in page.text(selector))


def test_every_figure_of_the_document_is_on_the_page(page: Browser) -> None:
    with Story() as story:
        story.tell(a_status())
        page.open(story.address)
        shown(page, "#server", "kvserver 7.5.3")
        assert page.text("#up") == "up 1 h 2 min · incarnation 11"
        assert page.text("#state") == "well"
        assert page.text("#chunks") == "1,313"
        assert page.text("#chunks-more") == "of 1,717, in 3 namespaces"
        assert page.text("#jobs") == "3"
        assert page.text("#jobs-more") == "4 leases, 6 pins, 1 session"
        assert "7.5 % of all chunks asked for so far were held, an infinite cache: 87.5 %" in page.text(
            "#hit-rate-more"
        )
        tiers = page.text("#tiers")
        for text in (
            "16.0 MiB of 64.0 MiB, 25.0\N{NO-BREAK SPACE}%",
            "4.00 MiB of it on disk as well",
            "48.0 MiB ready (12 of 16 slabs)",
        ):
            assert text in tiers
        assert "100 MiB of 400 MiB, 25.0\N{NO-BREAK SPACE}%" in tiers
        assert "/nvme/0" in tiers
        assert page.table("#movers")["1"] == ["host", "ready", "99", "1", "3", "2 threads", "a b"]
        assert page.table("#sessions")["vllm"] == ["2", "5", "attached", "1", "3", "kvclient 7"]
        assert page.table("#caches")["kv"] == ["vllm rank 2", "abababababab", "1", "direct", "mapped", "3"]
        disk = page.table("#disks")["0"]
        assert disk[0] == "takes writes"
        assert {"3.60 GB/s", "3.30 GB/s", "no limit"} < set(disk)


def test_bars_are_as_long_as_their_shares(page: Browser) -> None:
    with Story() as story:
        story.tell(a_status())
        page.open(story.address)
        shown(page, "#server", "kvserver 7.5.3")
        script = (
            "return [...document.querySelectorAll('.bar rect')].map(b => [b.x.baseVal.value, b.width.baseVal.value])"
        )
        bars = page.run(script)
        # Thousandths of the bar: used and not on disk, used and also on disk, ready and free; then the disk's own.
        assert bars == [[0, 187.5], [187.5, 62.5], [250, 500], [0, 250]]


def test_a_server_without_disks_shows_nothing_of_them(page: Browser) -> None:
    with Story() as story:
        story.tell(
            a_status(disks=[], disk_state="", shown_sessions=[], shown_caches=[], movers=[], sessions=0, caches=0)
        )
        page.open(story.address)
        shown(page, "#sessions-more", "nobody is connected")
        assert [
            page.sees(selector) for selector in ("#h-movers", "#h-disks", "#promote-rate", "#h-caches", "#h-remote")
        ] == [
            True,
            *4 * [False],
        ]
        assert "disk to DRAM" not in page.text("#moved")
        assert "none yet" in page.text("#movers-more")


def test_a_remote_store_has_a_table_and_its_state_is_said(page: Browser) -> None:
    with Story() as story:
        story.tell(a_status(remote=a_remote(nodes_left_alone=["a:1"], clears_owed=5)))
        page.open(story.address)
        shown(page, "#server", "kvserver 7.5.3")
        store = page.table("#remote")["fleet"]
        assert store[:2] == ["valkey://10.0.0.7", "usable, left alone: a:1"]
        assert store[-3:] == ["2", "17", "5"]


def test_each_of_several_remote_stores_has_a_row_with_what_it_moved(page: Browser) -> None:
    near = a_remote(name="near", counted={"read_bytes": 3 * MIB, "written_bytes": 0})
    far = a_remote(name="far", usable=False, counted={"read_bytes": 0, "written_bytes": 5 * MIB})
    with Story() as story:
        story.tell(msgspec.structs.replace(a_status(remote=near), other_remotes=[far]))
        page.open(story.address)
        shown(page, "#server", "kvserver 7.5.3")
        table = page.table("#remote")
        assert table["near"][1] == "usable"
        assert table["far"][1] == "not usable: its mover does not run"
        assert [table[name][6:8] for name in ("near", "far")] == [["3 MiB", "0 B"], ["0 B", "5 MiB"]]


def test_hits_are_counted_from_when_the_page_was_opened_and_sum_to_what_was_asked(page: Browser) -> None:
    first = asked(a_status(), seconds=0, dram=1000, miss=1000)
    second = asked(first, seconds=2, dram=600, disk=250, declined=50, unwanted=70, miss=30)
    with Story() as story:
        story.tell(first)
        page.open(story.address)
        shown(page, "#hit-rate-more", "50.0 % since the start")
        assert page.text("#hit-rate") == "–", "nothing was asked for since"
        story.tell(second)
        shown(page, "#hit-rate", "85.0 %")
        table = page.table("#results")
        assert table["DRAM"] == ["600", "60.0 %", "1,600", "53.3 %"]
        assert table["all that was asked for"] == ["1,000", "100.0 %", "3,000", "100.0 %"]
        rows = [cells for name, cells in table.items() if not name.startswith("all")]
        assert [sum(int(cells[column].replace(",", "")) for cells in rows) for column in (0, 2)] == [1000, 3000]


def test_rates_are_over_the_brains_own_time(page: Browser) -> None:
    moved = {"retrieve": 3_000_000_000, "store": 50_000, "promote": 700_000_000}
    counters = {**a_status().counters, "moved_bytes": moved, "lookups": 90}
    with Story() as story:
        story.tell(a_status())
        page.open(story.address)
        shown(page, "#server", "kvserver 7.5.3")
        story.tell(a_status(uptime_s=a_status().uptime_s + 2, counters=counters))
        shown(page, "#retrieve-rate", "1.50 GB/s")
        assert page.text("#store-rate") == "they store 25.0 kB/s"
        assert page.text("#promote-rate") == "350 MB/s"
        assert page.text("#lookup-rate") == "45.0/s"
        assert "1.50 GB/s" in page.text("#moved .legend")


def test_names_of_others_are_text_and_nothing_else(page: Browser) -> None:
    """Every text in the document that somebody else may choose."""
    plain = a_status(warnings=[HOSTILE], troubles={HOSTILE: 3}, server=HOSTILE, disk_state=HOSTILE)
    document = msgspec.to_builtins(plain)
    for entries in ("movers", "disks", "shown_sessions", "shown_caches"):
        for entry in document[entries]:
            entry.update({name: HOSTILE for name, value in entry.items() if isinstance(value, str) and name != "state"})
    document["movers"][0] |= {"facts": {HOSTILE: HOSTILE}, "state": "ready"}
    document["disks"][0]["drain"] = ""
    document["counters"][HOSTILE] = 7
    with Story() as story:
        story.tell(msgspec.convert(document, Status))
        page.open(story.address)
        shown(page, "#server", HOSTILE)
        for selector in ("#warnings", "#troubles", "#tiers", "#movers", "#disks", "#sessions", "#caches"):
            assert HOSTILE in page.run("return document.querySelector(arguments[0]).textContent", selector), selector
        assert page.run("return document.querySelectorAll('script').length") == 1
        assert page.run("return document.querySelectorAll('img').length") == 0
        assert page.run("return document.title").startswith("(1 warning) <script>")


def test_the_browser_itself_refuses_scripts_and_html_that_are_not_the_pages(page: Browser) -> None:
    """The policy's purpose: a mistake in the page's own script must not be enough."""
    with Story() as story:
        story.tell(a_status())
        page.open(story.address)
        shown(page, "#server", "kvserver 7.5.3")
        for attempt in (
            "document.body.innerHTML = '<b>x</b>'",
            "document.body.setAttribute('onclick', 'document.title = 1')",
            "document.createElement('script').textContent = 'document.title = 1'",
        ):
            tried = f"try {{ {attempt} }} catch (error) {{ return error.name }} return 'done'"
            assert page.run(tried) == "TypeError", attempt
        assert page.run("return fetch('https://127.0.0.2:1/').then(() => 'let', (error) => error.name)") == "TypeError"
        complaints = page.complaints()
        assert len([text for text in complaints if "requires 'Trusted" in text]) == 3
        assert [text for text in complaints if "Refused to connect" in text]


def test_what_is_wrong_stands_first_and_is_counted_in_the_title(page: Browser) -> None:
    with Story() as story:
        story.tell(a_status(troubles={"old": 3}))
        page.open(story.address)
        shown(page, "#state", "well")
        assert page.table("#troubles") == {"old": ["0", "3"]}
        story.tell(a_status(troubles={"old": 3, "movers ended": 2}, uptime_s=3727.0))
        shown(page, "#state", "1 trouble")
        assert page.text("#warnings") == "2 movers ended (last 2 s)"
        story.tell(a_status(warnings=["seven is wrong", "so is eight"], troubles={"old": 3}, uptime_s=3729.0))
        shown(page, "#state", "2 warnings")
        assert page.text("#warnings").splitlines()[:2] == ["seven is wrong", "so is eight"]
        assert page.run("return document.title").startswith("(2 warnings)")
        place = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
        assert page.run(place, "#warnings") < page.run(place, ".tiles")
        story.tell(a_status(uptime_s=3731.0))
        shown(page, "#state", "well")
        assert page.run("return document.querySelector('#warnings').hidden")


def test_a_server_that_does_not_answer_is_said_and_found_again(page: Browser) -> None:
    story = Story()
    story.tell(a_status())
    page.open(story.address)
    shown(page, "#state", "well")
    story.close()
    shown(page, "#state", "no answer")
    assert "The server does not answer" in page.text("#warnings")
    assert page.text("#chunks") == "1,313", "the last that was said"
    assert page.run("return document.body.classList.contains('stale')")
    with Story(story.port) as other:
        shown(page, "#warnings", "the brain has not published anything yet")
        other.tell(a_status(incarnation=12, uptime_s=1.0, chunks=17))
        shown(page, "#state", "well")
        assert page.text("#chunks") == "17"
    shown(page, "#state", "no answer")


def test_a_brain_that_says_nothing_new_is_called_stuck(page: Browser) -> None:
    with Story() as story:
        story.tell(a_status())
        page.open(story.address)
        shown(page, "#state", "stuck")
        story.tell(a_status(uptime_s=3799.0))
        shown(page, "#state", "well")


def test_another_brain_gives_no_negative_rates(page: Browser) -> None:
    moved = {**a_status().counters, "moved_bytes": {"retrieve": 3_000_000_000}}
    before = asked(a_status(counters=moved, uptime_s=2.5), seconds=0, dram=1_000_000)
    after = asked(a_status(incarnation=12, uptime_s=3.0), seconds=0, dram=30, miss=10)
    with Story() as story:
        story.tell(before)
        page.open(story.address)
        shown(page, "#hit-rate-more", "100.0 % since the start")
        story.tell(after)
        shown(page, "#hit-rate-more", "75.0 % since the start")
        story.tell(asked(after, seconds=2, dram=10, miss=30))
        shown(page, "#hit-rate", "25.0 %")
        assert "-" not in page.text("#results")
        drawn = page.run(
            "return [...document.querySelectorAll('.line')].map((line) => line.getAttribute('d')).join('')"
        )
        heights = [float(text) for text in re.findall(r"(?:V|M\d+ )([-\d.]+)", drawn)]
        assert heights
        assert all(0 <= height <= 98.5 for height in heights), "no line leaves its chart"


def test_charts_are_read_out_by_keys(page: Browser) -> None:
    first = a_status()
    with Story() as story:
        story.tell(first)
        page.open(story.address)
        shown(page, "#state", "well")
        story.tell(asked(first, seconds=2, dram=75, miss=25))
        shown(page, "#hits .legend", "75.0 %")
        page.run("document.querySelector('#hits .plot svg').focus()")
        page.press("Left")
        assert " to " in page.text("#hits .when"), "the last piece of time"
        label = page.run("return document.querySelector('#hits .plot svg').getAttribute('aria-label')")
        assert label.startswith("Tokens asked for, by where they were, ")
        page.press("Escape")
        assert page.text("#hits .when").startswith("the last ")
        assert page.run("return document.querySelector('#hits .plot path').getAttribute('d')").startswith("M")


def test_everything_is_reached_by_the_keyboard(page: Browser) -> None:
    with Story() as story:
        story.tell(a_status(troubles={"old": 3}))
        page.open(story.address)
        shown(page, "#state", "well")
        page.run("document.body.tabIndex = -1; document.body.focus()")
        focused = []
        for _ in range(30):
            page.press("Tab")
            focused.append(page.run("const e = document.activeElement; return e.ariaLabel || e.textContent || e.value"))
            if "readyz" in focused:
                break
        assert "readyz" in focused
        assert len(set(focused)) > 12, "charts, tables, and what folds"
        page.run("document.querySelector('input[value=\"3600\"]').focus()")
        page.press("Space")
        shown(page, "#span-more", "so far")
        page.run("document.querySelector('summary').focus()")
        page.press("Space")
        assert page.run("return document.querySelector('details').open")


@pytest.mark.parametrize("width", [320, 375, 480, 1280])
def test_no_width_makes_the_page_scroll_sideways(page: Browser, width: int) -> None:
    with Story() as story:
        story.tell(a_wide_status())
        page.resize(width, 700)
        page.open(story.address)
        shown(page, "#state", "1 warning")
        assert page.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [320, 375])
def test_on_a_telephone_nothing_scrolls_sideways_and_no_word_is_cut(page: Browser, width: int) -> None:
    """Each text is inside of what shows it, no table has to be moved, and no column is narrower than its words."""
    with Story() as story:
        story.tell(a_wide_status())
        page.resize(width, 800)
        page.open(story.address)
        shown(page, "#state", "1 warning")
        story.tell(asked(a_wide_status(), seconds=3, dram=123_456_789, unwanted=7_654_321, declined=17, miss=1_234))
        shown(page, "#results", "123,456,789")
        page.run("document.querySelector('details').open = true")
        assert json.loads(page.run(CUT)) == []


CUT = """
const found = [];
for (const node of document.querySelectorAll('main *, header *')) {
  if (!node.getClientRects().length || node.closest('svg')) continue;
  const say = (why) => found.push([why, node.tagName, node.className, node.textContent.slice(0, 60)]);
  if (node.clientWidth && node.scrollWidth > node.clientWidth + 1) say('wider than its box');
  if (node.getBoundingClientRect().right > innerWidth + 1) say('beyond the edge');
  for (const text of node.childNodes) {
    if (text.nodeType !== 3) continue;
    for (const word of text.textContent.matchAll(/(?<!\\S)\\S{2,20}(?!\\S)/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) say(`broken: ${word[0]}`);
    }
  }
}
return JSON.stringify(found);
"""


def a_wide_status() -> Status:
    """A status with long names in every place that others fill."""
    status = a_status()
    facts = {
        "library": "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "driver": "570.195.03",
        "kernels": "compiled for sm_90",
    }
    disk = msgspec.structs.replace(
        status.disks[0],
        directory="/mnt/nvme-" + "7" * 40,
        takes_writes=False,
        problem="io",
        said="takes no writes: 5 reads or writes in a row failed",
        faults=1_234,
        daily_write_bytes=7 << 40,
        budget_bytes=3 << 30,
    )
    return msgspec.structs.replace(
        status,
        incarnation=1795590608521079434,
        warnings=["/" + "x" * 300],
        troubles={"stores cut short: a rank has never registered": 1_234_567},
        disks=[disk, disk],
        movers=[msgspec.structs.replace(status.movers[0], facts=facts, device="cuda:GPU-8a1b2c3d@0000:17:00.0")],
        shown_sessions=[msgspec.structs.replace(status.shown_sessions[0], engine="llama-3.1-70b-instruct-replica-17")],
        shown_caches=[
            msgspec.structs.replace(status.shown_caches[0], owner="llama-3.1-70b-instruct-replica-17 rank 15")
        ],
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(page: Browser, scheme: str) -> None:
    """Each text has a contrast of at least 4.5 (WCAG AA) with its background."""
    with Story() as story:
        story.tell(a_status(warnings=["seven"], troubles={"old": 3}))
        page.prefer(scheme)
        page.open(story.address)
        shown(page, "#state", "1 warning")
        pairs = json.loads(page.run(CONTRASTS))
        assert len(pairs) > 30
        weak = [(text, ink, ground) for text, ink, ground in pairs if contrast(ink, ground) < 4.5]
        assert weak == []
        ground = page.run("return getComputedStyle(document.body).backgroundColor")
        assert (luminance(numbers(ground)) > 0.5) == (scheme == "light")


CONTRASTS = """
const found = [];
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.getClientRects().length || node.tagName === 'SCRIPT') continue;
  let behind = node;
  const ground = (element) => getComputedStyle(element).backgroundColor;
  while (/, 0\\)$|transparent/.test(ground(behind))) behind = behind.parentElement;
  found.push([node.textContent.slice(0, 40), getComputedStyle(node).color, ground(behind)]);
}
return JSON.stringify(found);
"""


def numbers(colour: str) -> list[float]:
    """The components of rgb(...) or color(srgb ...), from 0 to 1."""
    texts = colour[colour.index("(") + 1 : -1].replace("srgb", "").replace(",", " ").replace("/", " ").split()[:3]
    return [float(text) / (1 if colour.startswith("color(") else 255) for text in texts]


def luminance(colour: list[float]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(numbers(one)), luminance(numbers(other))))
    return (high + 0.05) / (low + 0.05)


def test_polling_slows_down_while_nobody_answers_and_has_a_bound(page: Browser) -> None:
    """Checks the page's own waits."""
    page.before_each_page(
        "window.waits = []; const later = window.setTimeout;"
        "window.setTimeout = (what, ms) => { waits.push(ms); return later(what, ms && Math.min(ms, 5)); };"
    )
    story = Story()
    story.tell(a_status())
    page.open(story.address)
    shown(page, "#state", "well")
    story.close()
    until("ten questions in vain", lambda: page.run("return waits.filter((ms) => ms === 8000).length") >= 10)
    waits = page.run("return waits")
    failing = waits[waits.index(2000) :]
    assert failing[:3] == [2000, 4000, 8000]
    assert all(before <= after for before, after in pairwise(failing))
    assert set(waits) == {1000, 2000, 4000, 8000}


def test_memory_of_the_page_is_bounded(page: Browser) -> None:
    """Adds ten hours of samples to the page's own store as fast as possible."""
    with Story() as story:
        story.tell(a_status(arena=msgspec.structs.replace(a_status().arena, used_bytes=4 * MIB)))
        page.open(story.address)
        shown(page, "#state", "well")
        script = page.run("return document.querySelector('script').textContent")
        words, _, rest = script.partition("const samples = []")
        store = rest[: rest.index("/** The last sample at or before")]
        check = (
            f"{words[words.rindex('const KEPT_MS') :]} const samples = [] {store};"
            "const status = {counters: {lookups: 0}, troubles: {}, disks: [], incarnation: 1};"
            "for (let s = 0; s < 36000; s++) keep({...status, uptime_s: s}, 1e12 + 1000 * s);"
            "return [samples.length, samples[0].ms - 1e12, samples.at(-1).ms - samples.at(-2).ms]"
        )
        length, first_ms, last_step_ms = page.run(check)
        assert length < 800
        assert 36_000_000 - 3_750_000 < first_ms < 36_000_000 - 3_600_000
        assert last_step_ms == 1000
