"""What every preparation script shares: whole files, lines, downloads, stages, manifests.

Plain Python: nothing here imports torch or fairseq.

    errors     one clear error            command   how a script begins and ends
    files      whole files, hashes        lines     text of any origin, line by line
    download   resumable, checked         archives  tar, zip, gz, safely
    stages     skipped when unchanged     manifest  what was made of what
    progress   terminal or log            pool      several processes, one result
    binarise   fairseq's binary format            pieces    sentencepiece models
"""
