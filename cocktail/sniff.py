"""What a file is, told from its content."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import PurePath

OLD_OFFICE = "an old Office document (DOC, XLS or PPT)"
DAMAGED_ZIP = "a damaged ZIP archive or Office document"
# (signature, offset, what a person calls it)
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", 0, "a PNG image"),
    (b"\xff\xd8\xff", 0, "a JPEG image"),
    (b"II*\x00", 0, "a TIFF image"),
    (b"MM\x00*", 0, "a TIFF image"),
    (b"\x1aE\xdf\xa3", 0, "a video"),
    (b"\x7fELF", 0, "a program (ELF)"),
    (b"\xca\xfe\xba\xbe", 0, "a program (Java class or Mach-O)"),
    (b"\xcf\xfa\xed\xfe", 0, "a program (Mach-O)"),
    (b"\x00asm", 0, "a program (WebAssembly)"),
    (b"\x1f\x8b", 0, "a gzip archive"),
    (b"1AY&SY", 4, "a bzip2 archive"),
    (b"\xfd7zXZ\x00", 0, "an xz archive"),
    (b"\x28\xb5\x2f\xfd", 0, "a Zstandard archive"),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7-Zip archive"),
    (b"Rar!\x1a\x07", 0, "a RAR archive"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 0, OLD_OFFICE),
    (b"{\\rtf", 0, "a rich text document (RTF)"),
    (b"%!PS", 0, "a PostScript document"),
    (b"AT&TFORM", 0, "a DjVu document"),
    (b"SQLite format 3\x00", 0, "an SQLite database"),
)
# A text may begin with these letters too; the binary formats have a NUL nearby.
_WORDS = (
    (b"GIF8", 0, "a GIF image"),
    (b"WEBP", 8, "a WebP image"),
    (b"WAVE", 8, "a WAV recording"),
    (b"AVI ", 8, "a video"),
    (b"ftyp", 4, "a video, recording or HEIC image"),
    (b"ID3", 0, "an MP3 recording"),
    (b"OggS", 0, "an Ogg recording"),
    (b"fLaC", 0, "a FLAC recording"),
    (b"MZ", 0, "a program (Windows)"),
    (b"ustar", 257, "a tar archive"),
    (b"BOOKMOBI", 60, "a Kindle book"),
    (b"PAR1", 0, "a Parquet table"),
    (b"GGUF", 0, "a GGUF model (models go to -m)"),
)
# What a person calls the formats in ZIP files, and their names in `Document.format`.
OFFICE_FORMATS = {
    "a Word document (DOCX)": "docx",
    "a PowerPoint presentation (PPTX)": "pptx",
    "an Excel workbook (XLSX)": "xlsx",
    "an EPUB book": "epub",
    "an OpenDocument text (ODT)": "odt",
    "an OpenDocument presentation (ODP)": "odp",
    "an OpenDocument spreadsheet (ODS)": "ods",
}
_KINDS = {file_format: kind for kind, file_format in OFFICE_FORMATS.items()}
_ZIP_MEMBERS = (("word/document", "docx"), ("ppt/presentation", "pptx"), ("xl/workbook", "xlsx"))
_ZIP_FOLDERS = (("word/", "docx"), ("ppt/", "pptx"), ("xl/", "xlsx"))
_ODF = b"application/vnd.oasis.opendocument."
# Templates hold the same.
_ZIP_MIMETYPES = {
    b"application/epub+zip": "epub",
    **{_ODF + word: kind for word, kind in ((b"text", "odt"), (b"presentation", "odp"), (b"spreadsheet", "ods"))},
    **{_ODF + word + b"-template": kind for word, kind in ((b"text", "odt"), (b"presentation", "odp"))},
}


def is_pdf(data: bytes, name: str) -> bool:
    """Returns whether the bytes are a PDF, intact or damaged; the name decides only where they leave a doubt."""
    # The specification lets up to 1,024 bytes stand before the header; a text about PDF also holds "%PDF-" there.
    at = data[:1029].find(b"%PDF-")
    if at >= 0 and not data[:at].strip(b"\xef\xbb\xbf\r\n\t \x00"):
        return True
    if PurePath(name).suffix.lower() == ".pdf":
        return at >= 0 or (b" obj" in data[:1024] and b"endobj" in data)
    return at >= 0 and b"startxref" in data[-2048:]


def binary_kind(data: bytes) -> str | None:
    """Returns what a person calls the binary format that the bytes begin with, None where they may be text."""
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_kind(data)
    signatures = _SIGNATURES + _WORDS if b"\x00" in data[:512] else _SIGNATURES
    return next((kind for signature, offset, kind in signatures if data.startswith(signature, offset)), None)


def _zip_kind(data: bytes) -> str:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.namelist()
            # Of a file that is cut off, what is found is another file within it.
            if members and min(item.header_offset for item in archive.infolist()) > 0:
                return DAMAGED_ZIP
            mimetype = b""
            if "mimetype" in members:
                with archive.open("mimetype") as stored:
                    mimetype = stored.read(100)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, ValueError, EOFError):
        return DAMAGED_ZIP
    if (found := _ZIP_MIMETYPES.get(mimetype.strip())) is not None:
        return _KINDS[found]
    if "META-INF/container.xml" in members:
        return _KINDS["epub"]
    # A document may have another embedded: its own main part comes before folders alone.
    for start, file_format in (*_ZIP_MEMBERS, *_ZIP_FOLDERS):
        if any(member.startswith(start) for member in members):
            return _KINDS[file_format]
    return "a ZIP archive"
