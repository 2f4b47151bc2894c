"""Adjectives, adverbs and function words, from English to German."""

from __future__ import annotations

ADJECTIVES = {
    "small": "klein",
    "big": "groß",
    "old": "alt",
    "young": "jung",
    "new": "neu",
    "red": "rot",
    "black": "schwarz",
    "beautiful": "schön",
    "friendly": "freundlich",
    "famous": "berühmt",
}
ADJECTIVES_OF = {
    "human": ("small", "big", "old", "young", "friendly", "famous", "beautiful"),
    "animal": ("small", "big", "old", "young", "black", "friendly", "beautiful"),
    "thing": ("small", "big", "old", "new", "red", "black", "beautiful"),
    "open": ("small", "big", "old", "new", "red", "black"),
    "place": ("small", "big", "old", "new", "beautiful", "famous"),
}
TIMES = {
    "today": "heute",
    "now": "jetzt",
    "often": "oft",
    "yesterday": "gestern",
    "tomorrow": "morgen",
    "every day": "jeden Tag",
    "in the evening": "am Abend",
}
MANNERS = {"quickly": "schnell", "slowly": "langsam", "quietly": "leise", "gladly": "gern"}
# English preposition -> German preposition and the case that it governs.
PREPOSITIONS = {
    "in": ("in", "dat"),
    "into": ("in", "acc"),
    "behind": ("hinter", "dat"),
    "in front of": ("vor", "dat"),
    "with": ("mit", "dat"),
    "without": ("ohne", "acc"),
}
CONJUNCTIONS = {"because": "weil", "although": "obwohl", "while": "während", "before": "bevor"}
COMPLEMENTIZERS = {"that": "dass", "whether": "ob"}
COORDINATORS = {"and": "und", "but": "aber"}
# English modal -> German singular and plural.
MODALS = {
    "can": ("kann", "können"),
    "must": ("muss", "müssen"),
    "should": ("soll", "sollen"),
    "want": ("will", "wollen"),
    "future": ("wird", "werden"),
}
# English subject form -> English object form, German nominative, accusative and dative.
PRONOUNS = {
    "he": ("him", "er", "ihn", "ihm"),
    "she": ("her", "sie", "sie", "ihr"),
    "we": ("us", "wir", "uns", "uns"),
    "they": ("them", "sie", "sie", "ihnen"),
}
