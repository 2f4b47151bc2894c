"""Published corpora: where they are, their published hashes, and which files are which split.

WikiText (Merity 2016): the SHA-256 of torchtext 0.8 and DataDeps. enwik8 (Mahoney): the hash of the
archive's only member is on the page of the Large Text Compression Benchmark (MD5
a1fa5ffddb56f4953e226637dabbb36a), the one below is the archive's own, as many projects pin it.
"""

from dataclasses import dataclass

from relpos_fairseq.engine.remote import RemoteFile

S3 = "https://s3.amazonaws.com/research.metamind.io/wikitext"
SMERITY = "https://wikitext.smerity.com"


@dataclass(frozen=True)
class PublishedCorpus:
    """A corpus."""

    archive: RemoteFile
    # each split's file in the archive; only "text" where there are no splits
    members: dict[str, str]
    level: str  # its usual level
    split: str | None = None  # how one text is split; None where the archive has splits


def wikitext(name: str, sha256: str) -> PublishedCorpus:
    """Return one of the two WikiText corpora."""
    filename = f"{name}-v1.zip"
    archive = RemoteFile(
        name,
        (f"{S3}/{filename}", f"{SMERITY}/{filename}"),
        filename,
        sha256=sha256,
        licence="Creative Commons BY-SA 3.0",
    )
    members = {split: f"{name}/wiki.{split}.tokens" for split in ("train", "valid", "test")}
    return PublishedCorpus(archive, members, "word")


CORPORA = {
    "wikitext-103": wikitext("wikitext-103", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "wikitext-2": wikitext("wikitext-2", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "enwik8": PublishedCorpus(
        RemoteFile(
            "enwik8",
            ("https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"),
            "enwik8.zip",
            size=36_445_475,
            sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            licence="Wikipedia text: Creative Commons BY-SA",
        ),
        {"text": "enwik8"},
        "byte",
        "0.9,0.05,0.05",
    ),
}
