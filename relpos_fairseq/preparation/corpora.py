"""Published corpora: addresses, sizes, hashes, and which files of an archive are which split.

WikiText (Merity 2016): the SHA-256 of torchtext 0.8 and DataDeps. enwik8 (Mahoney): the page of the Large Text
Compression Benchmark has the MD5 of the archive's only member (a1fa5ffddb56f4953e226637dabbb36a); the hash below is
the archive's own, which many projects pin.

WMT: Chen2021 (section 4.3) train on WMT 2015 English-German and WMT 2018 English-Czech and test on newstest2015;
Vaswani et al. 2017 and Shaw et al. 2018 on WMT 2014 English-German and English-French, tested on newstest2014. Sizes
and SHA-256 of archives are published by TensorFlow Datasets (tensorflow_datasets/url_checksums); test sets, their
addresses and MD5 by sacrebleu. Where no hash is published, the manifest records the hash of the file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.io.downloads import RemoteFile
from relpos_fairseq.io.errors import UserError

S3 = "https://s3.amazonaws.com/research.metamind.io/wikitext"
SMERITY = "https://wikitext.smerity.com"


@dataclass(frozen=True)
class PublishedCorpus:
    """A corpus for language models."""

    archive: RemoteFile
    members: dict[str, str]  # each split's file in the archive; only "text" where there are no splits
    level: str  # the level at which it is usually read
    split: str | None = None  # the usual --shares of its one text; None where the archive has splits


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


@dataclass(frozen=True)
class ParallelCorpus:
    """A part of a training set, or a test set."""

    name: str  # as the table and the manifest call it
    archive: RemoteFile | None  # None for a folder that the user names (CzEng)
    members: dict[str, str]  # language to the member of the archive that holds it
    expanded: int = 0  # bytes of the two members together, roughly, for --dry-run


def statmt(name: str, place: str, size: int, sha256: str, licence: str) -> RemoteFile:
    """Return an archive of statmt.org's, which serves it by https and by http."""
    urls = (f"https://{place}", f"http://{place}")
    return RemoteFile(name, urls, Path(place).name, size, sha256, licence)


EUROPARL = statmt(
    "europarl-v7",
    "www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
    657_632_379,
    "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    "see statmt.org/europarl",
)
COMMON_CRAWL = statmt(
    "commoncrawl",
    "www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    918_311_367,
    "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    "see statmt.org/wmt13/translation-task.html",
)
NEWS_V9 = statmt(
    "news-commentary-v9",
    "www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
    80_418_416,
    "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
    "see casmacat.eu/corpus/news-commentary.html",
)
UNITED_NATIONS = statmt(
    "un",
    "www.statmt.org/wmt13/training-parallel-un.tgz",
    2_365_634_246,
    "29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47",
    "see statmt.org/wmt13/translation-task.html",
)
GIGA_FREN = statmt(
    "giga-fren",
    "www.statmt.org/wmt10/training-giga-fren.tar",
    2_595_102_720,
    "3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a",
    "see statmt.org/wmt10/translation-task.html",
)
NEWS_V10 = statmt(
    "news-commentary-v10",
    "www.statmt.org/wmt15/training-parallel-nc-v10.tgz",
    125_136_590,
    "11e053e7ea29e87e69a1ad05e61cb559820947ecec144ea8c1d6cf05017c9602",
    "see casmacat.eu/corpus/news-commentary.html",
)
NEWS_V13 = statmt(
    "news-commentary-v13",
    "data.statmt.org/wmt18/translation-task/training-parallel-nc-v13.tgz",
    113_157_482,
    "17992b7e919cfb754c60f4e754148bc23b80706ad0ed7b34150831a554b40c91",
    "see casmacat.eu/corpus/news-commentary.html",
)
PARACRAWL_CS = RemoteFile(
    "paracrawl-v1",
    (
        "https://s3.amazonaws.com/web-language-models/paracrawl/release1/"
        "paracrawl-release1.en-cs.zipporah0-dedup-clean.tgz",
    ),
    "paracrawl-release1.en-cs.zipporah0-dedup-clean.tgz",
    size=299_052_360,
    sha256="221f88bac9f48ed6ef94bad5490890066f508be00e8f102cf19edf2a1413c350",
    licence="CC0, see paracrawl.eu",
)
CZENG = ParallelCorpus("czeng", None, {})


