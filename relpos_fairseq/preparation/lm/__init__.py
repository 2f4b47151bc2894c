"""What prepare_lm.py is made of.

options     the command line       pipeline    the stages
corpora     published corpora      splitting   one text into train, valid, test
reading     lines, documents       units       words, pieces, characters, bytes
vocabulary  dict.txt               encoding    text to fairseq's binaries
report      manifests, the table
"""
