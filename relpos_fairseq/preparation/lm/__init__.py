"""Text for language models.

settings    the choices                stages      from text to manifests
corpora     published corpora          splitting   one text into train, valid, test
reading     lines, documents           units       words, pieces, characters, bytes
vocabulary  which units there are      encoding    text to fairseq's binaries
report      manifests, the table
"""