def both(prefix: str, language: str) -> dict[str, str]:
    """Return the members of a language and English."""
    return {side: f"{prefix}.{side}" for side in (language, "en")}


def news_task(language: str, commentary: RemoteFile, version: str, folder: str) -> tuple[ParallelCorpus, ...]:
    """Return the corpora of every year's task: Europarl, Common Crawl and News Commentary."""
    pair = f"{language}-en"
    return (
        ParallelCorpus(
            "europarl-v7",
            EUROPARL,
            both(f"training/europarl-v7.{pair}", language),
            160_000_000 if language == "cs" else 600_000_000,
        ),
        ParallelCorpus(
            "commoncrawl",
            COMMON_CRAWL,
            both(f"commoncrawl.{pair}", language),
            45_000_000 if language == "cs" else 800_000_000,
        ),
        ParallelCorpus(
            commentary.name, commentary, both(f"{folder}/news-commentary-{version}.{pair}", language), 70_000_000
        ),
    )


TRAINING = {
    ("wmt14", "de"): news_task("de", NEWS_V9, "v9", "training"),
    ("wmt14", "fr"): (
        *news_task("fr", NEWS_V9, "v9", "training"),
        ParallelCorpus("un", UNITED_NATIONS, both("un/undoc.2000.fr-en", "fr"), 4_100_000_000),
        ParallelCorpus(
            "giga-fren",
            GIGA_FREN,
            {side: f"giga-fren.release2.fixed.{side}.gz" for side in ("fr", "en")},
            2_600_000_000,
        ),
    ),
    ("wmt15", "de"): news_task("de", NEWS_V10, "v10", "training"),
    ("wmt18", "cs"): (
        *news_task("cs", NEWS_V13, "v13", "training-parallel-nc-v13"),
        ParallelCorpus(
            "paracrawl-v1", PARACRAWL_CS, both("paracrawl-release1.en-cs.zipporah0-dedup-clean", "cs"), 800_000_000
        ),
        CZENG,
    ),
}
SEGMENT = re.compile(r"<seg.*?>(.*)</seg>.*?")


def training_set(year: str, source: str, target: str) -> tuple[ParallelCorpus, ...]:
    """Return the corpora of a year's training set."""
    other = target if source == "en" else source
    if "en" not in (source, target) or (year, other) not in TRAINING:
        known = ", ".join(f"{y} en-{lang}, {y} {lang}-en" for y, lang in TRAINING)
        raise UserError(
            f"no training set is known for {year} {source}-{target}: choose one of {known}, "
            "or give your own parallel files with --from-dir"
        )
    return TRAINING[year, other]


def test_set(name: str, source: str, target: str) -> ParallelCorpus:
    """Return a newstest as sacrebleu declares it: newstest2015 is its wmt15."""
    from sacrebleu.dataset import DATASETS  # takes longer to import than --help may

    dataset = DATASETS.get(name.replace("newstest20", "wmt"))
    pair = f"{source}-{target}"
    if dataset is None or pair not in dataset.langpairs or not dataset.md5:
        raise UserError(f"sacrebleu has no test set {name} for {pair}: try newstest2015")
    url = dataset.data[0]
    filename = f"{dataset.name.replace('/', '.')}.{Path(url).name}"  # there is a wmt14/full
    known = f"sacrebleu {dataset.name}"
    archive = RemoteFile(known, (url,), filename, licence="see statmt.org", md5=dataset.md5[0])
    members = dict(zip((source, target), dataset.langpairs[pair], strict=False))
    return ParallelCorpus(name, archive, members)


def segments(sgml: str) -> list[str]:
    """Return an SGML test set's sentences, as sacrebleu gives them (it unescapes nothing)."""
    lines = (line for line in sgml.split("\n") if line.startswith("<seg "))
    return [" ".join(SEGMENT.sub(r"\1", line).split()) for line in lines]
