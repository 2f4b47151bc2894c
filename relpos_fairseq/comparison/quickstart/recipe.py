"""The quickstart's recipe: every number that decides its result, in one place.

The sizes of the model (layers, width, heads) belong to the architecture; what is here says how to
train and to search. Flags are fairseq's own; a value of None is a flag without a value.
"""

DEFAULT_SCHEME = "m4"
MAX_UPDATE = 750  # one scheme: about three minutes on two idle cores
SEED = 1

PREPROCESS = {"--joined-dictionary": None}

TRAIN = {
    "--arch": "relpos_transformer_tiny",
    "--optimizer": "relpos_adam",
    "--adam-betas": "(0.9, 0.98)",
    "--clip-norm": 1.0,
    "--lr": 3e-3,
    "--lr-scheduler": "polynomial_decay",  # to zero at --total-num-update, which is --max-update
    "--warmup-updates": 150,
    "--criterion": "relpos_label_smoothed_cross_entropy",
    "--label-smoothing": 0.1,
    "--dropout": 0.0,
    "--max-tokens": 2048,
    # With no epoch checkpoints only the best and the last are kept; the interval's one is for an
    # interrupted first epoch. A resumed run sees the same batches as one that never stopped.
    "--no-epoch-checkpoints": None,
    "--save-interval-updates": 200,
    "--keep-interval-updates": 1,
    "--update-epoch-batch-itr": True,
    "--num-workers": 0,
    "--distributed-world-size": 1,
}

# A grammar is learned, not memorised, without dropout; a user's own text is rarely so large.
TRAIN_ON_USER_DATA = {"--dropout": 0.2}

GENERATE = {
    "--beam": 4,
    "--lenpen": 0.6,
    "--max-len-a": 1.5,
    "--max-len-b": 20,
    "--max-tokens": 4096,
    "--num-workers": 0,
    "--distributed-world-size": 1,
}

# Subword units for the user's own text: one unit per so many running words, within bounds.
BPE_WORDS_PER_UNIT = 60
BPE_UNITS = (300, 8000)


def as_arguments(flags: dict[str, object]) -> list[str]:
    """Turns a dict of flags into a command line's arguments."""
    arguments = []
    for name, value in flags.items():
        arguments.append(name)
        if value is not None:
            arguments.append(str(value))
    return arguments
