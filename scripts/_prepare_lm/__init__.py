"""What prepare_lm.py is made of.

corpora     published corpora           reading   pieces of text, documents, shards
units       words, pieces, characters   vocabulary  which units there are, dict.txt
encoding    text to fairseq's binaries  splitting   one text into train, valid, test
"""
