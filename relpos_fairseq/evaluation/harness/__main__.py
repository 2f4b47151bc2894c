"""`python -m relpos_fairseq.evaluation.harness` is `relpos-lm-eval`."""

from relpos_fairseq.evaluation.harness import main

if __name__ == "__main__":
    main()
