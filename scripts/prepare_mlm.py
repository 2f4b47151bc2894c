"""`relpos prepare mlm` under the name of a script."""

from relpos_fairseq.cli import door

if __name__ == "__main__":
    door("prepare", "mlm")
