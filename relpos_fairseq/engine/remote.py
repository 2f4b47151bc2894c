"""What is known of a file before it is downloaded."""

from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import describe_size


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded."""

    name: str  # what the program calls it
    urls: tuple[str, ...] | list[str]  # where it is, the preferred mirror first
    filename: str  # what it is called in the folder
    size: int | None = None  # its bytes, where they are known
    # its hash, where one has been published. Without one, the hash of the first download is kept
    # beside the file (`FILENAME.sha256`) and later ones must have it too
    sha256: str | None = None
    licence: str = ""  # what its use is subject to, for the eye
    md5: str | None = None  # its MD5, where that has been published instead

    def __post_init__(self) -> None:
        if Path(self.filename).name != self.filename or self.filename in ("", ".", ".."):
            raise PreparationError(f"{self.name}: not a plain file name: {self.filename!r}")

    def __str__(self) -> str:
        facts = [describe_size(self.size)] if self.size is not None else []
        facts += [f"sha256 {self.sha256}"] if self.sha256 else []
        known = f" ({', '.join(facts)})" if facts else ""
        return f"{self.filename}{known} from {self.urls[0] if self.urls else self.licence}"
