"""Downloads that survive their servers: resumed, checked, from several mirrors, side by side."""

import queue
import threading
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import Hashes, describe_size, write_text
from relpos_fairseq.engine.progress import progress as progress_of
from relpos_fairseq.engine.remote import RemoteFile
from relpos_fairseq.engine.transfer import Stopped, Transfer, TransferError


def fetch(
    sources: Iterable[RemoteFile],
    folder: str | Path,
    *,
    workers: int = 4,
    from_dir: str | Path | None = None,
    progress: bool = True,
    attempts: int = 5,
    backoff: float = 0.5,
    timeout: float = 60.0,
    hashes: Hashes | None = None,
) -> dict[str, Path]:
    """Download files, or find them downloaded; all of them are complete and checked.

    Args:
        sources: What is wanted.
        folder: Where the files go; unfinished ones are `FILENAME.partial` and are resumed.
        workers: How many downloads run at a time.
        from_dir: A folder that has the files already, at any depth; nothing is downloaded then, and
            the paths returned are those in it.
        progress: Whether to show it.
        attempts: How often a broken connection is resumed without a byte of progress in between.
        backoff: Seconds before the first repetition; each later one waits twice as long.
        timeout: Seconds without a byte after which a connection counts as broken.
        hashes: Those of files that were read before.

    Returns:
        Each source's path, by name.

    Raises:
        PreparationError: Files could not be had; the message names each of them, every mirror's
            reason, and where to put files that were got elsewhere.
    """
    sources = list(sources)
    folder, hashes = Path(folder), hashes or Hashes()
    if workers < 1:
        raise PreparationError(f"workers must be >= 1, got {workers}")
    if from_dir is not None:
        return find_local(sources, Path(from_dir), hashes)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [source for source in sources if not is_complete(source, folder, hashes)]
    if wanted:
        settings = {"attempts": attempts, "backoff": backoff, "timeout": timeout}
        errors = run_transfers(wanted, folder, workers, progress, hashes, settings)
        if errors:
            raise PreparationError(explain(wanted, errors))
    return {source.name: folder / source.filename for source in sources}


def find_local(sources: list[RemoteFile], folder: Path, hashes: Hashes) -> dict[str, Path]:
    """Find files in the user's folder and check them; missing or wrong ones are an error."""
    if not folder.is_dir():
        raise PreparationError(f"{folder} is not a folder")
    found, missing = {}, []
    for source in sources:
        paths = sorted(folder.rglob(source.filename), key=lambda path: (len(path.parts), path))
        if paths:
            check_local(source, paths[0], hashes)
            found[source.name] = paths[0]
        else:
            missing.append(f"  {source}")
    if missing:
        raise PreparationError("\n".join([f"{folder} lacks files; put there:", *missing]))
    return found


def check_local(source: RemoteFile, path: Path, hashes: Hashes) -> None:
    """Check a file against what is known of its source."""
    size = path.stat().st_size
    if source.size is not None and size != source.size:
        raise PreparationError(f"{path} has {size:,} bytes, {source.size:,} expected: replace it")
    if wrong := wrong_hash(source, path, hashes):
        raise PreparationError(f"{path} has {wrong}: replace it")


def wrong_hash(source: RemoteFile, path: Path, hashes: Hashes) -> str:
    """Say which published hash a file does not have; "" where it has them."""
    for algorithm, expected in (("md5", source.md5), ("sha256", source.sha256)):
        if expected and (found := hashes.of_file(path, algorithm)) != expected:
            return f"{algorithm} {found}, {expected} expected"
    return ""


def is_complete(source: RemoteFile, folder: Path, hashes: Hashes) -> bool:
    """Return whether a file was downloaded before and is as it was then."""
    path = folder / source.filename
    pinned = read_pin(source, folder)
    if not path.is_file() or not (source.md5 or source.sha256 or pinned):
        return False
    if source.size is not None and path.stat().st_size != source.size:
        return False
    return not wrong_hash(source, path, hashes) and pinned in (None, hashes.of_file(path))


