"""What is known of a file before it is downloaded."""

from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import describe_size


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded.

    Attributes:
        name: What the program calls it.
        urls: Where it is, the preferred mirror first.
        filename: What it is called in the folder.
        size: Its bytes, where they are known.
        sha256: Its hash, where one has been published. Without one, the hash of the first download
            is kept beside the file (`FILENAME.sha256`) and later ones must have it too.
        licence: What its use is subject to, for the eye.
        md5: Its MD5, where that has been published instead.
    """

    name: str
    urls: tuple[str, ...] | list[str]
    filename: str
    size: int | None = None
    sha256: str | None = None
    licence: str = ""
    md5: str | None = None

    def __post_init__(self) -> None:
        if Path(self.filename).name != self.filename or self.filename in ("", ".", ".."):
            raise PreparationError(f"{self.name}: not a plain file name: {self.filename!r}")

    def __str__(self) -> str:
        facts = [describe_size(self.size)] if self.size is not None else []
        facts += [f"sha256 {self.sha256}"] if self.sha256 else []
        known = f" ({', '.join(facts)})" if facts else ""
        return f"{self.filename}{known} from {self.urls[0] if self.urls else self.licence}"
