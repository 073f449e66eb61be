"""The process that runs PDFium and OCR, which a page can crash, stall or make fill the memory. See `pdf_process`.

It reads a line of JSON, the file's bytes, then a line of JSON for each request, and writes one for each reply.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from cocktail.pdf_page import PageReader


def main() -> None:
    """Opens the file and answers requests until nobody listens any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process is interrupted and ends it
    # What a library prints is no reply.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    head = json.loads(sys.stdin.buffer.readline())
    data = sys.stdin.buffer.read(head["size"])
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    pdf, opened = open_pdf(data, head["passwords"])
    _reply(replies, opened)
    if pdf is None:
        return
    reader = PageReader(pdf, opened["has_form"])
    while True:
        request = requests.get()
        try:
            read = reader.recognize if request["ocr"] else reader.read
            _reply(replies, read(request["index"]))
        except MemoryError:
            os._exit(1)
        except (pdfium.PdfiumError, AssertionError):  # pypdfium2 asserts what PDFium promises
            _reply(replies, {"damaged": True})


def _listen(requests: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    os._exit(0)  # even from the middle of a page


def _reply(replies: TextIO, body: dict[str, Any]) -> None:
    try:
        replies.write(json.dumps(body) + "\n")
        replies.flush()
    except OSError:
        os._exit(0)


def open_pdf(data: bytes, passwords: Sequence[str | None]) -> tuple[pdfium.PdfDocument | None, dict[str, Any]]:
    """The file opened by the first password that does it, and what to reply.

    The reply holds `pages`, `is_locked` (only a password opens it), `has_form` and `is_xfa`; or `error`, which is
    "password", "security" or what PDFium says.
    """
    for password in passwords:
        try:
            pdf = pdfium.PdfDocument(data, password=password)
        except UnicodeEncodeError:
            continue  # a password with bytes that are no text cannot be the right one
        except pdfium.PdfiumError as error:
            if error.err_code == pdfium_c.FPDF_ERR_PASSWORD:
                continue
            if error.err_code == pdfium_c.FPDF_ERR_SECURITY:
                return None, {"error": "security"}
            found = re.search(r"PDFium: (.*?)(?: error)?\)", str(error))
            reason = found[1].lower() if found else str(error)
            # "Success" is what PDFium says where it has noted no error.
            return None, {"error": "no reason given" if reason == "success" else reason}
        form = pdf.get_formtype()
        # PDFium must know of a form before it loads the first page.
        with suppress(pdfium.PdfiumError):
            pdf.init_forms()
        return pdf, {
            "pages": len(pdf),
            "is_locked": password is not None,
            "has_form": form != pdfium_c.FORMTYPE_NONE,
            "is_xfa": form == pdfium_c.FORMTYPE_XFA_FULL,
        }
    return None, {"error": "password"}