def pin_path(source: RemoteFile, folder: Path) -> Path:
    """Return where the hash of a file without a published one is kept."""
    return folder / f"{source.filename}.sha256"


def read_pin(source: RemoteFile, folder: Path) -> str | None:
    """Return the hash of the first download; None where one is published."""
    if source.md5 or source.sha256:
        return None
    path = pin_path(source, folder)
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return words[0] if words else None


def run_transfers(
    sources: list[RemoteFile], folder: Path, workers: int, progress: bool, hashes: Hashes, settings: dict
) -> dict[str, list[str]]:
    """Run transfers side by side; return the failed sources' reasons, one a mirror.

    The threads are daemons: a Ctrl-C in the main thread ends the program at once, whatever a
    server is doing; the `.partial` files are then resumed by the next run.
    """
    todo: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for source in sources:
        todo.put(source)
    stop = threading.Event()
    bar = announce(sources, folder) if progress else None
    report = bar.update if bar is not None else lambda n: None
    settings["say"] = tqdm.write if progress else lambda line: None  # keeps off the bar

    def work() -> None:
        while not stop.is_set():
            try:
                source = todo.get_nowait()
            except queue.Empty:
                return
            try:
                reasons = download(source, folder, stop, report, hashes, settings)
                done.put((source, reasons, None))
            except BaseException as error:  # handed to the main thread
                done.put((source, [], error))

    for _ in range(min(workers, len(sources))):
        threading.Thread(target=work, daemon=True).start()
    errors = {}
    try:
        for _ in sources:
            source, reasons, error = done.get()
            if error is not None:
                raise error
            if reasons:
                errors[source.name] = reasons
    finally:
        stop.set()
        if bar is not None:
            bar.close()
    return errors


def announce(sources: list[RemoteFile], folder: Path):
    """Print what is downloaded; return its progress."""
    names = ", ".join(f"{source.name} ({describe_size(source.size)})" for source in sources)
    print(f"downloading {names} to {folder}", flush=True)
    known = [source.size for source in sources]
    total = None if None in known else sum(known)
    return progress_of(total=total, description="download", unit="B")


def download(source: RemoteFile, folder: Path, stop, report, hashes: Hashes, settings: dict) -> list[str]:
    """Download one file from the first mirror that has it; return every mirror's reason if none.

    A file whose hash is wrong is not tried again in full at the same mirror, unless it was pieced
    together from an earlier run's part.
    """
    target = folder / source.filename
    pinned = read_pin(source, folder)
    expected = source.sha256 or pinned
    reasons = []
    for url in source.urls:
        transfer = Transfer(url, target, source.size, expected, stop, report, **settings)
        try:
            digest = transfer.run()
            if source.md5 and (wrong := wrong_hash(source, target, hashes)):
                target.unlink()
                raise TransferError(f"got a file with {wrong}")
        except Stopped:
            return [*reasons, "stopped"]
        except TransferError as error:
            reasons.append(f"{url}: {error}")
            if url != source.urls[-1]:
                settings["say"](f"  {source.filename}: {reasons[-1]}; asking the next address")
            continue
        if not source.md5:
            hashes.note(target, digest)
        if expected is None and not source.md5:
            write_text(pin_path(source, folder), f"{digest}  {source.filename}\n")
        return []
    if pinned and any("sha256" in reason for reason in reasons):
        pin = pin_path(source, folder)
        reasons.append(f"the first download had another hash: delete {pin} to accept a new file")
    return reasons or ["no address is known"]


def explain(sources: list[RemoteFile], errors: dict[str, list[str]]) -> str:
    """Say what could not be had, why, and what to do."""
    failed = [source for source in sources if source.name in errors]
    lines = [f"could not download {', '.join(source.filename for source in failed)}"]
    for source in failed:
        lines += [f"  {source.filename}: {reason}" for reason in errors[source.name]]
    lines.append("run the same command again to continue, or put into a folder named by --from-dir:")
    lines += [f"  {source}" for source in failed]
    return "\n".join(lines)
