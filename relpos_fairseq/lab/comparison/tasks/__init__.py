"""Tasks that schemes are compared on; every module of this folder is searched for kinds of them."""
