"""checkpoint_last.pt is a copy in place: a kill in between leaves half of it, and no resume."""

import os
import shutil

from fairseq.file_io import PathManager

from relpos_fairseq.mends.replacing import replaces


def copy_checkpoints_whole() -> None:
    """Copy under another name, and rename when whole."""

    @replaces(PathManager, "copy")
    def copy(original, src_path: str, dst_path: str, overwrite: bool = False):
        if PathManager.path_requires_pathmanager(dst_path):
            return original(src_path, dst_path, overwrite=overwrite)
        part = f"{dst_path}.tmp"
        shutil.copyfile(src_path, part)
        os.replace(part, dst_path)
        return dst_path
