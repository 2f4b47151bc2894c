"""A made-up pair of languages, whose sentences and translations a grammar gives."""
