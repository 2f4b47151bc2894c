"""What any long job is made of: whole files, lines, downloads, stages, manifests.

Plain Python: nothing here imports torch, fairseq or another part of the package.

    errors     one clear error            command   how a command begins and ends
    files      whole files, hashes        lines     text of any origin, line by line
    remote     what is known of a file    download  resumable, checked (transfer: one address)
    archives   tar, zip, gz, safely       manifest  what was made of what
    stages     skipped when unchanged     pool      several processes, one result
    progress   terminal or log            tables    for the eye
    tools      other programs, with a log   forks  work in a child, with a log
"""
